"""A training whose messages between sites are light paths: what it asks for, and what became of each step."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError, UsageError
from farpipe.core.schedule import check
from farpipe.core.simulate import Timeline, timeline_of
from farpipe.core.step import LightPaths, Link, LitHop, LitStep, Problem, Schedule, retimed, step_arrays
from farpipe.optical.network import Network
from farpipe.optical.paths import PathTable
from farpipe.optical.pipeline_state import AT_ONCE, NOTHING, Floats, Ints, Orders, Out
from farpipe.optical.policies import POLICIES, AssignmentPolicy

MAX_BLOCKS: Final = 4
"""Light paths of one message side by side, at most."""
BYTES_PER_GBIT: Final = 1.25e8
"""Bytes per second of 1 Gbit/s."""
SHORTEST_RETRY_S: Final = 1e-6
"""Shortest period of tries: below the resolution of a second's floating-point number time would stand still."""
UNIT_GBIT: Final = 75.0
"""Rate of the units in which messages ask (CBA's frequency slot)."""


@dataclass(frozen=True)
class LightTraining:
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
            raise InputError(f"{self.problem.collectives[0].place}: no light path carries it; take `messages_alone`")
        self._expect_bytes()
        check(self.problem, self.schedule, memory=False)

    def _expect_bytes(self) -> None:
        """InputError for a message between different nodes that has no bytes."""
        stages = self.problem.num_stages
        num_bytes = step_arrays(self.problem).messages.bytes.reshape(2 * stages, -1)
        for hop, ends in enumerate(self.hops):
            if ends and not num_bytes[hop].min() > 0:
                raise InputError(
                    f"hops[{hop if hop < stages else hop - stages - 1}]: the problem has no bytes between ranks at "
                    f"{ends[0]} and {ends[1]}; give both ranks one node, or the hop its bytes"
                )

    def expect_in(self, network: Network) -> None:
        """InputError unless every node is one of the network's."""
        for index, node in enumerate(self.nodes):
            network.expect_node(node, f"nodes[{index}]")

    @cached_property
    def hops(self) -> tuple[tuple[str, str] | None, ...]:
        """Nodes of the messages of every direction and producing stage, (from, to); None: no light path."""
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

    @cached_property
    def over_light(self) -> Problem:
        """The problem with a link per pair of nodes and direction, whose rates are not known yet."""
        return over_pairs(self.problem, self.nodes, lambda a, b: _UNKNOWN)

    def orders(self, places: dict[tuple[str, str], int]) -> Orders:
        """The arrays that the kernel reads; `places` are the pairs' places in the table of paths."""
        arrays = step_arrays(self.problem)
        codes, begin = self.schedule.codes, self.schedule.begin
        stages = self.problem.num_stages
        kinds = [AT_ONCE if ends is None else places[ends] for ends in self.hops]
        kinds[stages - 1] = kinds[stages] = NOTHING  # the last stage sends nothing forward, the first nothing back
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


def messages_alone(problem: Problem) -> Problem:
    """The step without its collectives inside sites, which take no light path; InputError for one between sites."""
    for one in problem.collectives:
        if one.transfer is not None and any(problem.between_sites[name] for name in one.transfer.links):
            raise InputError(
                f"{one.place}: collectives between sites are not simulated over light paths; plan with all replicas of "
                'a stage at one site: replicas = "inside" in the job\'s [layout]'
            )
    return problem.changed(sync=None, exchanges=()) if problem.collectives else problem


