"""A run played on paper: a world that changes, a Replanner that watches, and a search that answers some steps later."""

import pytest

from farpipe.plan.replanning import Replanner, Search, Swap
from farpipe.problem import Rank
from farpipe.schedule.library import order
from farpipe.simulate import simulate
from farpipe.spec.replanning import ReplanSettings
from plan.test_measured import noisy, real_problem, replaced

NEAR = real_problem(latency_s=0.01, rate=200e6 / 8)
FAR = real_problem(latency_s=0.06, rate=100e6 / 8)
SETTINGS = ReplanSettings(window_steps=3, watch_steps=3, pause_steps=5)


def play(worlds, find, *, start=NEAR, method="1f1b", settings=SETTINGS, delay=2):
    """Run through `worlds`, one Problem per step; `find(problem)` is the search. The Replanner and all makespans."""
    replanner = Replanner(start, order(method, start), settings)
    running, makespans, pending, swap = replanner.schedule, [], None, None
    for step, world in enumerate(worlds):
        timeline = noisy(simulate(world, running), step, outliers=0.0)
        makespans.append(timeline.makespan_s)
        answer = replanner.observe(step, timeline)
        if isinstance(answer, Search):
            pending = (step + delay, answer.problem)
        if isinstance(answer, Swap):
            swap = answer
        if pending is not None and step >= pending[0]:
            swap, pending = replanner.found(step, find(pending[1])), None
        if swap is not None:
            running = swap.schedule
            replanner.swapped(step)
            swap = None
    return replanner, makespans


def told(replanner):
    return [event["event"] for event in replanner.events]


def eager(problem):
    return order("eager", problem)


def test_nothing_happens_while_all_is_as_expected():
    replanner, _ = play([NEAR] * 30, lambda _: pytest.fail("nothing to search"), method="eager")
    assert told(replanner) == []


def test_a_link_that_gets_worse_leads_to_another_order_that_is_kept():
    replanner, makespans = play([NEAR] * 5 + [FAR] * 20, eager)
    assert told(replanner) == ["search", "swap", "judge"]
    search, swap, judge = replanner.events
    assert search["step"] == 7, "three steps in a row"
    assert "steps take" in search["why"]
    assert swap["step"] == 9
    assert makespans[-1] < 0.8 * makespans[6]
    assert swap["expected_s"] == pytest.approx(makespans[-1], rel=0.05)
    assert judge["gain"] == pytest.approx(judge["expected_gain"], abs=0.05)


def test_there_and_back_again():
    """When the link is as it was, the first order comes back without a search."""
    worlds = [NEAR] * 5 + [FAR] * 15 + [NEAR] * 20
    settings = SETTINGS.model_copy(update={"gain": 0.01})
    replanner, makespans = play(worlds, lambda p: order("zb-1p", p), method="zb-1p", settings=settings)
    assert told(replanner) == ["search", "swap", "judge", "swap", "judge"]
    back = replanner.events[3]
    assert 22 <= back["step"] <= 24, "three steps in a row, and no search"
    assert "known from before" in back["why"]
    assert replanner.schedule.ranks == order("zb-1p", NEAR).ranks
    assert makespans[-1] == pytest.approx(makespans[0], rel=0.02)


def test_a_swap_that_brings_nothing_is_taken_back():
    replanner = Replanner(NEAR, order("1f1b", NEAR), SETTINGS)
    slow = [noisy(simulate(FAR, order("1f1b", FAR)), seed) for seed in range(3)]
    assert [type(replanner.observe(step, timeline)) for step, timeline in enumerate(slow)][-1] is Search
    swap = replanner.found(3, eager(FAR))
    replanner.swapped(3)
    assert swap.expected_s < 0.9 * swap.before_s
    answers = [replanner.observe(4 + i, slow[0]) for i in range(3)]  # the world does not do what was predicted
    assert answers[:2] == [None, None]
    assert answers[2].is_step_back
    assert answers[2].schedule.ranks == order("1f1b", NEAR).ranks
    replanner.swapped(6)
    assert told(replanner) == ["search", "swap", "judge", "step back"]
    assert "instead of" in replanner.events[-1]["why"]
    quiet = [replanner.observe(7 + i, simulate(FAR, order("1f1b", FAR))) for i in range(4)]
    assert quiet == [None] * 4, "it rests before it searches again"


@pytest.mark.parametrize(
    ("found", "why"), [(lambda _: None, "found nothing"), (lambda p: order("1f1b", p), "predicted gain 0.0%")]
)
def test_an_order_that_gains_too_little_is_not_taken(found, why):
    replanner, _ = play([NEAR] * 5 + [FAR] * 8, found)
    assert told(replanner) == ["search", "stay"]
    assert why in replanner.events[1]["why"]


def test_an_order_that_does_not_fit_memory_is_not_taken():
    tight = replaced(
        NEAR,
        ranks=(Rank(memory_bytes=4.0),) * 4,
        stages=tuple(stage.model_copy(update={"activation_bytes": 1.0}) for stage in NEAR.stages),
    )
    replanner, _ = play([tight] * 4 + [FAR] * 7, lambda p: order("gpipe", p), start=tight)
    assert told(replanner) == ["search", "stay"]
    assert "would hold" in replanner.events[1]["why"]


def test_one_slow_step_is_no_reason():
    worlds = [NEAR] * 30
    worlds[10] = worlds[20] = FAR
    replanner, _ = play(worlds, lambda _: pytest.fail("no reason to search"), method="eager")
    assert told(replanner) == []
