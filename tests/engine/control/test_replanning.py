"""A simulated run: a world that changes, a Replanner that watches, and a search that answers some steps later."""

import json

import numpy as np
import pytest

from engine.control.test_measured import noisy, real_problem, replaced
from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec.run_keys import ReplanSettings
from farpipe.core.step import Rank
from farpipe.engine.control.measured import largest_change
from farpipe.engine.control.replanning import Replanner, SearchRequest, UnexpectedSteps

NEAR = real_problem(latency_s=0.01, rate=200e6 / 8)
FAR = real_problem(latency_s=0.06, rate=100e6 / 8)
FARTHER = real_problem(latency_s=0.1, rate=100e6 / 8)
FARTHEST = real_problem(latency_s=0.2, rate=50e6 / 8)
SETTINGS = ReplanSettings(settle_steps=0, watch_steps=3, pause_steps=5)


def play(worlds, find, *, start=NEAR, method="1f1b", settings=SETTINGS, delay=0, replanner=None, every=1):
    """Run through `worlds`, one Problem per step; `find(problem)` is the search. The Replanner and all makespans.

    A swap is in force from the second step after the one that led to it: that one is over when its Timeline is known.
    Of `every` steps one is recorded.
    """
    replanner = replanner or Replanner(start, order(method, start), settings)
    running, makespans, pending, coming = replanner.schedule, [], None, None
    for step, world in enumerate(worlds):
        makespans.append(simulate(world, running).makespan_s)
        if coming is not None:
            running, coming = coming, None
            replanner.swapped(step)
        if (step + 1) % every:
            continue
        timeline = noisy(simulate(world, replanner.schedule), step, outliers=0.0)
        for item in replanner.observe(step, timeline):
            if isinstance(item, SearchRequest):
                pending = (step + delay, item)
            else:
                coming = item.schedule
        if pending is not None and step >= pending[0]:
            swap, pending = replanner.found(step, find(pending[1].problem)), None
            coming = coming or (swap and swap.schedule)
    return replanner, makespans


def told(replanner):
    return [event["event"] for event in replanner.events]


def eager(problem):
    return order("eager", problem)


def jittered(problem, seed, most, each_action=False):
    """All durations up to `most` longer or shorter: all by the same, or every action by its own."""
    random = np.random.default_rng(seed)

    def other(value):
        factors = 1 + random.uniform(-most, most, problem.num_microbatches)
        return tuple(value * factors) if each_action else value * (1 + np.random.default_rng(seed).uniform(-most, most))

    figures = ("forward_s", "input_grad_s", "weight_grad_s")
    stages = [stage.model_copy(update={f: other(getattr(stage, f)) for f in figures}) for stage in problem.stages]
    return replaced(problem, stages=tuple(stages))


def test_nothing_happens_while_all_is_as_expected():
    replanner, _ = play([NEAR] * 30, lambda _: pytest.fail("nothing to search"), method="eager")
    assert told(replanner) == []


def test_a_link_that_gets_worse_leads_to_another_order_that_is_kept():
    replanner, makespans = play([NEAR] * 5 + [FAR] * 20, eager)
    assert told(replanner) == ["search", "swap", "judge"]
    search, swap, judge = replanner.events
    assert search["step"] == 6, "two steps in a row that are far off"
    assert "something takes" in search["why"]
    assert swap["step"] == 7
    assert makespans[7] == makespans[6] > makespans[8] / 0.8
    assert swap["expected_s"] == pytest.approx(makespans[-1], rel=0.05)
    assert judge["gain"] == pytest.approx(judge["expected_gain"], abs=0.05)


@pytest.mark.parametrize("every", [2, 5])
def test_records_of_every_few_steps_lead_to_the_same_order_somewhat_later(every):
    whole, _ = play([NEAR] * 5 + [FAR] * 40, eager)
    replanner, makespans = play([NEAR] * 5 + [FAR] * 40, eager, every=every)
    assert told(replanner) == ["search", "swap", "judge"]
    assert 5 + every <= replanner.events[0]["step"] < 5 + 3 * every, "two recorded steps in a row that are far off"
    assert replanner.schedule.ranks == whole.schedule.ranks
    assert replanner.events[-1]["gain"] == pytest.approx(replanner.events[-1]["expected_gain"], abs=0.05)
    assert makespans[-1] < 0.8 * makespans[6]


