import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule.library import list_scheduling
from farpipe.core.schedule.library.list_scheduling import list_schedule, memory_headroom
from farpipe.core.schedule.library.memory_limited import RULES
from farpipe.core.schedule.library.wave import RULES as WAVE_RULES
from farpipe.core.step import Problem, Rank, Stage


@st.composite
def steps(draw):
    """Stages that differ, one or two of them (in a V) per rank, some with little memory."""
    num_ranks, in_v = draw(st.integers(1, 4)), draw(st.booleans())
    ranks = [*range(num_ranks), *(reversed(range(num_ranks)) if in_v else ())]
    tenths = st.integers(1, 12).map(lambda n: n / 10)
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    stages = [
        Stage(rank=r, activation_bytes=2.0, weight_stash_bytes=1.0, **{n: draw(tenths) for n in names}) for r in ranks
    ]
    memory = draw(st.none() | st.integers(4, 30).map(float))
    count = draw(st.integers(1, 10))
    kinds = (Rank(memory_bytes=memory),) * num_ranks
    return Problem(
        num_microbatches=count, ranks=kinds, stages=tuple(stages), links={}, hops=(None,) * (len(stages) - 1)
    )


def keys(problem):
    key = np.zeros((2, problem.num_stages, problem.num_microbatches))
    key[0] = 1.0
    return key


@settings(max_examples=40, deadline=None)
@given(steps(), st.data())
def test_the_schedule_is_the_best_of_what_the_rules_give(problem, data):
    rules = data.draw(st.sampled_from([RULES, WAVE_RULES]))
    headroom, reserve = memory_headroom(problem), np.ones(problem.num_stages)
    arguments = list_scheduling._arguments(problem, headroom, reserve, leaves_growth=False)
    results = [list_scheduling._play(problem, arguments, keys(problem), one, np.inf) for one in rules]
    whole = [result for result in results if result[1].size == 3 * problem.num_stages * problem.num_microbatches]
    if not whole:
        return
    best = min(whole, key=lambda result: result[0])  # of equals the first
    found = list_schedule(problem, keys(problem), headroom, rules, "", reserve)
    assert found.ranks == list_scheduling._decode(problem, best[1], "").ranks
