"""Strategies: demands of the messages of the next step, from what became of those of the last one.

The baselines ask for a fixed number of units. CBA labels the tasks that the pipeline waited for and lets their messages
ask for more. `Widest`, ours, takes the widest block that is free now.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import UsageError
from farpipe.optical.policies import POLICIES, Policy
from farpipe.optical.training import UNIT_GBIT, Demands, Step, Training, TransferRule
from farpipe.strict import nearest

_LATER_S: Final = 1e-9


class Strategy(Protocol):
    """Decides what messages ask for."""

    @property
    def rule(self) -> TransferRule:
        """Rules by which they ask."""

    def demands(self, training: Training, last: Step | None) -> Demands:
        """Demands of the messages of the next step; `last`: the step before it, if there was one."""


@dataclass(frozen=True)
class Fixed:
    """Every message asks for `units`; with `fewer` it takes the widest block of at most these at once."""

    units: int = 3
    fewer: bool = False
    rule: TransferRule = field(default_factory=TransferRule)

    def demands(self, training: Training, last: Step | None) -> Demands:
        """The same for every message and step."""
        return Demands.same(training, self.units, 1 if self.fewer else self.units)


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
    label: str = "any"
    """Label what was delayed behind "any" action of its rank, or behind one of the "same" kind only."""
    fewer_at_once: bool = False
    """Take fewer units at once, instead of waiting, when refused."""
    rule: TransferRule = field(default_factory=TransferRule)

    def demands(self, training: Training, last: Step | None) -> Demands:
        """From the labels and refusals of the last step."""
        bound = first_microbatch(training) if last is None else communication_bound(last, self.label)
        want = np.full(training.num_messages, self.start, np.int64)
        if last is not None and self.accumulate:
            want = last.demands.want.copy()
        refused = np.zeros(len(want), np.bool_) if last is None else last.out.refused
        want = want + np.where(refused, -self.fewer, np.where(bound, self.more, 0))
        want = np.clip(want, self.least, self.most)
        least = np.full_like(want, self.least) if self.fewer_at_once else want
        return Demands(want, np.minimum(least, want), np.where(bound, 0, 1))


@dataclass(frozen=True)
class Widest:
    """Every message takes the widest block of at most `most` units that is free when it asks, beside others if need be.

    The default rule takes two blocks side by side, at the upper end of the spectrum, away from first-fit traffic.
    """

    most: int = 6
    parts: int = 1
    """Units of the rule that make one of `most`: with several a block may be narrower than a whole one."""
    rule: TransferRule = field(default_factory=lambda: TransferRule(policy=POLICIES["last-fit"], max_blocks=2))

    def demands(self, training: Training, last: Step | None) -> Demands:
        """The same for every message and step; who waits is served in order of asking."""
        return Demands.same(training, self.most * self.parts, 1)


@dataclass(frozen=True)
class BySlack:
    """`Widest`, but messages that had slack in the last step ask for `few` units and wait behind the others.

    The slack of a message is how much later it could have arrived without delaying its consumer, which is a lower bound
    of how much later without a longer step.
    """

    most: int = 6
    few: int = 3
    rule: TransferRule = field(default_factory=lambda: TransferRule(policy=POLICIES["last-fit"], max_blocks=2))

    def demands(self, training: Training, last: Step | None) -> Demands:
        """From the slack of the last step: a narrower light path must fit into it."""
        same = Demands.same(training, self.most, 1)
        if last is None:
            return same
        longer = np.zeros(training.num_messages)
        sent = training.sent
        seconds = last.out.end_s[sent] - last.out.start_s[sent]
        longer[sent] = seconds * last.out.units[sent] / self.few
        idle = arrival_slack_s(last) > longer
        return Demands(np.where(idle, min(self.few, self.most), same.want), same.least, np.where(idle, 1, 0))


def first_microbatch(training: Training) -> NDArray[np.bool_]:
    """The messages of microbatch 0, which CBA labels from the start."""
    count = training.problem.num_microbatches
    return np.asarray(np.arange(training.num_messages) % count == 0)


def communication_bound(step: Step, label: str = "any") -> NDArray[np.bool_]:
    """The messages that an action waited for while its rank was idle, and those of microbatch 0: [M]."""
    bound = first_microbatch(step.training)
    for message, wait_s, same_kind in _consumed(step):
        if wait_s > _LATER_S and (same_kind or label == "any"):
            bound[message] = True
    return bound


def arrival_slack_s(step: Step) -> NDArray[np.float64]:
    """For every message over a light path how long before its consumer's start it was there; elsewhere 0: [M]."""
    slack = np.zeros(step.training.num_messages)
    starts = _starts(step)
    for message, start_s in starts.items():
        slack[message] = max(0.0, start_s - step.out.arrival_s[message])
    return slack


