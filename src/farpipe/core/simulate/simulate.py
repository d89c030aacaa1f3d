"""Simulate a schedule: `simulate(problem, schedule) -> Timeline`; in samples of its times only the makespans."""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from farpipe.core.arguments import expect_kind
from farpipe.core.errors import ScheduleError
from farpipe.core.schedule import check
from farpipe.core.simulate.timeline import ACTION_DTYPE, MESSAGE_DTYPE, MESSAGE_KINDS, Timeline
from farpipe.core.step import BACKWARD, FORWARD, KINDS, NOTHING, Action, Hop, Problem, Rank, Schedule, Stage, Transfer
from farpipe.core.step.arrays import Floats, Ints, Played, StepArrays, step_arrays
from farpipe.core.step.codes import B, F, I, cell_of, kind_of
from farpipe.core.step.player import Player
from farpipe.core.step.problem import STAGE_FIGURES

PartT = TypeVar("PartT", Stage, Transfer)


def simulate(problem: Problem, schedule: Schedule, *, checked: bool = False) -> Timeline:
    """The predicted Timeline of `schedule`; deterministic, linear in the number of actions.

    A message is sent when its producer ends; a directed link carries one message at a time in the order in which they
    became ready, each for its `occupies_s`, and delivers it `arrives_after_s` (`farpipe.core.step.Messages`). Memory is
    not checked here (see `farpipe.core.schedule.check`). ScheduleError when the orders break a rule of `check`;
    `checked` says that they have passed it already, which takes longer than simulating.
    """
    expect_kind("simulate: problem", problem, Problem, "a Problem; that of a plan is plan.problem")
    expect_kind("simulate: schedule", schedule, Schedule, "a Schedule, such as farpipe.order(problem, NAME).schedule")
    if not checked:
        check(problem, schedule, memory=False)
    arrays = step_arrays(problem)
    start_s, message_start_s, _, others_start_s = play(arrays, schedule.codes, schedule.begin)
    after_s = (0.0, arrays.messages.leaves_after_s, arrays.messages.arrives_after_s)
    message_s = np.stack([message_start_s + seconds for seconds in after_s])
    return timeline_of(problem, arrays, schedule, start_s, message_s, others_start_s)


def steps_in_a_row(problem: Problem, step: Timeline, num_steps: int) -> Timeline:
    """Steps in the order of `step`, one after the other without a barrier: a rank goes on when its own part is done.

    Microbatches go on counting. Collectives and the optimizer are left out.
    """
    size, rows = problem.num_microbatches, step.actions

    def again(part: PartT, names: Iterable[str]) -> PartT:
        figures = ((name, getattr(part, name)) for name in names)
        return part.model_copy(update={name: num_steps * one for name, one in figures if isinstance(one, tuple)})

    def hop_again(hop: Hop | None) -> Hop | None:
        if hop is None:
            return None
        ways = {"forward": hop.forward, "backward": hop.backward}
        return Hop(**{way: again(sent, Transfer.model_fields) for way, sent in ways.items() if sent is not None})

    stages = tuple(again(stage, STAGE_FIGURES) for stage in problem.stages)
    many = Problem(
        num_microbatches=num_steps * size,
        ranks=tuple(Rank() for _ in problem.ranks),
        stages=stages,
        links=problem.links,
        hops=tuple(map(hop_again, problem.hops)),
    )
    of_ranks = [rows[rows["rank"] == rank] for rank in range(problem.num_ranks)]
    orders = [
        [
            Action(int(row["stage"]), KINDS[row["kind"]], int(row["microbatch"]) + number * size)
            for number in range(num_steps)
            for row in of_rank
        ]
        for of_rank in of_ranks
    ]
    return simulate(many, Schedule(many.num_microbatches, orders), checked=True)


def timeline_of(
    problem: Problem,
    arrays: StepArrays,
    schedule: Schedule,
    start_s: Floats,
    message_s: Floats,
    collective_start_s: Floats | None = None,
) -> Timeline:
    """Predicted Timeline of actions that start at `start_s`, in the order of the schedule's codes.

    `message_s` [3, 2, S, M] are the start, end and arrival of every message, infinite where none is sent; `arrays` are
    those of the problem.
    """
    actions = _action_rows(arrays, schedule.codes, schedule.begin, start_s)
    messages = _message_rows(arrays, actions, message_s)
    if collective_start_s is not None:
        others = _collective_rows(problem, arrays, actions, collective_start_s)
        messages = np.concatenate([messages, others])
    of_links = (problem.traffic.copies, tuple(problem.between_sites.values()))
    return Timeline("predicted", problem.num_ranks, tuple(problem.links), actions, messages, *of_links)