def test_there_and_back_again():
    """The first order comes back without a search once the link is as it was."""
    worlds = [NEAR] * 5 + [FAR] * 15 + [NEAR] * 20
    settings = SETTINGS.model_copy(update={"gain": 0.01})
    replanner, makespans = play(worlds, lambda p: order("zb-1p", p), method="zb-1p", settings=settings)
    assert told(replanner) == ["search", "swap", "judge", "swap", "judge"]
    back = replanner.events[3]
    assert back["step"] == 22, "two steps in a row, and no search: the fourth is done in the first order"
    assert "known from before" in back["why"]
    assert replanner.schedule.ranks == order("zb-1p", NEAR).ranks
    assert makespans[-1] == pytest.approx(makespans[0], rel=0.02)


def test_a_known_order_is_taken_at_once_while_a_better_one_is_sought():
    worlds = [NEAR] * 5 + [FARTHER] * 10 + [NEAR] * 10 + [FARTHEST] * 15
    replanner, _ = play(worlds, eager, method="zb-2p", delay=1)
    of_search, of_way_back = ["search", "swap", "judge"], ["swap", "judge"]
    assert told(replanner) == [*of_search, *of_way_back, *of_search, "swap", "judge"]
    search, first, _, second, _ = replanner.events[-5:]
    assert first["step"] == search["step"] + 1 == 27
    assert "known from before" in first["why"], "the order for the other bad link is better here as well"
    assert second["expected_s"] < first["expected_s"]
    assert replanner.schedule.ranks == eager(FARTHEST).ranks


def test_a_better_order_that_is_found_during_a_trial_is_taken_after_it():
    replanner = Replanner(NEAR, order("1f1b", NEAR), SETTINGS)
    for step in range(2):
        todo = replanner.observe(step, simulate(FAR, order("1f1b", FAR)))
    assert [type(item) for item in todo] == [SearchRequest]
    quick = replanner.found(1, order("zb-h1", FAR), is_last=False)
    assert replanner.found(1, order("zb-h1", FAR), is_last=False) is None, "it is under way"
    replanner.swapped(2)
    assert replanner.found(3, eager(FAR), is_last=True) is None, "first the other one is judged"
    answers = [replanner.observe(step, simulate(FAR, quick.schedule)) for step in range(3, 6)]
    assert answers[:2] == [[], []]
    assert answers[2][0].schedule.ranks == eager(FAR).ranks


def test_a_world_that_changes_during_a_trial_is_not_waited_for():
    settings = SETTINGS.model_copy(update={"watch_steps": 10})
    replanner, makespans = play([NEAR] * 5 + [FARTHER] * 5 + [NEAR] * 10, eager, method="zb-2p", settings=settings)
    assert [event["step"] for event in replanner.events if event["event"] == "swap"] == [7, 12]
    assert makespans[-1] == makespans[0]


def test_a_world_that_was_not_yet_what_it_became_is_looked_at_again():
    """TCP takes a while to get used to a link, and what is decided on the first steps is not held against an order."""
    replanner = Replanner(NEAR, order("zb-2p", NEAR), SETTINGS)
    for step in range(2):
        replanner.observe(step, simulate(FARTHEST, replanner.schedule))
    replanner.found(1, eager(FARTHEST))
    replanner.swapped(2)
    slowly = [real_problem(latency_s=0.17, rate=55e6 / 8), real_problem(latency_s=0.14, rate=60e6 / 8), FARTHER]
    todo = [replanner.observe(3 + i, simulate(world, replanner.schedule)) for i, world in enumerate([*slowly, FARTHER])]
    (search,) = [item for items in todo for item in items]
    assert isinstance(search, SearchRequest)
    assert largest_change(search.problem, FARTHEST) > SETTINGS.change
    assert told(replanner) == ["search", "swap", "search"], "nothing to judge"


def test_a_swap_that_brings_nothing_is_taken_back():
    replanner = Replanner(NEAR, order("1f1b", NEAR), SETTINGS)
    slow = [noisy(simulate(FAR, order("1f1b", FAR)), seed) for seed in range(2)]
    assert [type(item) for step, t in enumerate(slow) for item in replanner.observe(step, t)] == [SearchRequest]
    swap = replanner.found(1, eager(FAR))
    replanner.swapped(2)
    assert swap.expected_s < 0.9 * swap.before_s
    answers = [replanner.observe(3 + i, slow[0]) for i in range(2)]  # the world does not do what was predicted
    assert answers[0] == []
    (back,) = answers[1]
    assert back.is_step_back
    assert back.schedule.ranks == order("1f1b", NEAR).ranks
    replanner.swapped(5)
    assert told(replanner) == ["search", "swap", "judge", "step back"]
    assert "instead of" in replanner.events[-1]["why"]
    quiet = [replanner.observe(6 + i, simulate(FAR, order("1f1b", FAR))) for i in range(4)]
    assert quiet == [[]] * 4, "it rests before it searches again"


