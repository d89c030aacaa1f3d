"""Schedules with their communication, as torch.distributed.pipelining loads them with ``format="compute_comms"``.

torch's own lowering of a schedule without communication puts a receive where the sender's turn comes in a count of
actions, so that in the warm-up a receive whose data are far off stands before sends that are ready; where a rank's
communication is one queue, as in NCCL, these wait for it (pytorch #172668, #188833). Here each send follows its
producer, and its receive stands where the simulator sees the message begin. On every rank messages are then in the
order of one clock, so that no two ranks wait for each other, even where a send waits for its receive.
"""

from collections.abc import Iterator

from farpipe.core.errors import InputError
from farpipe.core.schedule.torch_csv import to_torch_csv
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.simulate.timeline import MESSAGE_KINDS
from farpipe.core.step import Action, Problem, RankOrder, Schedule

_Key = tuple[float, int, int, int, int]
"""Place in a row: time, then actions before messages, then the message's kind, stage and microbatch."""


def to_torch_comms_csv(problem: Problem, schedule: Schedule) -> str:
    """The text of the file; ScheduleError for what torch would not run, see `to_torch_csv`.

    Gradients of the replicas are gathered and reduced where torch's own lowering does it. InputError where a message is
    needed no later than it begins, as with actions and links that take no time.
    """
    to_torch_csv(schedule)  # the checks
    timeline = simulate(problem, schedule)
    rows = _rows(timeline, schedule)
    return "".join(",".join(_with_shards(row, order)) + "\n" for row, order in zip(rows, schedule.ranks, strict=True))


def _rows(timeline: Timeline, schedule: Schedule) -> list[list[str]]:
    """Actions and messages of every rank, in the order of their times."""
    cells: list[dict[str, _Key]] = [{} for _ in schedule.ranks]
    for action in timeline.actions:
        cells[int(action["rank"])][timeline.label(action)] = (float(action["end_s"]), 0, 0, 0, 0)
    for message in timeline.messages:
        source, target, kind = int(message["source"]), int(message["target"]), MESSAGE_KINDS[message["kind"]]
        if source == target or kind not in ("forward", "backward"):
            continue
        stage, number = int(message["stage"]), int(message["microbatch"])
        letter, other = ("F", stage + 1) if kind == "forward" else ("B", stage - 1)
        key = (float(message["ready_s"]), 1, int(message["kind"]), stage, number)
        cells[source][f"{stage}SEND_{letter}{number}"] = key
        cells[target][f"{other}RECV_{letter}{number}"] = key
        users = (f"{other}F{number}",) if letter == "F" else (f"{other}B{number}", f"{other}I{number}")
        if key >= min(cells[target][user] for user in users if user in cells[target]):
            raise InputError(f"{users[0]} takes no time, so its message can't be placed; give stages their seconds")
    return [sorted(row, key=row.__getitem__) for row in cells]


def _with_shards(row: list[str], order: RankOrder) -> Iterator[str]:
    """The row with FSDP's parameters gathered at its begin, and each stage's gradients reduced after its backwards."""
    yield from (f"{stage}UNSHARD" for stage in dict.fromkeys(action.stage for action in order))
    last: dict[int, Action] = {action.stage: action for action in order}
    for cell in row:
        yield cell
        yield from (part for stage, action in last.items() if cell == str(action) for part in _ends(stage))


def _ends(stage: int) -> tuple[str, str]:
    return f"{stage}REDUCE_GRAD", f"{stage}RESHARD"
