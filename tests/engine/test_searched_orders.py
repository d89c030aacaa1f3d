"""Orders that a search finds can be run: each keeps all rules, and the engine computes exact gradients with it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.test_executor import assert_equals_whole
from farpipe.core.schedule import check
from farpipe.core.simulate import simulate
from farpipe.core.step import Rank
from farpipe.core.step.memory import least_activation_bytes
from farpipe.planning.search import SEARCHES, search
from small_models import LLAMA, TIED
from strategies import problems

LIMIT_S = 0.1


@st.composite
def limited_problems(draw):
    """Small Problems of any kind whose ranks have memory for one chain of microbatches, for a few, or for all."""
    problem = draw(problems(max_ranks=3, max_stages=4, max_microbatches=4))
    room = {None: None, 1: 1.0, 2: 2.0}
    per_chain = least_activation_bytes(problem).tolist()
    limits = [room[draw(st.sampled_from([None, 1, 2]))] for _ in problem.ranks]
    ranks = tuple(
        Rank(memory_bytes=None if limit is None else limit * size)
        for limit, size in zip(limits, per_chain, strict=True)
    )
    return problem.model_copy(update={"ranks": ranks})


def found_by(method, problem):
    """Order that the search of that name finds in a short time."""
    return search(problem, LIMIT_S, 0, SEARCHES[method], always_exact=method == "exact")


@pytest.mark.slow
@pytest.mark.parametrize("method", SEARCHES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_searched_order_keeps_the_rules_and_gives_exact_gradients(method, data):
    problem = data.draw(limited_problems())
    found = found_by(method, problem)
    check(problem, found.schedule)
    assert simulate(problem, found.schedule).makespan_s == found.timeline.makespan_s >= found.lower_bound_s
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    assert_equals_whole(data.draw(st.sampled_from([LLAMA, TIED])), found.schedule, dtype)
