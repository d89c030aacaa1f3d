import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.schedule.library import list_scheduling
from farpipe.schedule.library.list_scheduling import Rules, list_schedule, memory_headroom
from farpipe.schedule.library.memory_limited import RULES
from farpipe.schedule.library.wave import RULES as WAVE_RULES
from farpipe.step import Problem, Rank, Stage


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


def played(problem, rules, among, limit_s=np.inf):
    """Seconds and actions of one of the rules `among`, and the rules that are held to be alike."""
    arguments = list_scheduling._arguments(problem, memory_headroom(problem), np.ones(problem.num_stages))
    other = list_scheduling._other(rules, among)
    (seconds, codes), mattered = list_scheduling._play(problem, arguments, keys(problem), (rules, other), limit_s)
    return seconds, codes.tolist(), set(list_scheduling._alike(rules, other, mattered))


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_rules_that_are_held_to_be_alike_give_the_same_actions(problem, data):
    among = data.draw(st.sampled_from([RULES, WAVE_RULES]))
    rules = data.draw(st.sampled_from(among))
    seconds, codes, alike = played(problem, rules, among)
    for other in alike:
        assert played(problem, other, among)[:2] == (seconds, codes), other


@settings(max_examples=40, deadline=None)
@given(steps())
def test_what_is_left_out_as_alike_changes_no_schedule(problem):
    headroom, reserve = memory_headroom(problem), np.ones(problem.num_stages)
    results = [played(problem, rules, RULES)[:2] for rules in RULES]
    whole = [result for result in results if len(result[1]) == 3 * problem.num_stages * problem.num_microbatches]
    if not whole:
        return
    best = min(whole, key=lambda result: result[0])  # of equals the first
    found = list_schedule(problem, keys(problem), headroom, RULES, "", reserve)
    assert sorted(found.codes.tolist()) == sorted(best[1])
    assert found.ranks == list_scheduling._decode(problem, np.array(best[1]), "").ranks


def test_a_step_without_idle_time_is_played_once(monkeypatch):
    """On one rank nothing ever waits, so no share and no rule about idle ranks can matter."""
    stage = Stage(rank=0, forward_s=1, input_grad_s=1, weight_grad_s=1, activation_bytes=1.0)
    problem = Problem(num_microbatches=4, ranks=(Rank(),), stages=(stage,), links={}, hops=())
    plays = []
    play = list_scheduling._play
    monkeypatch.setattr(list_scheduling, "_play", lambda *given: plays.append(given) or play(*given))
    list_schedule(problem, keys(problem), memory_headroom(problem), tuple(r for r in RULES if r.alternate), "")
    assert len(plays) == 1


def test_other_rules_have_the_other_share_and_choice():
    assert list_scheduling._other(Rules(True, 1.0, 0.5, False), RULES) == Rules(True, 0.25, 1.0, True)
