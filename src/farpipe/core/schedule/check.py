"""The rules that a schedule must keep, in the order in which they are checked.

1. There is one order per rank, and as many microbatches as in the Problem.
2. Every action belongs to a stage of its own rank and to a microbatch of the step.
3. Every stage does F once for every microbatch, and then either B once, or I once and W once.
4. On its rank F comes before I or B, and I before W; of the slices of one sequence (`Problem.follows`) an earlier one's
   F before a later one's, and its I or B after.
5. No rank waits for another in a circle.
6. No rank ever holds more than its memory.
"""

import math
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InfeasibleError, ScheduleError
from farpipe.core.step import (
    Action,
    Problem,
    Schedule,
    awaited,
    byte_tables,
    draw_grid,
    exceeds,
    least_activation_bytes,
    levels,
    peaks,
)
from farpipe.core.step.chains import NOBODY
from farpipe.core.units import format_bytes, format_percent

Floats = NDArray[np.float64]

COMPILED_FROM: Final = 10_000
"""Number of actions from which on numba is loaded to accept them; where it is there already, compiled code always does.

Loading takes as long as checking a third of a million actions in plain Python.
"""


def check(problem: Problem, schedule: Schedule, *, memory: bool = True) -> None:
    """Raise for the first rule that `schedule` breaks, with the order drawn and an arrow at the place.

    ScheduleError for rules 1 to 5, InfeasibleError for memory (rule 6, left out with ``memory=False``).
    """
    _check_shape(problem, schedule)
    compiled = schedule.num_actions >= COMPILED_FROM or "numba" in sys.modules
    if not (compiled and _all_sound(problem, schedule)):
        _check_orders(problem, schedule)
    if memory:
        _check_memory(problem, schedule)


def _check_orders(problem: Problem, schedule: Schedule) -> None:
    """Rules 2 to 5 in plain Python, which says what is wrong."""
    for rank in range(problem.num_ranks):
        _check_rank(problem, schedule, rank)
    _check_deadlock(problem, schedule)


def _all_sound(problem: Problem, schedule: Schedule) -> bool:
    """True if rules 2 to 5 are kept, quickly; `_check_orders` finds the words where they are not."""
    from farpipe.core.schedule import check_kernel  # here, for numba takes a third of a second to import

    if schedule.stride != problem.num_microbatches or schedule.codes.dtype != np.int32:
        return False
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    all_sound: Any = check_kernel.all_sound
    orders = schedule.codes, schedule.begin
    return bool(all_sound(*orders, rank_of_stage, problem.chains.previous, problem.chains.next))


def _fail(text: str, schedule: Schedule, mark: tuple[int, int]) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.method!r} is not valid: {text}\n{draw_grid(schedule.ranks, mark)}")


def _check_shape(problem: Problem, schedule: Schedule) -> None:
    if schedule.num_ranks != problem.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.method!r} is not for this problem: it has orders for ranks "
            f"0 to {schedule.num_ranks - 1}, the problem has 0 to {problem.num_ranks - 1}"
        )
    if schedule.num_microbatches != problem.num_microbatches:
        raise ScheduleError(
            f"schedule {schedule.method!r} is not for this problem: it is made for {schedule.num_microbatches} "
            f"microbatches, the problem has {problem.num_microbatches}"
        )


def _check_rank(problem: Problem, schedule: Schedule, rank: int) -> None:
    order = schedule.ranks[rank]
    mine, has_chains = set(problem.stages_of_rank[rank]), problem.chains.any
    place: dict[Action, int] = {}
    for position, action in enumerate(order):
        here = (rank, position)
        if action.stage not in mine:
            raise _fail(_tell_stage(problem, action, rank), schedule, here)
        if action.microbatch >= problem.num_microbatches:
            text = f"{action}: there is no such microbatch; they are 0 to {problem.num_microbatches - 1}"
            raise _fail(text, schedule, here)
        if action in place:
            text = f"{action} is done twice on rank {rank}, at positions {place[action]} and {position}: leave one out"
            raise _fail(text, schedule, here)
        place[action] = position
        _check_action(schedule, rank, action, place)
        if has_chains:
            _check_slices(problem, schedule, rank, action, place)
    _check_complete(problem, schedule, rank, place)


