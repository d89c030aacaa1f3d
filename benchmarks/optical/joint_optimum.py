"""The joint optimum of order, spectrum and time for small steps, proven by CP-SAT, and how far policies are from it.

    python -m benchmarks.optical.joint_optimum [--draws 10] [--limit 60] [--rows FROM UNTIL]

A step begins among light paths that stand there, and each of these ends at a known time; no new ones come, so that the
program and the policies see the same network. The program chooses the order of every rank (F, I and W), and for every
message one light path: candidate, first slot, width, start. Its rate follows from width and reach, at most 6 units;
its spectrum is held from the set-up until the release. Times are whole ticks: with all durations rounded down the
program's bound holds for every policy of one light path per message, and its answer counts only as what it takes
without rounding. "Any blocks" is the program without spectrum: a bound also for several light paths per message.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, pairwise
from math import inf
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from benchmarks.optical.optical_grid import FIXED, candidates_of, percent, show
from benchmarks.optical.optical_grid import Setting as Usual
from benchmarks.optical.optical_training import pipeline_problem, scenario
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Problem, Rank, Schedule, retimed
from farpipe.core.step.codes import F, I, W, arrival_of, cell_of, direction_of, encode, kind_of, message_of, slot_of
from farpipe.optical import find_modulation, find_network
from farpipe.optical.confidence import mean_interval
from farpipe.optical.demands import CANDIDATES, TransferPolicy, find_transfer_policy
from farpipe.optical.joint_order import joint_order
from farpipe.optical.paths import PathTable
from farpipe.optical.shared_network import NetworkPlayer, SharedNetwork
from farpipe.optical.study import random_nodes
from farpipe.optical.transfers import UNIT_GBIT, LightTraining, TransferRule, nominal_problem

TICK_S = 20e-6
PART_GBIT, MAX_UNITS = UNIT_GBIT / 6, 36
MAX_GBIT = MAX_UNITS * PART_GBIT
TIMES = {"setup_s": 0.01, "release_s": 0.01, "ahead": True}
RULE = TransferRule(**TIMES)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Taken:
    """A light path that stands there when the step begins."""

    fibres: frozenset[int]
    first: int
    slots: int
    until_s: float
    """Seconds after the step began."""


@dataclass(frozen=True)
class Light:
    """A light path that a message may have; guard slots are among its slots."""

    path: int
    units: int
    """Rate in parts of a unit."""
    slots: int
    sent_s: float
    """Time to send the message."""
    latency_s: float


def fibres_of(paths: PathTable, path: int) -> frozenset[int]:
    return frozenset(paths.fibres[paths.begin[path] : paths.begin[path + 1]].tolist())


@dataclass(frozen=True)
class Case:
    """A step (its Problem, at its nodes) on a network whose light paths only end."""

    problem: Problem
    nodes: tuple[str, ...]
    shared: SharedNetwork
    begin_s: float
    taken: tuple[Taken, ...] = ()
    rule: TransferRule = RULE

    def training(self, schedule: Schedule) -> LightTraining:
        return LightTraining(self.problem, schedule, self.nodes)

    def among(self, paths: PathTable) -> "Case":
        """The same with other candidates of the training."""
        return replace(self, shared=replace(self.shared, paths=paths))

    def still(self) -> "Case":
        """The case without the requests that come after it has begun, and the light paths that stand there."""
        traffic = self.shared.traffic
        if traffic is None:
            return self
        count = int(np.searchsorted(traffic.arrival_s, self.begin_s))
        columns = {name: getattr(traffic, name)[:count] for name in ("arrival_s", "pair", "gbit_s", "holding_s")}
        shared, taken = replace(self.shared, traffic=replace(traffic, **columns)), []
        training = self.training(order("gpipe", self.problem))
        alone = NetworkPlayer(shared, training, TransferRule(), begin_s=self.begin_s, num_logged=count)
        for owner, path, first, slots, _, until_s in alone.log:
            if until_s == inf:
                request, fibres = int(-1 - owner), fibres_of(shared.table, int(path))
                ends_s = float(traffic.arrival_s[request] + traffic.holding_s[request])
                taken.append(Taken(fibres, int(first), int(slots), ends_s - self.begin_s))
        return replace(self, shared=shared, taken=tuple(taken))

    def fibres(self, path: int) -> frozenset[int]:
        return fibres_of(self.shared.paths, path)

    def lights(self, pair: int, gbit: float) -> list[Light]:
        """The light paths for a message of `gbit` Gbit: every candidate, and every width that makes it faster."""
        paths, grid, found = self.shared.paths, self.shared.grid, []
        per_slot = self.shared.modulation.gbit_per_slot(paths.km, grid.slot_ghz) / PART_GBIT
        for path in range(int(paths.first[pair]), int(paths.first[pair + 1])):
            units = 0
            for slots in range(1, grid.num_slots - grid.guard + 1):
                before, units = units, min(MAX_UNITS, int(slots * per_slot[path] + 1e-9))
                if units > before:
                    sent_s, latency_s = gbit / (units * PART_GBIT), float(paths.latency_s[path])
                    found.append(Light(path, units, slots + grid.guard, sent_s, latency_s))
        return found


@dataclass
class Program:
    """Variables of the program, in ticks."""

    case: Case
    training: LightTraining
    horizon: int
    with_spectrum: bool
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    start: dict[int, Any] = field(default_factory=dict)
    """By code of action."""
    sent: dict[int, Any] = field(default_factory=dict)
    """By message: when its first bit is sent."""
    first: dict[int, Any] = field(default_factory=dict)
    chosen: dict[int, list[tuple[Light, Any]]] = field(default_factory=dict)
    boxes: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)
    """By fibre: times and slots."""
    makespan: Any = None

    def time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def end(self, code: int) -> Any:
        return self.start[code] + ticks(self.duration_s(code))

    def duration_s(self, code: int) -> float:
        return action_s(self.case.problem, code)


def ticks(seconds: float) -> int:
    """Whole ticks, rounded down."""
    return int(np.floor(seconds / TICK_S + 1e-6))


def action_s(problem: Problem, code: int) -> float:
    stage, microbatch = cell_of(code, problem.num_microbatches)
    name = {F: "forward_s", I: "input_grad_s", W: "weight_grad_s"}[kind_of(code)]
    return float(problem.table(name)[stage, microbatch])


def codes_of(problem: Problem) -> list[int]:
    slots = range(problem.num_stages * problem.num_microbatches)
    return [encode(kind, slot) for slot in slots for kind in (F, I, W)]


def add_actions(program: Program) -> None:
    """A rank does one action at a time, has memory for them, and I follows F, W follows I."""
    problem, model = program.case.problem, program.model
    of_rank: list[list[Any]] = [[] for _ in problem.ranks]
    held: list[list[Any]] = [[] for _ in problem.ranks]
    for code in codes_of(problem):
        program.start[code] = program.time()
        rank = problem.stages[cell_of(code, problem.num_microbatches)[0]].rank
        size = ticks(program.duration_s(code))
        of_rank[rank].append(model.new_fixed_size_interval_var(program.start[code], size, ""))
        if kind_of(code) == W:
            forward, back = code - W + F, code - W + I
            model.add(program.start[back] >= program.end(forward))
            model.add(program.start[code] >= program.end(back))
            model.add(program.end(code) <= program.makespan)
            span = (program.start[forward], program.time(), program.end(back))
            held[rank].append(model.new_interval_var(*span, ""))
    for rank, intervals in enumerate(of_rank):
        model.add_no_overlap(intervals)
        limit = problem.ranks[rank].memory_bytes
        if limit is not None:
            model.add_cumulative(held[rank], [1] * len(held[rank]), int(limit))
    for one, other in pairwise(range(problem.num_microbatches)):  # they are all alike: count them as they begin
        model.add(program.start[encode(F, one)] <= program.start[encode(F, other)])


def add_messages(program: Program) -> None:
    """A consumer waits for its message, the message for its producer, and it has one light path."""
    training, pairs, model = program.training, program.case.shared.paths.pairs, program.model
    gbit = training.orders({pair: pairs[pair] for pair in training.pairs}).gbit
    for message, (producer, user) in links_of(training).items():
        ends, arrival = training.hops[message // training.problem.num_microbatches], program.end(producer)
        if ends is not None:
            program.sent[message] = program.time()
            model.add(program.sent[message] >= program.end(producer))
            arrival = add_light(program, message, pairs[ends], float(gbit[message]))
        model.add(program.start[user] >= arrival)


def add_light(program: Program, message: int, pair: int, gbit: float) -> Any:
    """One light path for a message; returns its arrival."""
    case, model, sent = program.case, program.model, program.sent[message]
    lights = case.lights(pair, gbit)
    if not program.with_spectrum:
        return sent + ticks(gbit / MAX_GBIT + min(light.latency_s for light in lights))
    literals = [model.new_bool_var("") for _ in lights]
    model.add_exactly_one(literals)
    program.chosen[message] = list(zip(lights, literals, strict=True))

    def chosen(figures: Sequence[int]) -> Any:
        variable = model.new_int_var(min(figures), max(figures), "")
        model.add(variable == sum(figure * literal for figure, literal in zip(figures, literals, strict=True)))
        return variable

    setup, slots = ticks(case.rule.setup_s), chosen([light.slots for light in lights])
    held = chosen([setup + ticks(light.sent_s + case.rule.release_s) for light in lights])
    first = program.first[message] = model.new_int_var(0, case.shared.grid.num_slots, "")
    top = model.new_int_var(0, case.shared.grid.num_slots, "")
    end = model.new_int_var(0, program.horizon + ticks(case.rule.release_s), "")
    model.add(sent >= setup)
    for path in sorted({light.path for light in lights}):
        here = model.new_bool_var("")
        model.add(here == sum(literal for light, literal in program.chosen[message] if light.path == path))
        times = model.new_optional_interval_var(sent - setup, held, end, here, "")
        widths = model.new_optional_interval_var(first, slots, top, here, "")
        for fibre in case.fibres(path):
            program.boxes.setdefault(fibre, []).append((times, widths))
    return sent + chosen([ticks(light.sent_s + light.latency_s) for light in lights])


def add_spectrum(program: Program) -> None:
    """On no fibre two light paths have a slot at the same time, those that stand there among them."""
    model = program.model
    for fibre, boxes in program.boxes.items():
        standing = [
            (
                model.new_fixed_size_interval_var(0, ticks(one.until_s), ""),
                model.new_fixed_size_interval_var(one.first, one.slots, ""),
            )
            for one in program.case.taken
            if fibre in one.fibres and ticks(one.until_s) > 0
        ]
        model.add_no_overlap_2d(*zip(*boxes, *standing, strict=True))


def program_of(case: Case, within_s: float, with_spectrum: bool = True) -> Program:
    """The program of a step that takes at most `within_s`."""
    placeholder = order("gpipe", case.problem)
    program = Program(case, case.training(placeholder), ticks(within_s), with_spectrum)
    program.makespan = program.time()
    add_actions(program)
    add_messages(program)
    add_spectrum(program)
    program.model.minimize(program.makespan)
    return program


@dataclass(frozen=True)
class Optimum:
    """An answer of the program: what it takes without rounding, and what no answer undercuts."""

    makespan_s: float
    bound_s: float
    schedule: Schedule | None
    lights: dict[int, tuple[Light, int]]
    """By message: its light path and first slot."""
    sent_s: dict[int, float]


def solve(program: Program, limit_s: float, workers: int = 2) -> Optimum:
    """Solve it; an answer that was found is played without rounding."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit_s, workers
    status = solver.solve(program.model)
    bound_s = max(0.0, solver.best_objective_bound) * TICK_S
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(inf, bound_s, None, {}, {})
    schedule = _schedule(program, solver)
    lights = {
        message: next((light, solver.value(program.first[message])) for light, on in lights if solver.value(on))
        for message, lights in program.chosen.items()
    }
    sent = {message: solver.value(variable) for message, variable in program.sent.items()}
    if not program.with_spectrum:
        return Optimum(inf, bound_s, schedule, lights, {})
    makespan_s, sent_s = play(program.case, schedule, lights, sorted(sent, key=lambda message: sent[message]))
    return Optimum(makespan_s, bound_s, schedule, lights, sent_s)


