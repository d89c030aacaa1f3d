"""A training and background traffic on one network: steps played one after the other, with a state that lasts."""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.step import Schedule
from farpipe.core.units import counted
from farpipe.optical.demands import TransferPolicy
from farpipe.optical.modulation import MODULATIONS, Modulation
from farpipe.optical.paths import PathTable
from farpipe.optical.pipeline_state import LOGGED, NEXT, NUM_COUNTERS, SPARE, Background, Lights, Net, Out, Rule, State
from farpipe.optical.policies import POLICIES, AssignmentPolicy
from farpipe.optical.spectrum import Grid, empty_heap, expect_narrow, expect_reach
from farpipe.optical.traffic import Traffic
from farpipe.optical.transfers import MAX_BLOCKS, Demands, LightTraining, Step, TransferRule

_BACKGROUND = ("background",)
PENDING = -2
"""Entry of `Background.path` of a request that has not come yet."""


@dataclass(frozen=True)
class SharedNetwork:
    """A network that a training shares with background traffic, with the candidate paths of both."""

    paths: PathTable
    grid: Grid
    modulation: Modulation = MODULATIONS["64qam"]
    """Modulation of the training's messages."""
    traffic: Traffic | None = None
    background_paths: PathTable | None = None
    """Candidates of the background; None: the training's."""
    background_policy: AssignmentPolicy = POLICIES["ksp-ff"]
    background_modulation: Modulation = MODULATIONS["deeprmsa"]

    @cached_property
    def table(self) -> PathTable:
        """The candidates of both; the background's pairs have a mark behind their nodes."""
        others = (self.background_paths or self.paths).of_pair
        return PathTable(
            self.paths.network, self.paths.of_pair | {(*pair, *_BACKGROUND): found for pair, found in others.items()}
        )


