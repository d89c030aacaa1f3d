"""Local steps: sites that train by themselves and exchange differences of parameters now and then."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from farpipe.core.spec.part import Count, Natural, NonNegative, Part, Positive, Share, fault

OuterWireType = Literal["none", "bf16", "int8", "int4"]
"""Numbers that differences of parameters are rounded to between sites."""
OUTER_BLOCK = 64
"""Neighbouring numbers of a row that share a scale, with int8 and int4."""


class LocalSteps(Part):
    """Every site trains its share of the batch by itself, and the sites exchange how far they have come: DiLoCo (arXiv
    2311.08105), with `fragments` and `delay_steps` its streaming form (arXiv 2501.18512)."""

    every: Count = 30
    """Steps from one exchange of a parameter to its next."""
    fragments: Count = 1
    """Parts of the model that are exchanged separately, at equal intervals within `every` steps."""
    delay_steps: Natural = 0
    """Steps that a site goes on training while an exchange is under way; `0`: it waits. Less than `every`."""
    keep_local: Share = 0.0
    """Share of a site's own weights that remains when an exchange is merged."""
    wire_type: OuterWireType = "none"
    """Number format of the differences: `"none"` (32 bit), `"bf16"`, `"int8"` or `"int4"`, both with a 16-bit scale for
    every 64 numbers. It changes numerics."""
    learning_rate: Positive = 1.0
    """Rate of the outer optimizer, Nesterov's momentum on the sites' mean difference; `1` with momentum 0 is a plain
    mean of the weights."""
    momentum: Share = 0.0
    """Momentum of the outer optimizer. DiLoCo's authors use 0.9 with rate 0.7, which needs some hundreds of
    exchanges."""
    quorum: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None
    """Sites that are enough for an exchange: what others send late is merged in the next one, each site's difference by
    the tokens behind it. With fewer sites each trains by itself. Default: all that are there are waited for."""
    grace_s: Annotated[NonNegative, Field(exclude_if=lambda seconds: seconds == 0)] = 0.0
    """Seconds for which a quorum waits for the other sites."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.fragments > self.every:
            raise fault(f"{self.fragments} can't each have a step of their own within every {self.every}", "fragments")
        if self.delay_steps >= self.every:
            raise fault(
                f"{self.delay_steps} is not less than every {self.every}: an exchange ends before the next of the same "
                "parameters begins",
                "delay_steps",
            )
        if self.grace_s and self.quorum is None:
            raise fault("there is nothing to wait for without a quorum; set quorum as well", "grace_s")
        return self

    def sent_after(self, num_steps: int) -> list[int]:
        """Fragments, by number, whose exchange begins after so many steps."""
        offsets = [(fragment + 1) * self.every // self.fragments for fragment in range(self.fragments)]
        return [
            number
            for number, offset in enumerate(offsets)
            if num_steps >= offset and (num_steps - offset) % self.every == 0
        ]

    def merged_after(self, num_steps: int) -> list[int]:
        """Fragments, by number, whose exchange is merged after so many steps."""
        return self.sent_after(num_steps - self.delay_steps) if num_steps > self.delay_steps else []

    @property
    def bytes_per_param(self) -> float:
        """Bytes of a parameter's difference on the wire, its part of a scale included."""
        scale = 2 / OUTER_BLOCK
        return {"none": 4.0, "bf16": 2.0, "int8": 1 + scale, "int4": 1 / 2 + scale}[self.wire_type]
