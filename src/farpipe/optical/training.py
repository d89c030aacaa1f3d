"""A training whose messages between sites are light paths: what it asks for, and what became of each step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InputError, UsageError
from farpipe.optical.network import Network
from farpipe.optical.pipeline_state import AT_ONCE, NOTHING, Floats, Ints, Orders, Out
from farpipe.optical.policies import POLICIES, Policy
from farpipe.schedule import check
from farpipe.simulate import Timeline
from farpipe.simulate.timeline import ACTION_DTYPE, MESSAGE_DTYPE
from farpipe.step import Problem, Schedule
from farpipe.step.lowering import lower

MAX_BLOCKS = 4
UNIT_GBIT: Final = 75.0
"""Rate of the units in which messages ask (CBA's frequency slot)."""


@dataclass(frozen=True)
class Training:
    """A step of a pipeline (`problem`) in an order (`schedule`), with the node of the network where each rank is.

    Of the Problem's links only the bytes of the messages are used: messages between ranks at different nodes are light
    paths, messages between ranks at the same node are there at once.
    """

    problem: Problem
    schedule: Schedule
    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.nodes) != self.problem.num_ranks:
            raise InputError(f"nodes: expected one per rank, {self.problem.num_ranks}, found {len(self.nodes)}")
        if self.problem.collectives:
            place = self.problem.collectives[0].place
            raise InputError(
                f"{place}: collectives over light paths are not simulated; take a problem with one replica"
            )
        check(self.problem, self.schedule, memory=False)

    def expect_in(self, network: Network) -> None:
        """InputError unless every node is one of the network's."""
        for index, node in enumerate(self.nodes):
            network.expect_node(node, f"nodes[{index}]")

    @cached_property
    def hops(self) -> tuple[tuple[str, str] | None, ...]:
        """For every direction and producing stage the nodes that its messages go between; None: no light path."""
        at = [self.nodes[stage.rank] for stage in self.problem.stages]
        forward = [*itertools.pairwise(at), None]
        backward = [None, *zip(at[1:], at, strict=False)]
        return tuple(ends if ends and ends[0] != ends[1] else None for ends in (*forward, *backward))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs of nodes between which messages go."""
        return tuple(dict.fromkeys(ends for ends in self.hops if ends))

    @cached_property
    def sent(self) -> NDArray[np.intp]:
        """The messages that are light paths."""
        over = np.repeat([ends is not None for ends in self.hops], self.problem.num_microbatches)
        return np.flatnonzero(over)

    @property
    def num_messages(self) -> int:
        """Length of arrays by message: 2 x stages x microbatches, those that are no light paths included."""
        return 2 * self.problem.num_stages * self.problem.num_microbatches

    def orders(self, places: dict[tuple[str, str], int]) -> Orders:
        """The arrays that the kernel reads; `places` are the pairs' places in the table of paths."""
        arrays = lower(self.problem)
        codes, begin = self.schedule.codes, self.schedule.begin
        stages = self.problem.num_stages
        kinds = [AT_ONCE if ends is None else places[ends] for ends in self.hops]
        kinds[stages - 1], kinds[stages] = (
            NOTHING,
            NOTHING,
        )  # the last stage sends nothing forward, the first nothing back
        return Orders(
            codes=codes,
            begin=begin,
            duration_s=arrays.duration_s.reshape(-1),
            rank_of_stage=arrays.rank_of_stage,
            pair_of_hop=np.array(kinds, np.int64),
            gbit=arrays.messages.bytes.reshape(-1) * 8e-9,
            num_stages=stages,
            num_microbatches=self.problem.num_microbatches,
        )