def _schedule(program: Program, solver: cp_model.CpSolver) -> Schedule:
    problem = program.case.problem
    of_rank: list[list[int]] = [[] for _ in problem.ranks]
    for code in sorted(program.start, key=lambda code: (solver.value(program.start[code]), code)):
        of_rank[problem.stages[cell_of(code, problem.num_microbatches)[0]].rank].append(code)
    begin = np.cumsum([0, *map(len, of_rank)], dtype=np.int32)
    codes = np.array(list(chain(*of_rank)), np.int32)
    return Schedule.from_codes(problem.num_microbatches, codes, begin, "joint optimum")


Lit = dict[int, tuple[Light, int]]
"""Light path and first slot of every message."""


def play(case: Case, schedule: Schedule, lights: Lit, queue: Sequence[int]) -> tuple[float, dict[int, float]]:
    """Makespan and first bits of the messages: all as early as order, light paths and `queue` (who goes first) allow.

    (inf, {}) when they wait for each other. The simulator, given the delays of the messages, must agree.
    """
    training, setup_s = case.training(schedule), case.rule.setup_s
    before = [(one, other) for one, other in combinations(queue, 2) if _meet(case, lights[one], lights[other])]
    sent_s = {message: setup_s + _free_s(case, *lights[message]) for message in queue}
    links, end_s = links_of(training), dict.fromkeys(schedule.codes.tolist(), 0.0)
    for _ in range(2 + len(end_s) + len(queue)):
        was = (dict(sent_s), dict(end_s))
        for one, other in before:
            free_s = sent_s[one] + lights[one][0].sent_s + case.rule.release_s
            sent_s[other] = max(sent_s[other], free_s + setup_s)
        _play_actions(training, _arrivals(links, lights, sent_s, end_s), end_s)
        for message in queue:
            sent_s[message] = max(sent_s[message], end_s[links[message][0]])
        if was == (sent_s, end_s):
            makespan_s, arrival_s = max(end_s.values()), _arrivals(links, lights, sent_s, end_s)
            after_s = {message: arrival_s[user] - end_s[producer] for message, (producer, user) in links.items()}
            assert abs(_simulated_s(training, after_s) - makespan_s) < 1e-9
            return makespan_s, sent_s
    return inf, {}


