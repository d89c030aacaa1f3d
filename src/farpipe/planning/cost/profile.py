"""Profile: measured times of a device, which take the place of modelled ones.

`farpipe profile` writes it (format ``farpipe/profile/1``).
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Final, Protocol, Self

from pydantic import BeforeValidator, Field, model_validator

from farpipe.core.cpu_share import other_work
from farpipe.core.document import Document, Table
from farpipe.core.errors import InputError
from farpipe.core.spec import Device, Model, Precision, Training
from farpipe.core.strict import finite, validate
from farpipe.planning.cost.exchange import Times
from farpipe.planning.cost.layout import Layout

Seconds = Annotated[float, BeforeValidator(finite)]
Count = Annotated[int, Field(ge=1)]
MOST_S: Final = 3600.0
"""Seconds of one microbatch in one part beyond which a figure is no measurement."""
MEASURABLE: Final = {
    "embedding": ("forward_s", "weight_grad_s"),
    "layer": ("forward_s", "input_grad_s", "weight_grad_s"),
    "head": ("forward_s", "input_grad_s", "weight_grad_s"),
}
"""Figures that take time on any device; an embedding has no gradient of its input."""
CpuShare = Annotated[float, BeforeValidator(finite), Field(gt=0, le=1, exclude_if=lambda share: bool(share == 1))]


class PartTimes(Table, strict=True):
    """Seconds of one microbatch through one part of the model."""

    forward_s: Seconds
    input_grad_s: Seconds
    weight_grad_s: Seconds

    def times(self, factor: float) -> Times:
        """Each of the three multiplied by `factor`."""
        return Times(self.forward_s, self.input_grad_s, self.weight_grad_s).times(factor)


class Profile(Document, Table, strict=True):
    """Times and bytes measured on one device for one shape of model; other microbatch sizes take proportional times."""

    FORMAT: ClassVar[str] = "farpipe/profile/1"

    device: Annotated[str, Field(min_length=1)]
    shape: Annotated[str, Field(min_length=1)]
    """`model_shape` of the model that was measured."""
    precision: Precision
    recompute: str
    microbatch_size: Count
    sequence_length: Count
    embedding: PartTimes
    layer: PartTimes
    """One layer; what is recomputed counts to the input gradient."""
    head: PartTimes
    """The final norm, the head and the loss."""
    optimizer_s_per_param: Seconds
    action_overhead_s: Seconds
    """Fixed time of one F or I besides its computation."""
    cpu_share: CpuShare = 1.0
    """Share of their time for which the measured actions had the CPU; other work on the machine had the rest."""
    at_most: Annotated[tuple[str, ...], Field(strict=False, exclude_if=lambda names: not names)] = ()
    """Figures that noise hid, such as ``embedding.forward_s``: what is written is the most that each can be."""

    @model_validator(mode="after")
    def _is_measured(self) -> Self:
        for part, figures in MEASURABLE.items():
            for key in figures:
                seconds = getattr(getattr(self, part), key)
                if not 0 < seconds <= MOST_S:
                    raise ValueError(
                        f"{part}.{key}: {seconds:g} s can't have been measured; measure again with `farpipe profile`, "
                        "on a machine that does nothing else"
                    )
        return self

    def layer_times(self, recompute: str, share: float = 1.0) -> Times:
        """One layer; recomputation is told by a measurement without: `share` of one more forward."""
        layer = self.layer.times(1.0)
        again = self.layer.forward_s * share if self.recompute == "none" != recompute else 0.0
        return layer + Times(0.0, again, 0.0)

    def expect(self, model: Model, training: Training, layout: Layout, device: Device) -> None:
        """InputError naming the first thing that differs from what was measured."""
        wanted = {
            "device": device.name,
            "shape": model_shape(model),
            "precision": training.precision,
            "recompute": self.recompute if self.tells_of(training.recompute) else training.recompute,
            "sequence_length": training.sequence_length,
        }
        for key, value in wanted.items():
            if getattr(self, key) != value:
                raise InputError(
                    f"profile of {self.device!r}: {key}: measured with {getattr(self, key)!r}, the job has {value!r}; "
                    "measure again with `farpipe profile`"
                )
        if layout.tensor != 1:
            raise InputError(
                f"profile of {self.device!r}: measured on one device; the layout has tensor {layout.tensor}"
            )

    def tells_of(self, recompute: str) -> bool:
        """True if times under `recompute` follow from this measurement."""
        return self.recompute in ("none", recompute)

    def to_body(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        return validate(cls, body, source)


def hidden_by_noise(profile: Profile) -> str:
    """Sentence on figures that noise hid; empty if it hid none."""
    if not profile.at_most:
        return ""
    return f"Too fast to measure; upper bounds taken: {', '.join(profile.at_most)}."


def model_shape(model: Model) -> str:
    """Everything of a model that the time of one layer, of the embedding or of the head depends on."""
    mlp = "gated" if model.gated_mlp else "plain"
    return (
        f"hidden {model.hidden}, heads {model.num_heads}/{model.num_kv_heads} x {model.head_dim}, "
        f"{mlp} mlp {model.ffn_hidden}, vocabulary {model.vocab_size}"
    )


class _Timed(Protocol):
    """A profile of microbatches or of chunks."""

    device: str
    cpu_share: float


def busy_notes(profiles: Iterable[_Timed]) -> Iterator[str]:
    """Doubts about profiles that were measured beside other work or where noise hid a part, for people."""
    for profile in profiles:
        if doubt := other_work(profile.cpu_share):
            yield f"The profile of {profile.device} was measured on a busy machine; measure it again. {doubt}"
        if isinstance(profile, Profile) and (hidden := hidden_by_noise(profile)):
            yield f"The profile of {profile.device}: {hidden}"
