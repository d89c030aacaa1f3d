"""Placed communication: rows that torch's runtime can run, with queues that never wait for each other."""

import re
from collections import deque

import pytest

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.step import Schedule
from farpipe.interop.torch_comms import to_torch_comms_csv
from pipelines import pipeline, two_sites

CASES = {
    "1f1b": two_sites(4, 8, latency=4, size=1),
    "zb-2p": two_sites(4, 8, latency=4, size=1),
    "zbv": two_sites(4, 8, latency=4, v_shape=True),
    "interleaved": pipeline(4, 8, stages_per_rank=2, cuts=range(7), latency=3),
}


def rows_of(method):
    problem = CASES[method]
    schedule = order(method, problem)
    rows = [row.split(",") for row in to_torch_comms_csv(problem, schedule).splitlines()]
    return problem, schedule, rows


def parts(cell):
    stage, word, number = re.fullmatch(r"(\d+)([A-Z_]+?)(\d*)", cell).groups()
    return int(stage), word, number and int(number)


@pytest.mark.parametrize("method", CASES)
def test_actions_keep_their_order_and_messages_stand_between_producer_and_user(method):
    _, schedule, rows = rows_of(method)
    for row, actions in zip(rows, schedule.ranks, strict=True):
        assert [cell for cell in row if re.fullmatch(r"\d+[FIWB]\d+", cell)] == [*map(str, actions)]
        place = {cell: index for index, cell in enumerate(row)}
        for cell, index in place.items():
            stage, word, number = parts(cell)
            ends = [place.get(f"{stage}{letter}{number}") for letter in ("F" if word.endswith("_F") else "IB")]
            (end,) = [at for at in ends if at is not None] or [None]
            if word.startswith("SEND"):
                assert end < index
            elif word.startswith("RECV"):
                assert index < end


@pytest.mark.parametrize("method", CASES)
def test_a_send_that_waits_for_its_receive_never_waits_for_ever(method):
    """Every rank's row one after the other, a send and its receive at the same time: all rows come to their end."""
    _, _, rows = rows_of(method)
    queues = [deque(row) for row in rows]
    while any(queues):
        heads = {queue[0]: queue for queue in queues if queue}
        done = [cell for cell in heads if partner(cell) is None or partner(cell) in heads]
        assert done, f"each waits for another: {list(heads)}"
        for cell in done:
            heads[cell].popleft()


def partner(cell):
    """The other end of a message; None of what is no message."""
    stage, word, number = parts(cell)
    if "_" not in word or word == "REDUCE_GRAD":
        return None
    step = 1 if word in ("SEND_F", "RECV_B") else -1
    other = word.replace("SEND", "RECV") if word.startswith("SEND") else word.replace("RECV", "SEND")
    return f"{stage + step}{other}{number}"


@pytest.mark.parametrize("method", CASES)
def test_every_stage_is_gathered_first_and_reduced_after_its_last_backward(method):
    problem, _, rows = rows_of(method)
    for rank, row in enumerate(rows):
        stages = [stage for stage, owner in enumerate(problem.stages) if owner.rank == rank]
        assert sorted(row[: len(stages)]) == sorted(f"{stage}UNSHARD" for stage in stages)
        for stage in stages:
            at = row.index(f"{stage}REDUCE_GRAD")
            assert not [cell for cell in row[at:] if re.fullmatch(rf"{stage}[FIWB]\d+", cell)]


def test_what_takes_no_time_is_refused():
    problem = pipeline(2, 2, seconds=(0, 0, 0))
    with pytest.raises(InputError, match="takes no time"):
        to_torch_comms_csv(problem, order("1f1b", problem))


def test_a_broken_order_is_refused():
    problem = CASES["1f1b"]
    whole = order("1f1b", problem)
    broken = Schedule(whole.num_microbatches, (whole.ranks[1], whole.ranks[0], *whole.ranks[2:]), "1f1b")
    with pytest.raises(Exception, match="rank"):
        to_torch_comms_csv(problem, broken)