def links_of(training: LightTraining) -> dict[int, tuple[int, int]]:
    """Codes of producer and consumer of every message."""
    problem, found = training.problem, {}
    for code in codes_of(problem):
        stage, direction = cell_of(code, problem.num_microbatches)[0], direction_of(kind_of(code))
        if kind_of(code) != W and stage != (0 if direction else problem.num_stages - 1):
            user = encode(kind_of(code), arrival_of(slot_of(code), direction, problem.num_microbatches))
            found[message_of(direction, slot_of(code), problem.num_stages * problem.num_microbatches)] = (code, user)
    return found


def _arrivals(
    links: dict[int, tuple[int, int]], lights: Lit, sent_s: dict[int, float], end_s: dict[int, float]
) -> dict[int, float]:
    """By consumer: when its message is there, which between ranks at one node is at once."""
    found = {}
    for message, (producer, user) in links.items():
        light = lights[message][0] if message in lights else None
        found[user] = sent_s[message] + light.sent_s + light.latency_s if light else end_s[producer]
    return found


def _play_actions(training: LightTraining, arrival_s: dict[int, float], end_s: dict[int, float]) -> None:
    """Ends of the actions, each rank's one after the other, into `end_s`."""
    schedule = training.schedule
    for begin, end in pairwise(schedule.begin.tolist()):
        now_s = 0.0
        for code in schedule.codes[begin:end].tolist():
            now_s = end_s[code] = max(now_s, arrival_s.get(code, 0.0)) + action_s(training.problem, code)