def _tell_stage(problem: Problem, action: Action, rank: int) -> str:
    if action.stage >= problem.num_stages:
        return f"{action}: there is no such stage; they are 0 to {problem.num_stages - 1}"
    return f"{action} is on rank {rank}, but its stage is on rank {problem.stages[action.stage].rank}"


def _check_action(schedule: Schedule, rank: int, action: Action, place: dict[Action, int]) -> None:
    """Rules 3 and 4 for one action, given everything that comes before it on its rank."""
    stage, kind, microbatch = action
    here = (rank, place[action])

    def has(other: str) -> bool:
        return (stage, other, microbatch) in place

    forward, input_grad = Action(stage, "F", microbatch), Action(stage, "I", microbatch)
    if kind == "B" and (has("I") or has("W")):
        raise _fail(f"{action}: the backward of {forward} is already done as I or W", schedule, here)
    if kind in "IW" and has("B"):
        raise _fail(f"{action}: the backward of {forward} is already done as B", schedule, here)
    if kind in "IB" and not has("F"):
        raise _fail(f"{action} comes before its forward {forward} on rank {rank}: move it behind that", schedule, here)
    if kind == "W" and not has("I"):
        raise _fail(
            f"{action} comes before its input gradient {input_grad} on rank {rank}: move it behind that", schedule, here
        )


def _check_slices(problem: Problem, schedule: Schedule, rank: int, action: Action, place: dict[Action, int]) -> None:
    """Rule 4 for slices of one sequence: what has to come before `action` on its stage has come."""
    stage, kind, microbatch = action
    here = (rank, place[action])
    before = int((problem.chains.previous if kind == "F" else problem.chains.next)[microbatch])
    if kind == "W" or before == NOBODY:
        return
    if kind == "F" and (stage, "F", before) not in place:
        raise _fail(f"{action} comes before {stage}F{before}, the previous slice of its sequence", schedule, here)
    if kind != "F" and not {(stage, "I", before), (stage, "B", before)} & place.keys():
        text = f"{action} comes before the backward of {stage}F{before}, the next slice of its sequence"
        raise _fail(text, schedule, here)


def _check_complete(problem: Problem, schedule: Schedule, rank: int, place: dict[Action, int]) -> None:
    end = (rank, max(len(schedule.ranks[rank]) - 1, 0))
    for stage in problem.stages_of_rank[rank]:
        for microbatch in range(problem.num_microbatches):
            if (stage, "F", microbatch) not in place:
                text = f"{Action(stage, 'F', microbatch)} is missing on rank {rank}: every microbatch needs its F"
                raise _fail(text, schedule, end)
            if (stage, "B", microbatch) in place:
                continue
            if (stage, "I", microbatch) not in place:
                backward = f"{stage}B{microbatch} (or {stage}I{microbatch} and {stage}W{microbatch})"
                text = f"{backward} is missing on rank {rank}: every forward needs its backward"
                raise _fail(text, schedule, (rank, place[Action(stage, "F", microbatch)]))
            if (stage, "W", microbatch) not in place:
                text = f"{Action(stage, 'W', microbatch)} is missing on rank {rank}: every I needs its W"
                raise _fail(text, schedule, (rank, place[Action(stage, "I", microbatch)]))


def _check_deadlock(problem: Problem, schedule: Schedule) -> None:
    """Play the orders without times until nothing moves; a rank that is not at its end is stuck."""
    done: set[tuple[int, str, int]] = set()
    position = [0] * problem.num_ranks
    waiting: dict[tuple[int, str, int], int] = {}
    ready = list(range(problem.num_ranks))
    orders = [tuple(order) for order in schedule.ranks]
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            need = awaited(action, problem.num_stages)
            if need is not None and need not in done:
                waiting[need] = rank
                break
            position[rank] += 1
            if action.kind == "W":
                continue
            made = (action.stage, "F" if action.kind == "F" else "backward", action.microbatch)
            done.add(made)
            if made in waiting:
                ready.append(waiting.pop(made))
    stuck = [rank for rank in range(problem.num_ranks) if position[rank] < len(schedule.ranks[rank])]
    if stuck:
        raise _fail(_describe_circle(problem, schedule, position, stuck), schedule, (stuck[0], position[stuck[0]]))