def play(arrays: StepArrays, codes: Ints, begin: Ints) -> Played:
    """Run the compiled player: starts of actions [A], of messages and their arrivals [2, S, M], of collectives [C].

    ScheduleError when not every action could be played.
    """
    from farpipe.core.step import player_kernel  # here, for numba takes a third of a second to import

    out, play_compiled = arrays.new_out(codes.size), player_kernel.play
    played = play_compiled(codes, begin, tuple(arrays.tables), out)
    if played < codes.size:
        raise ScheduleError(f"the orders deadlock: only {played} of {codes.size} actions can be played")
    shape = arrays.messages.link.shape
    return out[0], out[1].reshape(shape), out[2].reshape(shape), out[3]


def _action_rows(arrays: StepArrays, codes: Ints, begin: Ints, start_s: Floats) -> NDArray[np.void]:
    num_microbatches = arrays.duration_s.shape[2]
    rows = np.empty(codes.size, ACTION_DTYPE)
    rows["rank"] = np.repeat(np.arange(arrays.num_ranks), np.diff(begin))
    rows["kind"] = kind_of(codes)
    rows["stage"], rows["microbatch"] = cell_of(codes, num_microbatches)
    rows["start_s"] = start_s
    rows["end_s"] = start_s + arrays.duration_s[rows["kind"], rows["stage"], rows["microbatch"]]
    return rows


def _message_rows(arrays: StepArrays, actions: NDArray[np.void], message_s: Floats) -> NDArray[np.void]:
    ready_s = np.zeros(arrays.messages.link.shape)
    for direction, kinds in ((FORWARD, (F,)), (BACKWARD, (I, B))):
        made = actions[np.isin(actions["kind"], kinds)]
        ready_s[direction, made["stage"], made["microbatch"]] = made["end_s"]
    kind, stage, microbatch = np.nonzero((arrays.messages.link != NOTHING) & np.isfinite(message_s[0]))
    target = stage + np.where(kind == FORWARD, 1, -1)
    between = arrays.rank_of_stage[stage] != arrays.rank_of_stage[np.clip(target, 0, arrays.rank_of_stage.size - 1)]
    chosen = (kind[between], stage[between], microbatch[between])
    rows = np.zeros(chosen[0].size, MESSAGE_DTYPE)
    rows["link"], rows["bytes"] = arrays.messages.link[chosen], arrays.messages.bytes[chosen]
    for place, name in enumerate(("start_s", "end_s", "arrival_s")):
        rows[name] = message_s[place][chosen]
    rows["kind"], rows["stage"], rows["microbatch"] = chosen
    rows["ready_s"] = ready_s[chosen]
    rows["source"], rows["target"] = arrays.rank_of_stage[chosen[1]], arrays.rank_of_stage[target[between]]
    return rows


def _collective_rows(
    problem: Problem, arrays: StepArrays, actions: NDArray[np.void], start_s: Floats
) -> NDArray[np.void]:
    sent, found = arrays.collectives, problem.collectives
    rows = np.zeros(start_s.size, MESSAGE_DTYPE)
    rows["link"], rows["bytes"], rows["start_s"] = sent.link, sent.bytes, start_s
    rows["end_s"], rows["arrival_s"] = start_s + sent.leaves_after_s, start_s + sent.arrives_after_s
    rows["kind"], rows["microbatch"] = [MESSAGE_KINDS.index(one.kind) for one in found], -1
    rows["stage"], target = arrays.collectives.stage, np.array([one.target for one in found], np.intp)
    rows["source"], rows["target"] = arrays.rank_of_stage[rows["stage"]], arrays.rank_of_stage[target]
    done_s = np.zeros(arrays.rank_of_stage.size)
    np.maximum.at(done_s, actions["stage"], actions["end_s"])
    rows["ready_s"] = [0.0 if one.after is None else done_s[one.after] for one in found]
    return rows


def makespans_s(samples: Iterable[StepArrays], schedule: Schedule) -> Floats:
    """The makespan of `schedule` in every sample of one step: [num_samples]; ScheduleError when the orders deadlock."""
    found = np.array([Player(arrays).makespan_s((schedule.codes, schedule.begin)) for arrays in samples])
    if not np.isfinite(found).all():
        raise ScheduleError("the orders deadlock: not every action can be played")
    return found