def _simulated_s(training: LightTraining, after_s: dict[int, float]) -> float:
    """Makespan by the simulator of steps, with these times from each message's producer until it is there."""
    problem = training.problem
    times = np.zeros((2, problem.num_stages, problem.num_microbatches))
    times.reshape(-1)[list(after_s)] = list(after_s.values())
    return simulate(retimed(training.over_light, np.zeros_like(times), times), training.schedule).makespan_s


def _free_s(case: Case, light: Light, first: int) -> float:
    """Time from which on its slots are free of what stands there."""
    fibres, end = case.fibres(light.path), first + light.slots
    taken = [one for one in case.taken if one.fibres & fibres and first < one.first + one.slots and one.first < end]
    return max([0.0, *(one.until_s for one in taken)])


def _meet(case: Case, one: tuple[Light, int], other: tuple[Light, int]) -> bool:
    """True if two light paths have a slot of a fibre in common."""
    overlap = one[1] < other[1] + other[0].slots and other[1] < one[1] + one[0].slots
    return overlap and bool(case.fibres(one[0].path) & case.fibres(other[0].path))


@dataclass(frozen=True)
class Setting:
    """One row: ranks by the name of their site, microbatches, how many a rank holds, messages, background."""

    sites: str = "abc"
    microbatches: int = 4
    in_flight: int = 3
    megabytes: float = 512
    load: float = 90.0
    holding_s: float = 2.0

    def __str__(self) -> str:
        words = (f"{len(set(self.sites))} sites, {len(self.sites)} ranks", f"{self.microbatches} microbatches")
        background = f"{self.load:g} E held {self.holding_s:g} s"
        return ", ".join((*words, f"{self.in_flight} in flight", f"{self.megabytes:g} MB", background))

    def case(self, draw: int) -> Case:
        """Random nodes with a background; `Case.still` makes it stand."""
        modulation, num_ranks = find_modulation("gnpy"), len(self.sites)
        nodes = random_nodes(find_network("nsfnet"), tuple(self.sites), modulation, draw)
        seconds = ([0.026] * num_ranks, [0.052] * num_ranks)
        problem = pipeline_problem(*seconds, self.microbatches, nodes, self.megabytes * 1e6)
        problem = problem.model_copy(update={"ranks": (Rank(memory_bytes=float(self.in_flight)),) * num_ranks})
        paths = candidates_of(Usual(), nodes, 8, "km")
        where = scenario(self.load, self.holding_s, modulation="gnpy")
        shared = where.shared(draw, where.begin_s + 60.0, paths)
        return Case(nominal_problem(problem, nodes, paths, MAX_GBIT), nodes, shared, where.begin_s)

    def order(self, case: Case, policy: TransferPolicy) -> Schedule:
        """The order that `farpipe optical` takes, chosen on another background."""
        where = scenario(self.load, self.holding_s, modulation="gnpy")
        other = where.shared(1_000_000, where.begin_s + 60.0, case.shared.paths)
        return joint_order(other, case.problem, case.nodes, policy, begin_s=where.begin_s)


