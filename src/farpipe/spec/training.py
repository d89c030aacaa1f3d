"""Training of the model: batches, precision, optimizer, data."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from farpipe.spec.part import Count, Flag, Natural, NonNegative, Part, Positive, Share, Text, fault
from farpipe.spec.recompute import RecomputeChoice
from farpipe.strict import finite

Precision = Literal["bf16", "fp16", "fp32"]
ContextExchange = Literal["ring", "ulysses"]
"""Method of context parallelism: keys and values go round, or tokens are exchanged for heads."""
Zero = Literal[0, 1, 2, 3]
"""State divided among the replicas of one site (Rajbhandari et al., arXiv 1910.02054): 0 nothing, 1 the optimizer's
state, 2 gradients too, 3 parameters too (FSDP), which are gathered layer by layer."""
Rate = Literal[Precision, "tf32", "fp8", "mxfp8"]
"""Number formats in which a device has a rate."""
Matmul = Literal["same", "tf32", "fp8", "mxfp8"]
"""Number format of matrix products: the training's precision, or narrower numbers; sums stay in 32 bit."""
WireType = Literal["none", "bf16", "fp8", "int8"]
"""Numbers that activations and their gradients are rounded to between sites."""


def _or_none(value: Any) -> Any:
    """TOML has no null: there the word none switches clipping off."""
    return None if value is None or value == "none" else finite(value, exclusive=True)


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected 'auto' or 0 to 3, found a flag")
    return value