def _consumed(step: Step) -> list[tuple[int, float, bool]]:
    """For every message over a light path: how long its consumer's rank was idle before it, and whether the action
    before was of the same kind."""
    found = []
    rows = step.timeline().actions
    for before, row in itertools.pairwise(rows):
        message = _input_of(step.training, row)
        if message is not None and before["rank"] == row["rank"]:
            found.append((message, float(row["start_s"] - before["end_s"]), bool(before["kind"] == row["kind"])))
    return found


def _starts(step: Step) -> dict[int, float]:
    rows = step.timeline().actions
    inputs = ((_input_of(step.training, row), row) for row in rows)
    return {message: float(row["start_s"]) + step.begin_s for message, row in inputs if message is not None}


def _input_of(training: Training, row: Any) -> int | None:
    """The message over a light path that an action needs."""
    kind, stage, stages = int(row["kind"]), int(row["stage"]), training.problem.num_stages
    if kind == 2:  # W
        return None
    direction = 0 if kind == 0 else 1
    producer = stage - 1 + 2 * direction
    hop = direction * stages + producer
    if not 0 <= producer < stages or training.hops[hop] is None:
        return None
    return hop * training.problem.num_microbatches + int(row["microbatch"])


def _fixed(policy: Policy, *, fewer: bool = False) -> Fixed:
    return Fixed(rule=TransferRule(policy=policy), fewer=fewer)


_PARTS: Final = 6
"""Parts of a unit: 12.5 Gbit/s, what a slot of 12.5 GHz carries at 1 bit/s/Hz."""


def _spread(**rule: Any) -> Widest:
    """Blocks on several candidates; twice the spectrum of the best must bring the message 5 ms sooner."""
    narrow = UNIT_GBIT / _PARTS
    both = TransferRule(policy=POLICIES["last-fit"], max_blocks=2, spread=True, price_s=0.005, unit_gbit=narrow)
    return Widest(parts=_PARTS, rule=replace(both, **rule))


STRATEGIES: Final[dict[str, Strategy]] = {
    **{name: _fixed(POLICIES[name]) for name in ("ksp-ff", "sd-ff", "cd")},
    **{f"{name}-fewer": _fixed(POLICIES[name], fewer=True) for name in ("ksp-ff", "sd-ff", "cd")},
    "cba": Cba(),
    "cba-sd-ff": Cba(rule=TransferRule(policy=POLICIES["sd-ff"])),
    "cd-cba": Cba(rule=TransferRule(policy=POLICIES["cd"])),
    "cd-cba-fewer": Cba(fewer_at_once=True, rule=TransferRule(policy=POLICIES["cd"])),
    "widest": Widest(),
    "earliest": Widest(rule=TransferRule(policy=POLICIES["last-fit"], max_blocks=2, earliest=True)),
    "spread": _spread(widen=True),
    "known-ends": _spread(widen=True, patient=True, book=True),
    "slack": BySlack(),
}
"""The strategies by the names that users write."""


def find_strategy(name: str, units: int | None = None, **rule: Any) -> Strategy:
    """The strategy called `name`, with `units` at most (of a fixed one: exactly) and other figures of its rule."""
    if name not in STRATEGIES:
        raise UsageError(f"there is no policy {name!r}{nearest(name, STRATEGIES)}; known: {', '.join(STRATEGIES)}")
    found: Any = STRATEGIES[name]
    if units is not None:
        found = replace(found, **{"units" if isinstance(found, Fixed) else "most": units})
        if isinstance(found, Cba):
            found = replace(found, start=min(found.start, units))
    keeps = rule.get("keep_s") is not None
    fixed = {"widen": False, "move": False} if keeps or rule.get("setup_s") else {}
    fixed |= {"book": False} if keeps else {}
    changed = replace(found.rule, **{**fixed, **rule}, **({"max_blocks": 1} if keeps else {}))
    strategy: Strategy = replace(found, rule=changed)
    return strategy
