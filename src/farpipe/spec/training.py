"""How the model is trained, on which data."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from farpipe.spec.part import Count, Flag, Natural, NonNegative, Part, Positive, Text, fault
from farpipe.strict import finite

Precision = Literal["bf16", "fp16", "fp32"]


def _beta(value: Any) -> float:
    number = finite(value)
    if number >= 1:
        raise ValueError(f"must be less than 1, found {value}")
    return number


def _or_none(value: Any) -> Any:
    """TOML has no null: there the word none switches clipping off."""
    return None if value is None or value == "none" else finite(value, exclusive=True)


Beta = Annotated[float, BeforeValidator(_beta)]


class Training(Part):
    """One way of training: what an optimizer step is, in which precision, with which optimizer settings."""

    sequence_length: Count
    """Tokens of one sequence."""
    global_batch: Count
    """Sequences in one optimizer step, over all data-parallel replicas."""
    microbatch_size: Count | None = None
    """Sequences in one microbatch; None leaves it to the planner."""
    num_steps: Count = 100
    precision: Precision = "bf16"
    """Of weights and activations; fp16 and bf16 keep float32 master weights in the optimizer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass: none, attention's, all but a layer's input."""
    zero1: Flag = False
    """Optimizer state is divided over the data-parallel replicas."""
    sequence_parallel: Flag = False
    """Norms and dropout are divided over the tensor-parallel devices as well."""
    flash_attention: Flag = True
    """Attention never keeps the matrix of scores."""
    learning_rate: Positive = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: NonNegative = 0.1
    clip_norm: Annotated[Positive | None, BeforeValidator(_or_none)] = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    seed: Natural = 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.microbatch_size is not None and self.global_batch % self.microbatch_size:
            raise fault(f"{self.microbatch_size} does not divide global_batch {self.global_batch}", "microbatch_size")
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.sequence_length * self.global_batch

    @property
    def num_bytes_per_param(self) -> int:
        """Bytes that a parameter surely takes on its device: weight, gradient and AdamW's state.

        Two 16-bit figures beside float32 master weight and two moments, or four float32 figures (ZeRO, arXiv
        1910.02054, section 3.1). What ZeRO-1 divides over the replicas is left out, for they may be many.
        """
        weight_and_gradient = 8 if self.precision == "fp32" else 4
        return weight_and_gradient if self.zero1 else 16


class Data(Part):
    """The text to train on."""

    source: Text = "stdlib"
    """``stdlib`` is the source code of Python's standard library; anything else is a file or folder."""
    format: Literal["bytes"] = "bytes"
    """How text becomes tokens: one token per byte, 256 of them."""
