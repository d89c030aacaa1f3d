"""Simulate a schedule: `simulate(problem, schedule) -> Timeline`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import ScheduleError
from farpipe.schedule import check
from farpipe.simulate.timeline import ACTION_DTYPE, MESSAGE_DTYPE, MESSAGE_KINDS, Timeline
from farpipe.step import BACKWARD, FORWARD, KINDS, NOTHING, Messages, Problem, Schedule
from farpipe.step.lowering import Floats, Ints, StepArrays, lower


def simulate(problem: Problem, schedule: Schedule, *, checked: bool = False) -> Timeline:
    """The predicted Timeline of `schedule`; deterministic, linear in the number of actions.

    Meaning: a message is sent when its producer ends; a directed link carries one message at a time in the order in
    which they became ready, each for its `occupies_s`, and delivers it `arrives_after_s` (`farpipe.step.Messages`).
    Memory is not looked at here (see `farpipe.schedule.check`). ScheduleError when the orders break a rule of `check`;
    `checked` says that they have passed it already, which takes longer than simulating.
    """
    if not checked:
        check(problem, schedule, memory=False)
    arrays = lower(problem)
    codes, begin = schedule.codes, schedule.begin
    start_s, message_start_s, _, others_start_s = play(arrays, codes, begin)
    actions = _action_rows(arrays, codes, begin, start_s)
    messages = np.concatenate(
        [_message_rows(arrays, actions, message_start_s), _collective_rows(problem, arrays, actions, others_start_s)]
    )
    of_links = (problem.traffic.copies, tuple(problem.between_sites.values()))
    return Timeline("predicted", problem.num_ranks, tuple(problem.links), actions, messages, *of_links)


def play(arrays: StepArrays, codes: Ints, begin: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """Run the compiled player: starts of actions [A], of messages and their arrivals [2, S, M], of collectives [C].

    ScheduleError when not every action could be played.
    """
    from farpipe.step import player  # here, for numba takes a third of a second to import

    out = _outputs(arrays, codes.size)
    flat_out = (out[0], out[1].reshape(-1), out[2].reshape(-1), out[3])
    play_compiled: Any = player.play
    played = play_compiled(codes, begin, arrays.tables, arrays.shared.size, flat_out)
    if played < codes.size:
        raise ScheduleError(f"the orders deadlock: only {played} of {codes.size} actions can be played")
    return out


def _outputs(arrays: StepArrays, num_actions: int) -> tuple[Floats, Floats, Floats, Floats]:
    shape = arrays.messages.link.shape
    return np.empty(num_actions), np.zeros(shape), np.empty(shape), np.zeros(arrays.collectives.link.shape)


def _action_rows(arrays: StepArrays, codes: Ints, begin: Ints, start_s: Floats) -> NDArray[np.void]:
    num_microbatches = arrays.duration_s.shape[2]
    rows = np.empty(codes.size, ACTION_DTYPE)
    rows["rank"] = np.repeat(np.arange(arrays.num_ranks), np.diff(begin))
    rows["kind"] = codes & 3
    rows["stage"], rows["microbatch"] = np.divmod(codes >> 2, num_microbatches)
    rows["start_s"] = start_s
    rows["end_s"] = start_s + arrays.duration_s[rows["kind"], rows["stage"], rows["microbatch"]]
    return rows


def _message_rows(arrays: StepArrays, actions: NDArray[np.void], start_s: Floats) -> NDArray[np.void]:
    ready_s = np.zeros(arrays.messages.link.shape)
    for direction, kinds in ((FORWARD, ("F",)), (BACKWARD, ("I", "B"))):
        made = actions[np.isin(actions["kind"], [KINDS.index(kind) for kind in kinds])]
        ready_s[direction, made["stage"], made["microbatch"]] = made["end_s"]
    kind, stage, microbatch = np.nonzero(arrays.messages.link != NOTHING)
    target = stage + np.where(kind == FORWARD, 1, -1)
    between = arrays.rank_of_stage[stage] != arrays.rank_of_stage[np.clip(target, 0, arrays.rank_of_stage.size - 1)]
    chosen = (kind[between], stage[between], microbatch[between])
    rows = _rows(arrays.messages, chosen, start_s)
    rows["kind"], rows["stage"], rows["microbatch"] = chosen
    rows["ready_s"] = ready_s[chosen]
    rows["source"], rows["target"] = arrays.rank_of_stage[chosen[1]], arrays.rank_of_stage[target[between]]
    return rows


def _collective_rows(
    problem: Problem, arrays: StepArrays, actions: NDArray[np.void], start_s: Floats
) -> NDArray[np.void]:
    rows, found = _rows(arrays.collectives, (np.arange(start_s.size),), start_s), problem.collectives
    rows["kind"], rows["microbatch"] = [MESSAGE_KINDS.index(one.kind) for one in found], -1
    rows["stage"], target = arrays.collectives.stage, np.array([one.target for one in found], np.intp)
    rows["source"], rows["target"] = arrays.rank_of_stage[rows["stage"]], arrays.rank_of_stage[target]
    done_s = np.zeros(arrays.rank_of_stage.size)
    np.maximum.at(done_s, actions["stage"], actions["end_s"])
    rows["ready_s"] = [0.0 if one.after is None else done_s[one.after] for one in found]
    return rows


def _rows(messages: Messages, chosen: tuple[NDArray[np.intp], ...], start_s: Floats) -> NDArray[np.void]:
    rows = np.zeros(chosen[0].size, MESSAGE_DTYPE)
    rows["link"], rows["bytes"], rows["start_s"] = messages.link[chosen], messages.bytes[chosen], start_s[chosen]
    rows["end_s"] = rows["start_s"] + messages.leaves_after_s[chosen]
    rows["arrival_s"] = rows["start_s"] + messages.arrives_after_s[chosen]
    return rows