@dataclass(frozen=True)
class TransferRule:
    """Rules by which messages ask for light paths; the same for all messages of a training."""

    policy: Policy = POLICIES["ksp-ff"]
    unit_gbit: float = UNIT_GBIT
    """Rate of one unit; a message asks for a number of units."""
    earliest: bool = False
    """Take the candidate over which the message arrives first by its widest block and its length, not the first that
    has the most units; of the policy then only the rule of slots counts."""
    spread: bool = False
    """As `earliest`, and the blocks of a message may be on different candidates; its bits are divided so that all
    arrive together."""
    price_s: float = 0.0
    """With `spread`: a candidate that takes twice the spectrum of the best one (fibres / bit/s/Hz) must bring the
    message so much sooner."""
    patient: bool = False
    """With `spread`: wait for a light path whose end is known, when the message arrives sooner so."""
    book: bool = False
    """With `patient`: what will be free then is booked: what is free of it already is held, and nobody else gets the
    rest. A message that finds nothing when it asks books too, and is not refused."""
    widen: bool = False
    """With `spread`: add blocks to a message that is being sent, up to what it asked for, when a light path ends."""
    move: bool = False
    """With `spread`: move a message that is being sent on fewer units than it asked for to other blocks when a light
    path ends and the rest arrives sooner so; moving interrupts nobody."""
    max_blocks: int = 1
    """Light paths of one message side by side."""
    setup_s: float = 0.0
    """From the grant until the first bit can be sent; the spectrum is taken from the grant on."""
    ahead: bool = False
    """Ask so long before the producer ends that the light path is set up by then (at the producer's start at most)."""
    keep_s: float | None = None
    """Keep one light path per hop until it has been idle so long; None: one per message."""
    one_at_a_time: bool = False
    """A hop has at most one light path at a time; its other messages wait."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_blocks <= MAX_BLOCKS:
            raise UsageError(f"max_blocks must be from 1 to {MAX_BLOCKS}, found {self.max_blocks}")
        if (self.patient or self.widen or self.move or self.price_s) and not self.spread:
            raise UsageError("price_s, patient, widen and move belong to spread")
        if (self.widen or self.move) and (self.setup_s > 0 or self.keep_s is not None):
            raise UsageError("widen and move are for light paths without set-up time that are not kept")
        if self.book and (not self.patient or self.keep_s is not None):
            raise UsageError("book belongs to patient, and to light paths that are not kept")
        if not 0 <= self.price_s < inf:
            raise UsageError(f"price_s must be at least 0, found {self.price_s}")
        if not 0 < self.unit_gbit < inf:
            raise UsageError(f"unit_gbit must be more than 0, found {self.unit_gbit}")
        if not 0 <= self.setup_s < inf:
            raise UsageError(f"setup_s must be at least 0, found {self.setup_s}")
        if self.keep_s is not None and (self.keep_s < 0 or self.max_blocks > 1):
            raise UsageError("keep_s must be at least 0, and a light path that is kept is one block")


@dataclass(frozen=True)
class Demands:
    """Demands of the messages of one step: units at most and at least, and their rank in the queue (lower first)."""

    want: Ints
    least: Ints
    priority: Ints
    ask_s: Floats | None = None
    """Time to ask, from the start of the step; infinite: when the producer ends (or `TransferRule.ahead`)."""

    @classmethod
    def same(cls, training: Training, most: int, least: int | None = None) -> "Demands":
        """Every message asks for `most` units and takes `least` (by default `most`) or more."""
        if not 1 <= (least if least is not None else most) <= most:
            raise UsageError(f"units asked for must be at least 1, the least first, found {least} and {most}")
        shape = training.num_messages
        fewest = most if least is None else least
        return cls(np.full(shape, most, np.int64), np.full(shape, fewest, np.int64), np.zeros(shape, np.int64))


@dataclass(frozen=True, repr=False)
class Step:
    """Events of one step of a training; times in `out` are absolute."""

    training: Training
    begin_s: float
    end_s: float
    out: Out
    demands: Demands
    unit_gbit: float
    held_slot_s: float
    """Slots x fibres x seconds that its messages held."""
    background: tuple[int, int]
    """Background requests during the step, and how many of them were refused."""

    @property
    def makespan_s(self) -> float:
        """Time of the step."""
        return self.end_s - self.begin_s

    @property
    def num_sent(self) -> int:
        """Messages over light paths."""
        return len(self.training.sent)

    @property
    def num_refused(self) -> int:
        """Messages that found no spectrum when they asked first."""
        return int(self.out.refused[self.training.sent].sum())

    @property
    def refused_ratio(self) -> float:
        """Share of the messages that was refused when it asked first."""
        return self.num_refused / self.num_sent if self.num_sent else 0.0

    @cached_property
    def wait_s(self) -> Floats:
        """For every message over a light path, from when it was ready until its first bit was sent."""
        sent = self.training.sent
        return np.asarray(self.out.start_s[sent] - self.out.ready_s[sent], np.float64)

    @property
    def waited_ratio(self) -> float:
        """Share of the messages whose spectrum came after they had asked, refused or not."""
        late = self.out.grant_s[self.training.sent] > self.out.ask_s[self.training.sent]
        return float(late.mean()) if self.num_sent else 0.0

    @property
    def bubble_ratio(self) -> float:
        """1 - busy compute time / (number of ranks x makespan)."""
        return self.timeline().bubble_ratio

    def timeline(self) -> Timeline:
        """The step as a Timeline; links are named by their nodes. A message is on its link while it is sent."""
        pairs = self.training.pairs
        return Timeline(
            "predicted",
            self.training.problem.num_ranks,
            tuple(f"{a}>{b}" for a, b in pairs),
            self._actions(),
            self._messages({pair: index for index, pair in enumerate(pairs)}),
        )

    def _actions(self) -> NDArray[np.void]:
        codes, begin = self.training.schedule.codes, self.training.schedule.begin
        duration_s = lower(self.training.problem).duration_s
        rows = np.empty(codes.size, ACTION_DTYPE)
        rows["rank"] = np.repeat(np.arange(begin.size - 1), np.diff(begin))
        rows["kind"] = codes & 3
        rows["stage"], rows["microbatch"] = np.divmod(codes >> 2, self.training.problem.num_microbatches)
        rows["start_s"] = self.out.action_s - self.begin_s
        rows["end_s"] = rows["start_s"] + duration_s[rows["kind"], rows["stage"], rows["microbatch"]]
        return rows

    def _messages(self, places: dict[tuple[str, str], int]) -> NDArray[np.void]:
        problem, sent = self.training.problem, self.training.sent
        hop, microbatch = np.divmod(sent, problem.num_microbatches)
        direction, stage = np.divmod(hop, problem.num_stages)
        rank_of_stage = np.array([one.rank for one in problem.stages])
        rows = np.zeros(len(sent), MESSAGE_DTYPE)
        rows["link"] = [places[ends] for ends in (self.training.hops[h] for h in hop) if ends]
        rows["kind"], rows["stage"], rows["microbatch"] = direction, stage, microbatch
        rows["source"], rows["target"] = rank_of_stage[stage], rank_of_stage[stage + 1 - 2 * direction]
        rows["bytes"] = problem.traffic.messages.bytes.reshape(-1)[sent]
        for name in ("ready_s", "start_s", "end_s", "arrival_s"):
            rows[name] = getattr(self.out, name)[sent] - self.begin_s
        return rows


def pipeline_problem(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    nodes: Sequence[str],
    num_bytes: float,
) -> Problem:
    """A Problem of one stage per rank with messages of `num_bytes` between all stages, over links to be lit.

    The links stand for light paths that are not known yet: no latency, 1 Gbit/s.
    """
    names = [f"{a}>{b}" for a, b in itertools.pairwise(nodes)]
    back = [f"{b}>{a}" for a, b in itertools.pairwise(nodes)]
    link = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1.25e8}
    stages = [
        {"rank": rank, "forward_s": f, "input_grad_s": b / 2, "weight_grad_s": b / 2, "activation_bytes": 1.0}
        for rank, (f, b) in enumerate(zip(forward_s, backward_s, strict=True))
    ]
    hops = [
        {"forward": {"link": there, "bytes": num_bytes}, "backward": {"link": again, "bytes": num_bytes}}
        for there, again in zip(names, back, strict=True)
    ]
    return Problem.model_validate(
        {
            "num_microbatches": num_microbatches,
            "ranks": [{} for _ in stages],
            "stages": stages,
            "links": dict.fromkeys([*names, *back], link),
            "hops": hops,
        }
    )
