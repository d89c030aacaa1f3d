"""Schedules as the CSV files of torch.distributed.pipelining: one row per rank, one cell per action, no communication.

torch's ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` reads such a file and adds sends and
receives itself. Its own parser takes what only begins like an action (``0F0x``), and its runtime runs some orders with
wrong gradients and no word; here neither is let through, in neither direction.
"""

import csv
from collections.abc import Iterable
from typing import Final

from farpipe.core.errors import FarpipeError, InputError, ScheduleError
from farpipe.core.schedule.check import check
from farpipe.core.step import MAX_MICROBATCHES, Action, Problem, Rank, RankOrder, Schedule, Stage, draw_grid

COMMUNICATION: Final = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAP: Final = "OVERLAP_F_B"


def to_torch_csv(schedule: Schedule) -> str:
    """The text of the file that torch loads as ``compute_only``.

    ScheduleError for an order that is broken, or that torch's runtime would not run or would run wrongly.
    """
    stages = _stage_ranks(schedule.ranks, f"schedule {schedule.method!r}")
    _check(schedule, stages)
    _check_equal_shares(schedule, stages)
    _check_last_stage(schedule, len(stages) - 1)
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.ranks)


def from_torch_csv(text: str, source: str = "schedule.csv", method: str = "torch-csv") -> Schedule:
    """The schedule in such a file; empty cells, which torch writes for idle slots, are passed over.

    InputError names row and column of what is no action, or the rule that the whole breaks.
    """
    try:
        rows = [*csv.reader(text.splitlines(), strict=True)]
    except csv.Error as error:
        raise InputError(f"{source}: not CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise InputError(f"{source}: has no actions; expected one row per rank such as 0F0,0F1,0B0,0B1")
    ranks = tuple(_parse_row(row, f"{source}: row {number}") for number, row in enumerate(rows, 1))
    stages = _stage_ranks(ranks, source)
    num_microbatches = 1 + max(action.microbatch for order in ranks for action in order)
    if num_microbatches > MAX_MICROBATCHES:
        raise InputError(f"{source}: {num_microbatches} microbatches are more than {MAX_MICROBATCHES}")
    schedule = Schedule(num_microbatches, ranks, method)
    try:
        _check(schedule, stages)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None
    return schedule


def _parse_row(cells: Iterable[str], place: str) -> RankOrder:
    actions = [_parse_cell(cell.strip(), f"{place}, column {number}") for number, cell in enumerate(cells, 1)]
    order = tuple(action for action in actions if action is not None)
    if not order:
        raise InputError(f"{place}: this rank has nothing to do")
    return order


def _parse_cell(cell: str, place: str) -> Action | None:
    if not cell:
        return None
    try:
        return Action.parse(cell)
    except FarpipeError as error:
        raise InputError(f"{place}: {error}{_hint(cell)}") from None


def _hint(cell: str) -> str:
    if OVERLAP in cell:
        return f"; {OVERLAP} runs two actions at once, which farpipe's schedules don't know"
    if any(word in cell for word in COMMUNICATION):
        return '; communication follows from the order: write the file with format="compute_only"'
    return ""


def _stage_ranks(ranks: Iterable[RankOrder], source: str) -> list[int]:
    """Rank of every stage; ScheduleError where stages are left out or on two ranks."""
    found: dict[int, int] = {}
    for rank, order in enumerate(ranks):
        for action in order:
            if found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{source}: {action}: stage {action.stage} is on rank {found[action.stage]}, not on rank {rank}"
                )
    missing = next((stage for stage in range(len(found)) if stage not in found), None)
    if missing is not None:
        raise ScheduleError(f"{source}: stage {missing} is missing, but there is a stage {max(found)}")
    return [found[stage] for stage in range(len(found))]


def _check(schedule: Schedule, stages: list[int]) -> None:
    """The rules that need no durations; for a schedule alone says which rank has which stage."""
    timeless = {"forward_s": 0.0, "input_grad_s": 0.0, "weight_grad_s": 0.0}
    problem = Problem(
        num_microbatches=schedule.num_microbatches,
        ranks=(Rank(),) * len(schedule.ranks),
        stages=tuple(Stage(rank=rank, **timeless) for rank in stages),
        hops=(None,) * (len(stages) - 1),
    )
    check(problem, schedule, memory=False)


def _check_equal_shares(schedule: Schedule, stages: list[int]) -> None:
    """torch refuses a number of stages that the number of ranks does not divide, and a rank without actions."""
    counts = [stages.count(rank) for rank in range(len(schedule.ranks))]
    if len(set(counts)) > 1:
        few, many = counts.index(min(counts)), counts.index(max(counts))
        raise ScheduleError(
            f"torch needs as many stages on every rank, but rank {few} has {counts[few]} and rank {many} {counts[many]}"
        )


def _check_last_stage(schedule: Schedule, last: int) -> None:
    """torch keeps the losses in the order in which they are made and takes them by microbatch."""
    for rank, order in enumerate(schedule.ranks):
        forwards = [position for position, action in enumerate(order) if action[:2] == (last, "F")]
        for microbatch, position in enumerate(forwards):
            if order[position].microbatch != microbatch:
                raise ScheduleError(
                    f"torch would compute wrong gradients: the last stage's forwards must be in order, but "
                    f"{order[position]} comes at the place of {last}F{microbatch}\n"
                    f"{draw_grid(schedule.ranks, (rank, position))}"
                )