SETTINGS = (
    Setting("ab", 4, 2),
    Setting(),
    Setting(in_flight=5),
    Setting(megabytes=2048),
    Setting(load=60.0, holding_s=0.2),
    Setting(microbatches=6),
    Setting("abbc", in_flight=4),
)


def step_s(case: Case, schedule: Schedule, policy: TransferPolicy, rounds: int = 1) -> float:
    """Time of the step under a policy; with `rounds` of the same one, from which it learns, the best of them."""
    training, last, best_s = case.training(schedule), None, inf
    for _ in range(rounds):
        last = NetworkPlayer(case.shared, training, policy.rule, begin_s=case.begin_s).step(
            policy.demands(training, last)
        )
        best_s = min(best_s, last.makespan_s)
    return best_s


def draw_of(setting: Setting, draw: int, limit_s: float) -> dict[str, float]:
    """Step times of one draw by what made them, in seconds; "optimum" and bounds among them."""
    live = setting.case(draw)
    case, found = live.still(), {}
    policies = {name: find_transfer_policy(name, **TIMES) for name in ("cd-cba", "earliest", "widen")}
    fixed = {f"fixed {name}": replace(one, rule=replace(one.rule, **TIMES)) for name, one in FIXED.items()}
    for name, policy in (policies | fixed).items():
        here = case.among(candidates_of(Usual(), case.nodes, *CANDIDATES.get(name, (8, "km"))))
        schedule = setting.order(here, policy)
        found[name] = step_s(here, schedule, policy, 5 if name == "cd-cba" else 1)
        if name in ("earliest", "widen"):
            found[f"{name}, live"] = step_s(live, schedule, policy)
    found["1f1b"] = step_s(case, order("1f1b", case.problem), policies["earliest"])
    single_s = min(seconds for name, seconds in found.items() if name != "widen" and "live" not in name)
    best = solve(program_of(case, single_s), limit_s)
    found |= {"optimum": min(best.makespan_s, single_s), "bound": best.bound_s}
    found["any"] = solve(program_of(case, single_s, with_spectrum=False), limit_s).bound_s
    if best.schedule is not None:
        found |= {f"{name}, its order": step_s(case, best.schedule, policies[name]) for name in ("earliest", "widen")}
    return found