def _describe_circle(problem: Problem, schedule: Schedule, position: list[int], stuck: list[int]) -> str:
    """Follow who waits for whom from the first stuck rank until a rank comes up again."""
    path, lines = [], []
    rank = stuck[0]
    while rank not in path:
        path.append(rank)
        action = schedule.ranks[rank][position[rank]]
        need = awaited(action, problem.num_stages)
        assert need is not None
        other = problem.stages[need[0]].rank
        what = f"{need[0]}F{need[2]}" if need[1] == "F" else f"the backward {need[0]}B{need[2]}"
        lines.append(f"rank {rank} can't start {action}: it waits for {what} on rank {other}")
        rank = other
    return "deadlock\n  " + "\n  ".join(lines)


def memory_curve(problem: Problem, schedule: Schedule, rank: int) -> Floats:
    """Bytes in use on `rank` while each action of its order runs, static bytes included: [num_actions + 1].

    The last entry is what remains after the last action. Memory follows from the order alone (`step.byte_tables`).
    """
    taken, freed = (np.append(table[schedule.ranks[rank].codes], 0.0) for table in byte_tables(problem))
    return problem.ranks[rank].static_bytes + levels(taken, freed)


def peak_memory_bytes(problem: Problem, schedule: Schedule) -> list[float]:
    """The most bytes that each rank ever holds, static bytes included."""
    taken, freed = (table[schedule.codes] for table in byte_tables(problem))
    static = np.array([rank.static_bytes for rank in problem.ranks])
    return list((static + peaks(taken, freed, schedule.begin)).tolist())


def expect_enough_memory(problem: Problem) -> None:
    """InfeasibleError for the rank that is shortest of memory if one sequence alone does not fit somewhere.

    Its stages all hold its microbatches when the last of them does its forwards, whatever the order; where they fit,
    doing one sequence after the other is a schedule.
    """
    worst: tuple[float, int, float] | None = None
    for rank, (spec, needed) in enumerate(zip(problem.ranks, least_activation_bytes(problem).tolist(), strict=True)):
        if exceeds(spec.static_bytes + needed, spec.memory_bytes):
            missing = spec.static_bytes + needed - (spec.memory_bytes or 0.0)
            worst = max(worst or (0.0, 0, 0.0), (missing, rank, needed))
    if worst is not None:
        raise InfeasibleError(_describe_shortage(problem, *worst))


def _describe_shortage(problem: Problem, missing: float, rank: int, needed: float) -> str:
    spec, limit = problem.ranks[rank], problem.ranks[rank].memory_bytes or 0.0
    has = limit - spec.static_bytes
    unit = "sequence, all its slices together" if problem.chains.any else "microbatch"
    text = (
        f"no schedule fits memory: rank {rank} has {format_bytes(limit)}, {format_bytes(missing)} less than the "
        f"{format_bytes(spec.static_bytes)} that are always there and the {format_bytes(needed)} of activations of one "
        f"{unit}; "
    )
    if problem.chains.any:
        return text + "recompute more, or divide the sequence over more devices"
    if has <= 0:
        return (
            text
            + "even the smallest microbatch is too large: give the rank fewer layers, or shard what is always there"
        )
    parts = math.ceil(needed / has * (1 - 1e-9))
    return text + (
        f"it would take {parts * problem.num_microbatches} microbatches instead of {problem.num_microbatches}, "
        f"each 1/{parts} as large, or recomputation that keeps {format_percent(has / needed, 0)} of the activations"
    )


def _check_memory(problem: Problem, schedule: Schedule) -> None:
    if all(spec.memory_bytes is None for spec in problem.ranks):
        return
    highest = peak_memory_bytes(problem, schedule)
    for rank, (spec, peak) in enumerate(zip(problem.ranks, highest, strict=True)):
        if exceeds(peak, spec.memory_bytes):
            curve = memory_curve(problem, schedule, rank)
            place = next(i for i, used in enumerate(curve.tolist()) if exceeds(used, spec.memory_bytes))
            used, limit = float(curve[place]), float(spec.memory_bytes or 0)
            raise InfeasibleError(
                f"schedule {schedule.method!r} needs too much memory: rank {rank} needs {format_bytes(used)} of "
                f"{format_bytes(limit)} at {schedule.ranks[rank][place]}, {format_bytes(used - limit)} too much\n"
                f"{draw_grid(schedule.ranks, (rank, place))}\n"
                "It would fit with fewer microbatches at once (another schedule), recomputation or fewer layers there."
            )
