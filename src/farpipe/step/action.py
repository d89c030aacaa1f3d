"""The one thing that a rank does at a time: an Action, written ``{stage}{F|I|W|B}{microbatch}``."""

import re
from typing import Final, Literal, NamedTuple, cast

from farpipe.errors import InputError

Kind = Literal["F", "I", "W", "B"]
"""F forward, I gradient of the input, W gradient of the weights, B both at once.

The letters are torch.distributed.pipelining's; R (recompute ahead of the backward) is kept free for later.
"""

KINDS: Final[tuple[Kind, ...]] = ("F", "I", "W", "B")

_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")


class Action(NamedTuple):
    """One computation of one stage for one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form; InputError for anything else."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError(f"expected an action such as '0F0' or '3W12', found {text!r}")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(microbatch))


def awaited(action: Action, num_stages: int) -> tuple[int, Literal["F", "backward"], int] | None:
    """Work of another stage that an action waits for, as (stage, "F" or "backward", microbatch); None: nothing."""
    stage, kind, microbatch = action
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage > 0 else None
    if kind in "IB":
        return (stage + 1, "backward", microbatch) if stage + 1 < num_stages else None
    return None


def handed_to(action: Action, num_stages: int) -> int | None:
    """The stage whose action needs what this one makes (see `awaited`); None: nobody but the own stage."""
    stage = action.stage + 1 if action.kind == "F" else action.stage - 1
    return stage if action.kind != "W" and 0 <= stage < num_stages else None