class NetworkPlayer:
    """Plays steps of a training on a shared network; time goes on from step to step.

    Refused messages wait and try again whenever a light path ends, in order of priority and asking. Background requests
    that are refused are lost.
    """

    def __init__(
        self,
        shared: SharedNetwork,
        training: LightTraining,
        rule: TransferRule,
        *,
        begin_s: float = 0.0,
        num_logged: int = 0,
    ) -> None:
        training.expect_in(shared.paths.network)
        self.training, self.rule, self.shared = training, rule, shared
        places = {pair: shared.paths.pair(*pair, "training") for pair in training.pairs}
        self._net = _net(shared)
        expect_reach(shared.table, shared.modulation, self._net.per_slot, training.pairs)
        self._orders = training.orders(places)
        self._background = _background(shared)
        self._state = _state(shared, training, num_logged)
        self.now_s = 0.0
        self.wait_until(begin_s)

    def wait_until(self, until_s: float) -> None:
        """Let the background go on alone until `until_s`."""
        if until_s > self.now_s:
            self.now_s = self._play(Demands.same(self.training, 1), _out(self.training), float(until_s))

    def step(self, demands: Demands) -> Step:
        """Play the next step; InfeasibleError when a message can never be sent."""
        out, begin_s, held = _out(self.training), self.now_s, self._held(self.now_s)
        first = int(self._state.counters[NEXT])
        end_s = self._play(demands, out, inf)
        if end_s < 0:
            raise InfeasibleError(self._stuck(out, demands))
        self.now_s = end_s
        came = self._background.path[first : int(self._state.counters[NEXT])]
        used = self._held(end_s) - held
        return Step(
            self.training, begin_s, end_s, out, demands, self.rule.unit_gbit, used, (len(came), int((came == -1).sum()))
        )

    def _play(self, demands: Demands, out: Out, until_s: float) -> float:
        from farpipe.optical import pipeline_kernel

        kernel: Any = pipeline_kernel.play
        rule = _rule(self.rule, demands)
        return float(kernel(self._net, self._background, self._orders, rule, self._state, out, self.now_s, until_s))

    def _held(self, now_s: float) -> float:
        """Slots x fibres x seconds that messages have held, light paths that have not ended included."""
        lights, hops = self._state.lights, np.diff(self._net.table[0])
        active = np.ones(len(lights.path), np.bool_)
        active[lights.spare[: self._state.counters[SPARE]]] = False
        mine = active & (lights.hop >= 0)
        slots = lights.width[mine] * hops[lights.path[mine]]
        return float(self._state.used[0] + (slots * (now_s - lights.begun_s[mine])).sum())

    @property
    def background_path(self) -> NDArray[np.int32]:
        """Outcome of every background request so far: its candidate, -1 refused, PENDING."""
        return self._background.path

    @property
    def log(self) -> NDArray[np.float64]:
        """Light paths so far, a row each.

        Owner (a message, or -1 - background request), candidate, first slot, slots, from, until.
        """
        return self._state.log[: int(self._state.counters[LOGGED])]

    def _stuck(self, out: Out, demands: Demands) -> str:
        waiting = np.flatnonzero(np.isfinite(out.ask_s) & ~np.isfinite(out.grant_s))
        if not len(waiting):
            return "the step can't go on: an action waits for something that never comes"
        message = int(waiting[0])
        ends = self.training.hops[message // self.training.problem.num_microbatches]
        least, slots = int(demands.least[message]), self.shared.grid.num_slots
        asked = f"{counted(least, 'unit')} of {self.rule.unit_gbit:g} Gbit/s in {counted(slots, 'slot')}"
        advice = "ask for fewer, or give more slots" if least > 1 else "give more or wider slots"
        return f"a message from {' to '.join(ends or '?')} never finds {asked}: {advice}"


@dataclass(frozen=True)
class PlayedSteps:
    """A training's steps on a network, in one order."""

    schedule: Schedule
    steps: tuple[Step, ...]
    background_path: NDArray[np.int32]
    """Outcome of the background: see `NetworkPlayer.background_path`."""
    log: NDArray[np.float64]
    """Light paths of the steps: see `NetworkPlayer.log`."""

    @property
    def mean_s(self) -> float:
        """Mean time per step."""
        return float(np.mean([step.makespan_s for step in self.steps]))


def play_steps(
    shared: SharedNetwork,
    training: LightTraining,
    policy: TransferPolicy,
    *,
    num_steps: int,
    begin_s: float = 0.0,
    skipped: int = 0,
    num_logged: int = 0,
    to_end: bool = False,
) -> PlayedSteps:
    """Play a training: `num_steps` steps after `skipped` more, in which a policy that learns from steps settles.

    `to_end`: the background goes on alone until its last request.
    """
    player = NetworkPlayer(shared, training, policy.rule, begin_s=begin_s, num_logged=num_logged)
    last, steps = None, []
    for _ in range(skipped + num_steps):
        last = player.step(policy.demands(training, last))
        steps.append(last)
    if to_end and shared.traffic is not None:
        player.wait_until(float(shared.traffic.arrival_s[-1]))
    return PlayedSteps(training.schedule, tuple(steps[skipped:]), player.background_path, player.log)


def _net(shared: SharedNetwork) -> Net:
    paths, grid = shared.table, shared.grid
    spectrum = grid.empty(paths.network.num_fibres)
    return Net(
        spectrum=spectrum,
        table=paths.arrays,
        first=paths.first,
        per_slot=shared.modulation.gbit_per_slot(paths.km, grid.slot_ghz),
        latency_s=paths.latency_s,
        guard=grid.guard,
        need=np.zeros(int(np.diff(paths.first).max()), np.int64),
        mask=np.zeros(spectrum[0].shape[1], np.uint64),
    )


def _background(shared: SharedNetwork) -> Background:
    traffic, paths = shared.traffic, shared.table
    per_slot = shared.background_modulation.gbit_per_slot(paths.km, shared.grid.slot_ghz)
    if traffic is None:
        none, no_pair = np.zeros(0), np.zeros(0, np.int32)
        return Background(none, no_pair, none, none, per_slot, shared.background_policy.codes, no_pair.copy())
    marked = [(*pair, *_BACKGROUND) for pair in traffic.pairs]
    for source, target, _ in marked:
        (shared.background_paths or shared.paths).pair(source, target, "background")
    pair = np.array([paths.pairs[one] for one in marked], np.int32)[traffic.pair]
    expect_reach(paths, shared.background_modulation, per_slot, marked)
    expect_narrow(paths, per_slot, pair, traffic.gbit_s, shared.grid)
    path = np.full(len(traffic), PENDING, np.int32)
    codes = shared.background_policy.codes
    return Background(traffic.arrival_s, pair, traffic.gbit_s, traffic.holding_s, per_slot, codes, path)


def _state(shared: SharedNetwork, training: LightTraining, num_logged: int) -> State:
    places = shared.paths.network.num_fibres * shared.grid.num_slots + 1
    hops = 2 * training.problem.num_stages
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[SPARE] = places
    path, start, count, hop, entry = (np.zeros(places, np.int64) for _ in range(5))
    begun_s, until_s, messages = np.zeros(places), np.full(places, inf), training.num_messages
    return State(
        events=empty_heap(places + 16 * messages + 2 * hops + 64),
        lights=Lights(path, start, count, hop, begun_s, until_s, entry, np.arange(places)),
        counters=counters,
        used=np.zeros(1),
        waiting=np.zeros(messages, np.int64),
        ahead=np.zeros(hops, np.int64),
        sending=np.zeros(messages, np.int64),
        num_active=np.zeros(hops, np.int64),
        kept=np.full(hops, -1, np.int64),
        kept_units=np.zeros(hops, np.int64),
        wider=np.full(hops, -1, np.int64),
        kept_until_s=np.zeros(hops),
        watched=np.zeros(hops, np.bool_),
        log=np.zeros((num_logged, 6)),
    )


def _rule(rule: TransferRule, demands: Demands) -> Rule:
    if (demands.least < 1).any() or (demands.least > demands.want).any():
        raise InputError("demands: every message asks for at least one unit, and takes no more than it asks for")
    own: dict[str, Any] = {name: getattr(rule, name) for name in ("earliest", "widen", "one_at_a_time")}
    for name in ("unit_gbit", "setup_s", "release_s", "retry_s"):
        own[name] = float(getattr(rule, name))  # an int would compile the kernel once more
    ahead, keep_s = rule.ahead and rule.setup_s > 0, -1.0 if rule.keep_s is None else float(rule.keep_s)
    asked = (demands.want, demands.least, demands.priority)
    return Rule(*asked, policy=rule.policy.codes, ahead=ahead, keep_s=keep_s, **own)


def _out(training: LightTraining) -> Out:
    count, problem = training.num_messages, training.problem
    ready_s, ask_s, grant_s, start_s, end_s, arrival_s = (np.full(count, inf) for _ in range(6))
    there = np.zeros(count, np.bool_)
    there[: problem.num_microbatches] = True  # the first stage's forwards and the last one's backwards need no message
    there[count - problem.num_microbatches :] = True
    return Out(
        action_s=np.full(training.schedule.num_actions, inf),
        ready_s=ready_s,
        ask_s=ask_s,
        grant_s=grant_s,
        start_s=start_s,
        end_s=end_s,
        arrival_s=arrival_s,
        units=np.zeros(count, np.int64),
        path=np.full(count, -1, np.int64),
        refused=np.zeros(count, np.bool_),
        held=np.full((MAX_BLOCKS, count), -1, np.int64),
        block_units=np.zeros((MAX_BLOCKS, count), np.int64),
        there=there,
        position=np.zeros(problem.num_ranks, np.int64),
        running=np.zeros(problem.num_ranks, np.bool_),
    )