def test_an_order_that_brought_nothing_is_not_tried_again_in_the_same_world():
    replanner = Replanner(NEAR, eager(NEAR), SETTINGS)
    slow = simulate(FAR, eager(NEAR))
    for step in range(2):
        replanner.observe(step, slow)
    replanner.found(1, eager(FAR))
    replanner.swapped(2)
    (back,) = [item for step in (3, 4) for item in replanner.observe(step, slow)]
    assert back.is_step_back
    replanner.swapped(5)
    twice = [item for step in range(20, 30) for item in replanner.observe(step, simulate(NEAR, replanner.schedule))]
    assert [type(item) for item in twice] == [SearchRequest], "the way back: no order that is known is better"
    replanner.found(30, replanner.schedule)
    again = [item for step in range(50, 60) for item in replanner.observe(step, slow)]
    assert [type(item) for item in again] == [SearchRequest], "and not a swap"
    assert replanner.found(60, eager(FAR)) is None
    assert "tried before" in replanner.events[-1]["why"]


@pytest.mark.parametrize(
    ("found", "why"), [(lambda _: None, "found nothing"), (lambda p: order("1f1b", p), "predicted gain 0.0 %")]
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
    replanner, _ = play([tight] * 4 + [FAR] * 5, lambda p: order("gpipe", p), start=tight)
    assert told(replanner) == ["search", "stay"]
    assert "too much memory" in replanner.events[1]["why"]


def test_single_slow_steps_are_no_reason():
    worlds = [NEAR] * 30
    worlds[10] = worlds[20] = worlds[22] = FAR
    replanner, _ = play(worlds, lambda _: pytest.fail("no reason to search"), method="eager")
    assert told(replanner) == []


@pytest.mark.parametrize("each_action", [False, True])
def test_jitter_is_no_reason(each_action):
    worlds = [jittered(NEAR, seed, 0.1, each_action) for seed in range(100)]
    replanner, _ = play(worlds, lambda _: pytest.fail("no reason to search"), method="eager")
    assert told(replanner) == []


def test_a_wild_world_is_waited_out():
    """Steps that are far off, each in another way."""
    wild = [real_problem(latency_s=0.3 if step % 2 else 0.06, rate=100e6 / 8) for step in range(20)]
    replanner, _ = play([NEAR] * 3 + wild, lambda _: pytest.fail("no reason to search"), method="eager")
    assert told(replanner) == []


@pytest.mark.parametrize(("longer", "steps"), [(1.5, 2), (1.15, 5)])
def test_a_small_change_takes_longer_to_be_sure_of(longer, steps):
    odd = UnexpectedSteps(SETTINGS)
    timeline = simulate(NEAR, eager(NEAR))
    proofs = [odd.add(timeline, timeline.makespan_s / longer, NEAR) for _ in range(20)]
    assert proofs.index(True) + 1 == steps


def test_nothing_is_concluded_from_the_first_steps():
    settings = SETTINGS.model_copy(update={"settle_steps": 3})
    replanner = Replanner(NEAR, eager(NEAR), settings, first_step=7)
    assert [replanner.observe(step, simulate(FAR, eager(NEAR))) for step in range(7, 11)] == [[]] * 4
    assert replanner.observe(11, simulate(FAR, eager(NEAR)))


def test_a_later_attempt_goes_on_with_what_was_known():
    before, _ = play([NEAR] * 5 + [FARTHER] * 15, eager, method="zb-2p")
    after = Replanner(NEAR, order("zb-2p", NEAR), SETTINGS)
    after.go_on(before.to_json(), "replan.json")
    assert after.schedule == before.schedule
    assert after.to_json() == before.to_json()
    play([FARTHER] * 5 + [NEAR] * 10, lambda _: pytest.fail("all is known"), replanner=after)
    assert told(after) == ["swap", "judge"]
    assert after.schedule.ranks == order("zb-2p", NEAR).ranks


def test_what_is_of_another_run_is_refused():
    text = Replanner(NEAR, order("1f1b", NEAR), SETTINGS).to_json()
    other = Replanner(NEAR, order("eager", NEAR), SETTINGS)
    with pytest.raises(InputError, match="another plan"):
        other.go_on(text, "replan.json")
    mine = Replanner(NEAR, order("1f1b", NEAR), SETTINGS)
    for key, value in [("schedule", 1), ("believed", {}), ("known", [1]), ("expected_s", 0), ("disappointed", None)]:
        with pytest.raises(InputError, match=r"replan\.json"):
            mine.go_on(json.dumps(json.loads(text) | {key: value}), "replan.json")
    shorter = json.loads(real_problem(num_microbatches=3).to_json())
    with pytest.raises(InputError, match="another pipeline"):
        mine.go_on(json.dumps(json.loads(text) | {"believed": shorter}), "replan.json")
    assert mine.to_json() == text, "nothing has changed"