class Training(Part):
    """Settings of a training: what an optimizer step is, its precision, the optimizer."""

    sequence_length: Count
    """Tokens of one sequence."""
    global_batch: Count
    """Sequences in one optimizer step, over all data-parallel replicas."""
    microbatch_size: Count | None = None
    """Sequences in one microbatch; None leaves it to the planner."""
    num_steps: Count = 100
    precision: Precision = "bf16"
    """Of weights and activations; fp16 and bf16 keep float32 master weights in the optimizer."""
    recompute: RecomputeChoice = "auto"
    """Recomputation in every stage; ``auto`` leaves it to the planner, which decides for each stage."""
    wire_type: WireType = "none"
    """Number format to which activations and their gradients are rounded between sites: fewer bytes, less exact."""
    zero: Annotated[Literal["auto"] | Zero, BeforeValidator(_no_flag)] = "auto"
    """Stage of ZeRO; ``auto`` leaves it to the planner. `zero1 = true` is the same as 1."""
    sequence_parallel: Literal["auto"] | Flag = "auto"
    """Norms and dropout are divided over the tensor-parallel devices as well; ``auto`` leaves it to the planner."""
    flash_attention: Flag = True
    """Attention never keeps the matrix of scores."""
    matmul: Matmul = "same"
    """Narrower numbers in matrix products of the layers than `precision` says."""
    kernels: Literal["fused", "eager"] = "fused"
    """Kernels of what lies between matrix products: Megatron-LM's or torch.compile's, or one for each operation."""
    cuda_graphs: Flag = False
    """True if layers are replayed from CUDA graphs, so that the host does not launch them."""
    dropout: Flag = False
    """True if activations and attention are dropped out, with a mask of one byte for each number."""
    overlap: Flag = True
    """Replicas' collectives run beside the rank's own computation where the device lets them (Megatron-LM's
    ``--overlap-grad-reduce`` and ``--overlap-param-gather``, FSDP)."""
    learning_rate: Positive = 3e-4
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegative = 0.1
    clip_norm: Annotated[Positive | None, BeforeValidator(_or_none)] = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    seed: Natural = 0
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises in equal parts to `learning_rate`."""
    decay: Literal["none", "cosine"] = "none"
    """Course of the learning rate after warm-up: stay, or fall along half a cosine to `final_learning_rate`."""
    decay_steps: Natural = 0
    """The step at which it has fallen completely; 0: the end of the run."""
    final_learning_rate: NonNegative = 0.0
    evaluate_every_steps: Natural = 0
    """Steps between two evaluations on text that is held out; 0: none."""
    evaluation_batches: Count = 1
    """Batches, each as large as a step's, in one evaluation."""
    checkpoint_every_steps: Natural = 0
    """Steps between two checkpoints; 0: only the clock counts."""
    checkpoint_every_minutes: NonNegative = 10.0
    """Minutes between two checkpoints; 0: only the steps count."""
    keep_checkpoints: Natural = 2
    """The newest ones that are kept; 0: none is written, not even at the end."""

    @model_validator(mode="before")
    @classmethod
    def _read_zero1(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "zero1" not in given or "zero" in given:
            return given
        if not isinstance(given["zero1"], bool):
            raise fault("input should be a valid boolean", "zero1")
        return {key: value for key, value in given.items() if key != "zero1"} | {"zero": int(given["zero1"])}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.microbatch_size is not None and self.global_batch % self.microbatch_size:
            raise fault(f"{self.microbatch_size} does not divide global_batch {self.global_batch}", "microbatch_size")
        if self.wire_type == "bf16" and self.precision != "fp32":
            raise fault(f"'bf16' is no narrower than precision {self.precision}; 'fp8' and 'int8' are", "wire_type")
        if self.matmul == "tf32" and self.precision != "fp32":
            raise fault(f"tf32 is for fp32, but precision is {self.precision}", "matmul")
        self._check_decay()
        return self

    def _check_decay(self) -> None:
        if self.decay == "none":
            return
        if self.final_learning_rate > self.learning_rate:
            raise fault(
                f"{self.final_learning_rate:g} is more than learning_rate {self.learning_rate:g}", "final_learning_rate"
            )
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise fault(f"{self.decay_steps} steps are over before warmup_steps {self.warmup_steps}", "decay_steps")

    @property
    def zero1(self) -> bool:
        """True if the optimizer's state is divided over the replicas."""
        return self.zero in (1, 2, 3)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.sequence_length * self.global_batch

    @property
    def num_bytes_per_param(self) -> int:
        """Bytes that a parameter surely takes on its device: weight, gradient and AdamW's state.

        Two 16-bit figures beside float32 master weight and two moments, or four float32 figures (ZeRO, arXiv
        1910.02054, section 3.1). What ZeRO divides, or could, over the replicas is left out, for they may be many;
        stage 3 has a whole layer's weights at a time.
        """
        if self.zero == 0:
            return 16
        width = 4 if self.precision == "fp32" else 2
        return 2 * width if self.zero == 1 else width


class Data(Part):
    """The text to train on, and how it becomes tokens."""

    source: Text = "stdlib"
    """``stdlib`` is the source code of Python's standard library; anything else is a file or folder."""
    format: Literal["auto", "text", "jsonl", "parquet", "tokens"] = "auto"
    """Format of the files; ``auto`` goes by the ends of their names. ``tokens`` are numbers already: .npy, .bin."""
    text_key: Text = "text"
    """Key of the text in JSONL, its column in parquet."""
    tokenizer: Text = "bytes"
    """``bytes``: one token per byte, 256 of them; anything else is a tokenizer.json, or a folder that has one."""
    end_of_text: Text | None = None
    """Token of the tokenizer that is put behind every document; None puts nothing there."""
    held_out: Share = 0.0
    """Share of the sequences that is kept for evaluation and never trained on."""
    packing: Literal["elastic", "fixed", "none"] | None = None
    """Train on whole documents, cut at `sequence_length`, `global_batch` of them a step, in chunks that are planned for
    every step: ``elastic`` cuts the long ones into slices and packs the short ones, ``fixed`` does so by equal numbers
    of tokens, ``none`` leaves every document a chunk of its own. None: on sequences of one length out of the text."""
    cache: Text | None = None
    """Folder for text that has been tokenized; None: ``farpipe`` in the user's folder of caches."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.end_of_text is not None and self.tokenizer == "bytes":
            raise fault("bytes have no such token; give a tokenizer", "end_of_text")
        return self

    @property
    def is_bytes(self) -> bool:
        """True if tokens are bytes of text, as far as can be told without looking at the files."""
        return self.tokenizer == "bytes" and self.format != "tokens" and not self.source.endswith((".npy", ".bin"))