HEADS = (
    *("setting", "bound for any light paths s", "optimum s", "proven"),
    *("cd-cba", "best fixed", "ten-line rule", "ours"),
    *("on the optimum's order: rule", "ours", "ten-line rule on 1f1b", "ours over the bound for any"),
    *("requests go on coming: rule", "ours"),
)
PROVEN = 1.002
"""An answer is proven if it takes at most 0.2 % more than the bound: the rounding to ticks is between them."""


def row(setting: Setting, draws: int, limit_s: float) -> list[str]:
    found = [draw_of(setting, draw, limit_s) for draw in range(draws)]

    def over(name: str, bound: str = "optimum") -> str:
        return percent([one[name] / one[bound] - 1 for one in found if name in one])

    fixed = min((f"fixed {name}" for name in FIXED), key=lambda name: sum(one[name] for one in found))
    means = [f"{mean_interval([one[name] for one in found]).mean:.4f}" for name in ("any", "optimum")]
    proven = sum(one["optimum"] <= PROVEN * one["bound"] for one in found)
    return [
        *(str(setting), *means, f"{proven} of {draws}"),
        *(over("cd-cba"), f"{over(fixed)} ({fixed.removeprefix('fixed ')})", over("earliest"), over("widen")),
        *(over("earliest, its order"), over("widen, its order"), over("1f1b"), over("widen", "any")),
        *(over("earliest, live"), over("widen, live")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="random placements, each with its background")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the solver for each")
    parser.add_argument("--rows", type=int, nargs=2, metavar=("FROM", "UNTIL"), help="of the table, from 0")
    args = parser.parse_args()
    show(HEADS, (row(setting, args.draws, args.limit) for setting in SETTINGS[slice(*(args.rows or (None,)))]))


if __name__ == "__main__":
    main()
