"""Measured times of a device that stand in the job itself."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from farpipe.catalog import device_row
from farpipe.spec.part import Count, NonNegative, Part, Positive, Text, fault
from farpipe.strict import nearest
from farpipe.units import SECONDS, parse

MeasuredPart = Literal["layer", "embedding", "head"]

Duration = Annotated[float, BeforeValidator(lambda text: parse(text, SECONDS, "5.5 ms"))]


class Measured(Part):
    """Times of one microbatch on one device, as the user measured them: its backward whole or in its two halves."""

    device: Text
    """Name of a site's device."""
    microbatch_size: Count
    """Sequences in the microbatch."""
    part: MeasuredPart = "layer"
    num_layers: Count = 1
    """Layers that took these times together."""
    forward_s: Positive
    backward_s: Positive | None = None
    input_grad_s: NonNegative | None = None
    weight_grad_s: NonNegative | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        halves = (self.input_grad_s, self.weight_grad_s)
        if (self.backward_s is None) == (halves == (None, None)) or (self.backward_s is None and None in halves):
            raise fault("give either backward, or both input_grad and weight_grad")
        if self.part != "layer" and self.num_layers != 1:
            raise fault(f"the {self.part} has no layers; leave this out", "num_layers")
        return self


class WrittenMeasured(Part):
    """[[measured]]"""

    device: Text
    microbatch_size: Count
    part: MeasuredPart = "layer"
    num_layers: Count = 1
    forward: Duration
    backward: Duration | None = None
    input_grad: Duration | None = None
    weight_grad: Duration | None = None

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        for key in ("forward", "backward"):
            if getattr(self, key) == 0:
                raise fault("must be more than zero", key)
        self.resolve()
        return self

    def resolve(self) -> Measured:
        """The figures in seconds, the device by its whole name."""
        times = {f"{key}_s": getattr(self, key) for key in ("forward", "backward", "input_grad", "weight_grad")}
        kept = {key: getattr(self, key) for key in ("microbatch_size", "part", "num_layers")}
        return Measured(device=_whole_name(self.device), **kept, **times)


def _whole_name(device: str) -> str:
    """``h100-sxm`` for ``h100``; the name itself where it is none of the catalogue's."""
    try:
        return device_row(device).name
    except ValueError:
        return device


def check_measured(measured: Sequence[Measured], devices: Sequence[str], tensor: int) -> None:
    """ValidationError, seen from the job, at the first table that its `devices` or the other tables don't allow."""
    seen: set[tuple[str, str]] = set()
    for index, table in enumerate(measured):
        place, key = ("measured", index), (table.device, table.part)
        if table.device not in devices:
            raise fault(
                f"no site has the device {table.device!r}{nearest(table.device, devices)}; they have "
                f"{', '.join(sorted(set(devices)))}",
                *(*place, "device"),
            )
        if key in seen:
            raise fault(f"the {table.part} of {table.device!r} is given twice", *(*place, "device"))
        if tensor > 1:
            raise fault(f"times are those of one device, and layout.tensor is {tensor}; leave one of them out", *place)
        seen.add(key)
    for index, table in enumerate(measured):
        if (table.device, "layer") not in seen:
            raise fault(
                f'nothing is measured of a layer of {table.device!r}; add a table with part = "layer"',
                *("measured", index, "part"),
            )
