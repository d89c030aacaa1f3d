"""Measured costs of chunks: laws fitted to slices of many lengths behind many prefixes on one device, and bytes held.

`farpipe profile` writes them (format ``farpipe/chunk-profile/1``).
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from farpipe.core.document import Document, Table
from farpipe.core.errors import InputError
from farpipe.core.spec import Device, Model, Precision, Training
from farpipe.core.strict import validate
from farpipe.planning.cost.chunk_laws import Law, Laws
from farpipe.planning.cost.profile import CpuShare, Seconds, model_shape

MARK: Final = 0.05
"""The largest mean error that a fit should have on points that it did not see."""


class MeasuredLaw(Table):
    """Coefficients of a `Law`."""

    pair_s: Seconds
    token_s: Seconds
    fixed_s: Seconds
    split_pair_s: Seconds = 0.0
    call_s: Seconds = 0.0

    @classmethod
    def of(cls, law: Law) -> Self:
        """The same as a part of a document; nothing runs beside a measured action, so `least_s` is none of its."""
        return cls(**{name: getattr(law, name) for name in cls.model_fields})

    @property
    def law(self) -> Law:
        """The same as a Law."""
        return Law(self.pair_s, self.token_s, self.fixed_s, self.split_pair_s, call_s=self.call_s)


class PartCosts(Table):
    """One layer, the embedding or the head of a chunk: seconds, and bytes that are held per token."""

    forward: MeasuredLaw
    backward: MeasuredLaw
    held_bytes: Seconds
    """Bytes of a whole sequence, from a forward to its backward, keys and values included."""

    @property
    def laws(self) -> Laws:
        """F, I and W. Only whole backwards are measured; W is taken for as much as a forward without its attention."""
        forward, backward = self.forward.law, self.backward.law
        weight_grad = Law(token_s=min(forward.token_s, backward.token_s / 2))
        return Laws(forward, replace(backward, token_s=backward.token_s - weight_grad.token_s), weight_grad)


class ChunkProfile(Document, Table):
    """Measured costs of chunks on one device for one shape of model."""

    FORMAT: ClassVar[str] = "farpipe/chunk-profile/1"
    INDENT: ClassVar[int | None] = 1

    device: Annotated[str, Field(min_length=1)]
    shape: Annotated[str, Field(min_length=1)]
    """`model_shape` of the model that was measured."""
    precision: Precision
    longest: Annotated[int, Field(ge=1)]
    """Tokens of the longest sequence of which slices were measured."""
    embedding: PartCosts
    layer: PartCosts
    head: PartCosts
    recomputed_bytes: Seconds
    """Per token of a whole sequence, what a layer that is computed again still holds: its input."""
    slice_bytes: Seconds | None = None
    """Per token of a slice of a split sequence, what a layer holds, with keys and values; None: as of a whole one."""
    recomputed_slice_bytes: Seconds | None = None
    """The same of a layer that is computed again; None: its input, and keys and values by the cost model."""
    boundary_bytes: Seconds
    """Per token, what a stage holds beside its layers: input and output."""
    action_forward_s: Seconds
    """Fixed time of a forward besides its layers."""
    action_backward_s: Seconds
    errors: dict[str, float]
    """Relative errors of forwards and backwards at points that the fits did not see: mean and largest."""
    cpu_share: CpuShare = 1.0
    """Share of the CPU that the measurement had; see Profile."""

    @model_validator(mode="after")
    def _is_measured(self) -> Self:
        for part in ("layer", "head"):
            for kind in ("forward", "backward"):
                if not any(getattr(getattr(self, part), kind).model_dump().values()):
                    raise ValueError(
                        f"{part}.{kind}: a time of 0 can't have been measured; measure again with "
                        "`farpipe profile`, on a machine that does nothing else"
                    )
        return self

    def to_body(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        return validate(cls, body, source)

    def expect(self, model: Model, training: Training, device: Device, longest: int) -> None:
        """InputError naming the first thing that differs from what was measured."""
        wanted = {"device": device.name, "shape": model_shape(model), "precision": training.precision}
        for key, value in wanted.items():
            if getattr(self, key) != value:
                raise InputError(
                    f"profile of {self.device!r}: {key}: measured with {getattr(self, key)!r}, the job has {value!r}; "
                    "measure again with `farpipe profile`"
                )
        if longest > 2 * self.longest:
            raise InputError(
                f"profile of {self.device!r}: slices of sequences up to {self.longest} tokens were measured, and there "
                f"is one of {longest}; measure again with a longer training.sequence_length"
            )
