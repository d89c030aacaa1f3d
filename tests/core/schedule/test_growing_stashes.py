"""Stages whose weight-gradient stash is larger than their activations, as where activations are recomputed: an I needs
more memory at its end than it found."""

import pytest

from farpipe.core.schedule import check
from farpipe.core.schedule.check import peak_memory_bytes
from farpipe.core.schedule.library import order
from farpipe.core.step import Hop, Problem, Rank, Stage
from farpipe.planning.search.greedy import greedy_orders
from farpipe.planning.search.step import search_step, to_schedule


def problem(memory_bytes, num_ranks=4):
    stage = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, "activation_bytes": 1, "weight_stash_bytes": 3}
    return Problem(
        num_microbatches=8,
        ranks=(Rank(memory_bytes=memory_bytes),) * num_ranks,
        stages=tuple(Stage(rank=rank, **stage) for rank in range(num_ranks)),
        links={},
        hops=(Hop(forward=None, backward=None),) * (num_ranks - 1),
    )


@pytest.mark.parametrize("memory_bytes", [3.0, 4.0, 6.0, 12.0])
@pytest.mark.parametrize("method", ["zb-1p", "zb-2p"])
def test_list_scheduling_keeps_room_for_the_end_of_an_input_gradient(method, memory_bytes):
    found = order(method, problem(memory_bytes))
    check(problem(memory_bytes), found)
    assert max(peak_memory_bytes(problem(memory_bytes), found)) <= memory_bytes


@pytest.mark.parametrize("memory_bytes", [3.0, 4.0, 6.0, 12.0])
def test_the_greedy_keeps_room_for_the_end_of_an_input_gradient(memory_bytes):
    step = search_step(problem(memory_bytes))
    found = greedy_orders(step)
    assert found
    for _, codes in found:
        check(step.problem, to_schedule(codes, 8, "greedy"))