@dataclass(frozen=True)
class TransferRule:
    """Rules by which messages ask for light paths; the same for all messages of a training."""

    policy: AssignmentPolicy = POLICIES["ksp-ff"]
    unit_gbit: float = UNIT_GBIT
    """Rate of one unit; a message asks for a number of units."""
    earliest: bool = False
    """Take the widest block on the candidate over which the message arrives first, instead of the first candidate that
    has the most units; of the policy only the rule of slots counts then."""
    widen: bool = False
    """Add a block, up to `MAX_BLOCKS`, to every message that is being sent on fewer units than it asked for whenever a
    light path ends, and divide what is left so that all of it arrives together. A kept light path is replaced by a
    wider one."""
    setup_s: float = 0.0
    """Seconds from the grant until the first bit can be sent; the spectrum is taken from the grant on."""
    release_s: float = 0.0
    """Seconds from a message's last bit until its spectrum is free for others: the signalling of releases."""
    retry_s: float = 0.0
    """Seconds after which messages that wait try again; 0: whenever a light path ends."""
    ahead: bool = False
    """Ask so long before the producer ends that the light path is set up by then (at the producer's start at most)."""
    keep_s: float | None = None
    """Keep one light path per hop until it has been idle so long; None: one per message."""
    one_at_a_time: bool = False
    """A hop has at most one light path at a time; its other messages wait, and none overtakes: by priority, then in
    order of asking, also where one behind would fit and the first one does not. So with `keep_s`."""

    def __post_init__(self) -> None:
        if not 0 < self.unit_gbit < inf:
            raise UsageError(f"unit_gbit must be more than 0, found {self.unit_gbit}")
        for name in ("setup_s", "release_s", "retry_s"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(f"{name} must be at least 0, found {getattr(self, name)}")
        if 0 < self.retry_s < SHORTEST_RETRY_S:
            raise UsageError(f"retry_s must be 0 or at least {SHORTEST_RETRY_S:g}, found {self.retry_s:g}")
        if self.keep_s is not None and self.keep_s < 0:
            raise UsageError(f"keep_s must be at least 0, found {self.keep_s}")


@dataclass(frozen=True)
class Demands:
    """Demands of the messages of one step: units at most and at least, and their rank in the queue (lower first)."""

    want: Ints
    least: Ints
    priority: Ints

    @classmethod
    def same(cls, training: LightTraining, most: int, least: int | None = None) -> "Demands":
        """Every message asks for `most` units and takes `least` (by default `most`) or more."""
        shape, fewest = training.num_messages, most if least is None else least
        if not 1 <= fewest <= most:
            raise UsageError(f"units asked for must be at least 1, the least first, found {least} and {most}")
        return cls(np.full(shape, most, np.int64), np.full(shape, fewest, np.int64), np.zeros(shape, np.int64))


@dataclass(frozen=True, repr=False)
class Step:
    """Events of one step of a training; times in `out` are absolute."""

    training: LightTraining
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
        """Seconds of every message over a light path from when it was ready until its first bit was sent."""
        sent = self.training.sent
        return np.asarray(self.out.start_s[sent] - self.out.ready_s[sent], np.float64)

    @property
    def waited(self) -> NDArray[np.bool_]:
        """[2, S, M]: True for a message whose spectrum came after it had asked, refused or not; setting up a light path
        is no wait for spectrum."""
        shape = (2, self.training.problem.num_stages, self.training.problem.num_microbatches)
        late = np.zeros(self.training.num_messages, np.bool_)
        late[self.training.sent] = self.out.grant_s[self.training.sent] > self.out.ask_s[self.training.sent]
        return late.reshape(shape)

    @property
    def waited_ratio(self) -> float:
        """Share of the messages over light paths that waited for spectrum."""
        return float(self.waited.sum()) / self.num_sent if self.num_sent else 0.0

    @property
    def bubble_ratio(self) -> float:
        """1 - busy compute time / (number of ranks x makespan)."""
        return self.timeline().bubble_ratio

    def timeline(self) -> Timeline:
        """The step as a Timeline; links are named by their nodes. A message is on its link while it is sent."""
        problem, out = self.training.over_light, self.out
        shape = (3, 2, problem.num_stages, problem.num_microbatches)
        message_s = np.reshape((out.start_s, out.end_s, out.arrival_s), shape) - self.begin_s
        return timeline_of(
            problem, step_arrays(problem), self.training.schedule, out.action_s - self.begin_s, message_s
        )


_UNKNOWN: Final = Link(latency_s=0.0, bandwidth_bytes_per_s=BYTES_PER_GBIT)


def over_pairs(problem: Problem, nodes: Sequence[str], link_of: Callable[[str, str], Link]) -> Problem:
    """The problem with a link per pair of nodes and direction, called ``node>node``.

    Hops inside a node take no time.
    """
    at = [nodes[stage.rank] for stage in problem.stages]
    pairs = [(a, b) if a != b else None for a, b in itertools.pairwise(at)]
    links = {f"{a}>{b}": link_of(a, b) for pair in filter(None, pairs) for a, b in (pair, pair[::-1])}
    return problem.over(links, [pair and (">".join(pair), ">".join(pair[::-1])) for pair in pairs])


def nominal_problem(problem: Problem, nodes: Sequence[str], paths: PathTable, gbit_s: float) -> Problem:
    """The Problem with links of `gbit_s` over the shortest candidates, as if spectrum were free.

    Orders are made for it. A hop between ranks at one node costs nothing.
    """

    def shortest(a: str, b: str) -> Link:
        pair = paths.pair(a, b, "nodes")
        latency_s = float(paths.latency_s[paths.first[pair] : paths.first[pair + 1]].min())
        return Link(latency_s=latency_s, bandwidth_bytes_per_s=gbit_s * BYTES_PER_GBIT)

    return over_pairs(problem, nodes, shortest)


def lit_problem(step: Step) -> Problem:
    """The Problem of a step with one link per pair of nodes and direction, and each message's own time there.

    A message has its light path for itself, so it delays no other message, and its wait for the path is part of its
    delay. Simulating the Problem in the same order gives the step's time again, and any tool that reads Problems
    sees the same step. A link has the bandwidth of its fastest light path and the propagation delay of its shortest.
    """
    training, out = step.training, step.out
    shape = (2, training.problem.num_stages, training.problem.num_microbatches)
    sent, arrives_after_s = training.sent, np.zeros(shape)
    arrives_after_s.flat[sent] = out.arrival_s[sent] - out.ready_s[sent]
    units, end_s, arrival_s = (of.reshape(len(training.hops), -1) for of in (out.units, out.end_s, out.arrival_s))

    def link(a: str, b: str) -> Link:
        hops = [hop for hop, ends in enumerate(training.hops) if ends == (a, b)]
        rate = float(units[hops].max()) * step.unit_gbit * BYTES_PER_GBIT
        return Link(latency_s=float((arrival_s[hops] - end_s[hops]).min()), bandwidth_bytes_per_s=rate)

    return retimed(over_pairs(training.problem, training.nodes, link), np.zeros(shape), arrives_after_s)


def light_paths(steps: Sequence[Step]) -> LightPaths:
    """Light paths of the messages of some steps of one training, for a run that takes them.

    A message that two light paths side by side carried has the rate and delay of both together.
    """
    return LightPaths(
        schedule=steps[0].training.schedule,
        steps=tuple(
            LitStep(hops=tuple(_lit_hop(step, hop) for hop, e in enumerate(step.training.hops) if e)) for step in steps
        ),
    )


def _lit_hop(step: Step, hop: int) -> LitHop:
    out, problem = step.out, step.training.problem
    count = problem.num_microbatches
    own = slice(hop * count, (hop + 1) * count)
    direction, stage = divmod(hop, problem.num_stages)
    sizes, sending_s = problem.traffic.messages.bytes[direction, stage], out.end_s[own] - out.start_s[own]
    asked = out.units[own] * step.unit_gbit * BYTES_PER_GBIT
    rates = np.divide(sizes, sending_s, out=asked, where=sending_s > 0)
    return LitHop(
        direction=("forward", "backward")[direction],
        stage=stage,
        wait_s=tuple(np.maximum(out.start_s[own] - out.ready_s[own], 0.0).tolist()),
        bandwidth_bytes_per_s=tuple(rates.tolist()),
        latency_s=tuple(np.maximum(out.arrival_s[own] - out.end_s[own], 0.0).tolist()),
    )
