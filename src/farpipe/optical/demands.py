"""Policies: demands of the messages of the next step, from what became of those of the last one.

The baselines ask for a fixed number of units. CBA labels the tasks that the pipeline waited for and lets their messages
ask for more. `widen`, ours, asks for little parts of a unit and adds to them while a message is sent.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import UsageError
from farpipe.core.step.codes import W, direction_of
from farpipe.core.strict import nearest
from farpipe.optical.policies import POLICIES
from farpipe.optical.transfers import UNIT_GBIT, Demands, LightTraining, Step, TransferRule

_LATER_S: Final = 1e-9


class TransferPolicy(Protocol):
    """Decides what messages ask for."""

    @property
    def rule(self) -> TransferRule:
        """Rules by which they ask."""

    def demands(self, training: LightTraining, last: Step | None) -> Demands:
        """Demands of the messages of the next step; `last`: the step before it, if there was one."""


@dataclass(frozen=True)
class Fixed:
    """Every message asks for `units`; with `fewer` it takes the widest block of at most these at once."""

    units: int = 3
    fewer: bool = False
    parts: int = 1
    """Units of the rule that make one of `units`: with several a block may be narrower than a whole one."""
    rule: TransferRule = field(default_factory=TransferRule)

    def demands(self, training: LightTraining, last: Step | None) -> Demands:
        """The same for every message and step."""
        most = self.units * self.parts
        return Demands.same(training, most, 1 if self.fewer else most)


@dataclass(frozen=True)
class Cba:
    """Communication-bound awareness (CBA, arXiv 2512.20080; CD-CBA, JOCN 18(8), 2026).

    Messages whose consumer's start they delayed in the last step, and those of microbatch 0, are communication-bound:
    they are served first and ask for `more` units; those that were refused in the last step ask for `fewer`; all within
    `least` and `most`. The step sizes were not published: every one is a parameter here.
    """

    start: int = 3
    more: int = 1
    fewer: int = 1
    least: int = 1
    most: int = 6
    accumulate: bool = True
    """Steps add up from step to step; otherwise each starts from `start`."""
    rule: TransferRule = field(default_factory=TransferRule)

    def demands(self, training: LightTraining, last: Step | None) -> Demands:
        """Demands by the labels and refusals of the last step."""
        bound = first_microbatch(training) if last is None else communication_bound(last)
        want = np.full(training.num_messages, self.start, np.int64)
        if last is not None and self.accumulate:
            want = last.demands.want.copy()
        refused = np.zeros(len(want), np.bool_) if last is None else last.out.refused
        want = want + np.where(refused, -self.fewer, np.where(bound, self.more, 0))
        want = np.clip(want, self.least, self.most)
        return Demands(want, want, np.where(bound, 0, 1))


def first_microbatch(training: LightTraining) -> NDArray[np.bool_]:
    """The messages of microbatch 0, which CBA labels from the start."""
    count = training.problem.num_microbatches
    return np.asarray(np.arange(training.num_messages) % count == 0)


def communication_bound(step: Step) -> NDArray[np.bool_]:
    """The messages that an action waited for while its rank was idle, and those of microbatch 0: [M]."""
    bound = first_microbatch(step.training)
    for before, row in itertools.pairwise(step.timeline().actions):
        message = _input_of(step.training, row)
        if message is not None and before["rank"] == row["rank"]:
            bound[message] |= row["start_s"] - before["end_s"] > _LATER_S
    return bound


def _input_of(training: LightTraining, row: Any) -> int | None:
    """The message over a light path that an action needs."""
    kind, stage, stages = int(row["kind"]), int(row["stage"]), training.problem.num_stages
    if kind == W:
        return None
    direction = direction_of(kind)
    producer = stage - 1 + 2 * direction
    hop = direction * stages + producer
    if not 0 <= producer < stages or training.hops[hop] is None:
        return None
    return hop * training.problem.num_microbatches + int(row["microbatch"])


_PARTS: Final = 6
"""Parts of a unit: 12.5 Gbit/s, what a slot of 12.5 GHz carries at 1 bit/s/Hz."""
_WIDEN: Final = TransferRule(unit_gbit=UNIT_GBIT / _PARTS, earliest=True, widen=True)
TRANSFER_POLICIES: Final[dict[str, TransferPolicy]] = {
    "ksp-ff": Fixed(),
    "ksp-ff-fewer": Fixed(fewer=True),
    "cd-cba": Cba(rule=TransferRule(policy=POLICIES["cd"])),
    "earliest": Fixed(6, fewer=True, rule=TransferRule(earliest=True)),
    "widen": Fixed(6, fewer=True, parts=_PARTS, rule=_WIDEN),
}
"""The policies by the names that users write."""
CANDIDATES: Final = dict.fromkeys(TRANSFER_POLICIES, (8, "km")) | {"cd-cba": (4, "km")}
"""Candidate paths of each policy, number and order: CBA's are four."""


def find_transfer_policy(name: str, units: int | None = None, **rule: Any) -> TransferPolicy:
    """The policy called `name`, with `units` at most (of a fixed one: exactly) and other figures of its rule."""
    if name not in TRANSFER_POLICIES:
        raise UsageError(
            f"there is no policy {name!r}{nearest(name, TRANSFER_POLICIES)}; known: {', '.join(TRANSFER_POLICIES)}"
        )
    found: Any = TRANSFER_POLICIES[name]
    if units is not None:
        fixed = isinstance(found, Fixed)
        found = replace(found, **({"units": units} if fixed else {"most": units, "start": min(found.start, units)}))
    policy: TransferPolicy = replace(found, rule=replace(found.rule, **rule))
    return policy
