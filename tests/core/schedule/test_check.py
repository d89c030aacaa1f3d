import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, ScheduleError
from farpipe.core.schedule import check, memory_curve, peak_memory_bytes
from farpipe.core.schedule.check import COMPILED_FROM, _all_sound, _check_orders
from farpipe.core.schedule.library import order
from farpipe.core.step import KINDS, Problem, Rank, Schedule, Stage, byte_tables
from strategies import problems_with_schedules

GOOD = ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"]


def pipeline(num_ranks=2, num_microbatches=2, memory=None, stash=1.0):
    stages = tuple(
        Stage(rank=r, forward_s=1, input_grad_s=1, weight_grad_s=1, activation_bytes=2, weight_stash_bytes=stash)
        for r in range(num_ranks)
    )
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(memory_bytes=memory, static_bytes=1),) * num_ranks,
        stages=stages,
        hops=(None,) * (num_ranks - 1),
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (GOOD[:1], "not for this problem: it has orders for ranks 0 to 0, the problem has 0 to 1"),
        (["0F0 1F0", GOOD[1]], "not valid: 1F0 is on rank 0, but its stage is on rank 1"),
        (["0F0 0F7", GOOD[1]], "not valid: 0F7: there is no such microbatch; they are 0 to 1"),
        (
            ["0F0 0F1 0F0 0B0 0B1", GOOD[1]],
            "not valid: 0F0 is done twice on rank 0, at positions 0 and 2: leave one out",
        ),
        (["0F0 0B0", GOOD[1]], "not valid: 0F1 is missing on rank 0: every microbatch needs its F"),
        (
            ["0F0 0F1 0B1", GOOD[1]],
            "not valid: 0B0 (or 0I0 and 0W0) is missing on rank 0: every forward needs its backward",
        ),
        (["0F0 0F1 0I0 0B1", GOOD[1]], "not valid: 0W0 is missing on rank 0: every I needs its W"),
        (["0F0 0F1 0B0 0I0 0B1", GOOD[1]], "not valid: 0I0: the backward of 0F0 is already done as B"),
        (["0F0 0I0 0B0 0F1 0B1", GOOD[1]], "not valid: 0B0: the backward of 0F0 is already done as I or W"),
        (["0B0 0F0 0F1 0B1", GOOD[1]], "not valid: 0B0 comes before its forward 0F0 on rank 0: move it behind that"),
        (
            ["0F0 0F1 0W0 0I0 0B1", GOOD[1]],
            "not valid: 0W0 comes before its input gradient 0I0 on rank 0: move it behind that",
        ),
        (["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "not valid: deadlock"),
    ],
)
def test_the_first_broken_rule_is_named(rows, message):
    with pytest.raises(ScheduleError) as caught:
        check(pipeline(), Schedule.from_text(rows, 2))
    assert message in str(caught.value)


def test_the_grid_has_an_arrow_at_the_place():
    with pytest.raises(ScheduleError) as caught:
        check(pipeline(), Schedule.from_text(["0F0 0F1 0F0 0B0 0B1", GOOD[1]], 2))
    assert str(caught.value).splitlines() == [
        "schedule 'given' is not valid: 0F0 is done twice on rank 0, at positions 0 and 2: leave one out",
        "rank 0: 0F0 0F1 0F0 0B0 0B1",
        "                ^^^",
        "rank 1: 1F0 1I0 1W0 1F1 1B1",
    ]


def test_a_deadlock_is_told_as_a_circle():
    with pytest.raises(ScheduleError) as caught:
        check(pipeline(), Schedule.from_text(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], 2))
    assert "rank 0 can't start 0B0: it waits for the backward 1B0 on rank 1" in str(caught.value)
    assert "rank 1 can't start 1F1: it waits for 0F1 on rank 0" in str(caught.value)


CHAIN = ["0F0 0F1 0I1 0B0 0W1", "1F0 1F1 1B1 1I0 1W0"]


def chained(memory=None):
    problem = pipeline(memory=memory)
    stages = tuple(stage.model_copy(update={"chain_bytes": (3.0, 4.0)}) for stage in problem.stages)
    return problem.model_copy(update={"stages": stages, "follows": (None, 0)})


def test_slices_of_a_sequence_go_forward_in_order_and_backward_in_reverse():
    check(chained(), Schedule.from_text(CHAIN, 2))
    with pytest.raises(ScheduleError, match="not valid: 0F1 comes before 0F0, the previous slice of its sequence"):
        check(chained(), Schedule.from_text(["0F1 0F0 0I1 0B0 0W1", CHAIN[1]], 2))
    with pytest.raises(ScheduleError, match="not valid: 1B0 comes before the backward of 1F1, the next slice of its"):
        check(chained(), Schedule.from_text([CHAIN[0], "1F0 1F1 1B0 1B1"], 2))


def test_a_chain_holds_the_gradients_of_its_keys_and_values_from_its_first_backward_each_to_its_own():
    schedule, problem = Schedule.from_text(CHAIN, 2), chained()
    assert memory_curve(problem, schedule, 0).tolist() == [3, 5, 12, 7, 2, 1]
    assert memory_curve(problem, schedule, 1).tolist() == [3, 5, 12, 6, 2, 1]
    check(chained(memory=12), schedule)
    with pytest.raises(InfeasibleError, match="needs too much memory: rank 0 needs 12 B of 11 B at 0I1, 1 B too much"):
        check(chained(memory=11), schedule)


def test_memory_follows_the_order():
    schedule = Schedule.from_text(["0F0 0F1 0I0 0B1 0W0", GOOD[1]], 2)
    problem = pipeline()
    check(problem, schedule)
    assert memory_curve(problem, schedule, 0).tolist() == [3, 5, 5, 4, 2, 1]
    assert peak_memory_bytes(problem, schedule) == [5, 3]


def test_a_stash_larger_than_the_activation_counts_too():
    problem = pipeline(stash=5.0)
    schedule = Schedule.from_text(["0F0 0F1 0I0 0B1 0W0", GOOD[1]], 2)
    assert memory_curve(problem, schedule, 0).tolist() == [3, 5, 5, 8, 6, 1]


def test_too_little_memory_is_infeasible_and_the_place_is_drawn():
    problem = pipeline(memory=4)
    with pytest.raises(InfeasibleError) as caught:
        check(problem, Schedule.from_text(GOOD, 2))
    text = str(caught.value)
    assert "needs too much memory: rank 0 needs 5 B of 4 B at 0F1, 1 B too much" in text
    assert text.splitlines()[2] == "            ^^^"
    check(problem, Schedule.from_text(GOOD, 2), memory=False)


def test_many_ranks_and_actions_are_drawn_in_a_window():
    problem = pipeline(num_ranks=40, num_microbatches=100)
    good = order("1f1b", problem)
    broken = list(good.ranks[20])
    broken.insert(90, broken[89])
    rows = [*good.ranks[:20], tuple(broken), *good.ranks[21:]]
    with pytest.raises(ScheduleError) as caught:
        check(problem, Schedule(100, tuple(rows)))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 120
    arrow = next(line for line in lines if "^" in line)
    assert lines[lines.index(arrow) - 1][arrow.index("^") :].split()[0] == str(broken[90])


@pytest.mark.slow
@given(problems_with_schedules(), st.data())
@settings(max_examples=150, deadline=None)
def test_damage_to_a_valid_schedule_is_noticed(pair, data):
    problem, schedule = pair
    check(problem, schedule)
    rank = data.draw(st.integers(0, problem.num_ranks - 1))
    rows = [list(order) for order in schedule.ranks]
    at = data.draw(st.integers(0, len(rows[rank]) - 1))
    if data.draw(st.booleans()):
        rows[rank].insert(at, rows[rank][at])
    else:
        del rows[rank][at]
    with pytest.raises(ScheduleError):
        check(problem, Schedule(schedule.num_microbatches, tuple(map(tuple, rows))))


@pytest.mark.slow
@given(problems_with_schedules(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_compiled_rules_accept_exactly_what_the_worded_ones_do(pair, data):
    """Any one action replaced, moved, doubled or left out, on the same rank or another."""
    problem, schedule = pair
    _check_orders(problem, schedule)
    assert _all_sound(problem, schedule)
    rows = [list(order) for order in schedule.ranks]
    source, target = (rows[data.draw(st.integers(0, problem.num_ranks - 1))] for _ in range(2))
    at = data.draw(st.integers(0, len(source) - 1))
    action = source[at] if data.draw(st.booleans()) else source.pop(at)
    if data.draw(st.booleans()):
        action = action._replace(kind=data.draw(st.sampled_from(KINDS)), microbatch=data.draw(st.integers(0, 4)))
    target.insert(data.draw(st.integers(0, len(target))), action)
    changed = Schedule(schedule.num_microbatches, tuple(map(tuple, rows)))
    try:
        _check_orders(problem, changed)
    except ScheduleError:
        assert not _all_sound(problem, changed)
    else:
        assert _all_sound(problem, changed)


@pytest.mark.parametrize("broken", ["swapped", "doubled", "missing"])
def test_large_schedules_are_told_the_same_errors(broken):
    problem = pipeline(num_ranks=8, num_microbatches=700)
    rows = [list(order) for order in order("1f1b", problem).ranks]
    check(problem, order("1f1b", problem))
    if broken == "swapped":
        rows[5][600], rows[5][620] = rows[5][620], rows[5][600]
    elif broken == "doubled":
        rows[5].insert(900, rows[5][10])
    else:
        del rows[5][900]
    schedule = Schedule(700, tuple(map(tuple, rows)))
    assert schedule.num_actions > COMPILED_FROM
    told = []
    for rules in (check, _check_orders):
        with pytest.raises(ScheduleError) as caught:
            rules(problem, schedule)
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.slow
@given(problems_with_schedules())
@settings(max_examples=100, deadline=None)
def test_peak_memory_is_what_following_every_action_gives(pair):
    problem, schedule = pair
    taken, freed = byte_tables(problem)
    peaks = []
    for actions, rank in zip(schedule.ranks, problem.ranks, strict=True):
        held = most = rank.static_bytes
        for stage, kind, microbatch in actions:
            code = 4 * (stage * problem.num_microbatches + microbatch) + KINDS.index(kind)
            held += taken[code]
            most = max(most, held)
            held -= freed[code]
        peaks.append(most)
    assert peak_memory_bytes(problem, schedule) == pytest.approx(peaks)


@given(problems_with_schedules())
@settings(max_examples=100, deadline=None)
def test_a_step_gives_back_what_it_took(pair):
    problem, schedule = pair
    for rank in range(problem.num_ranks):
        curve = memory_curve(problem, schedule, rank)
        assert curve[-1] == problem.ranks[rank].static_bytes
        assert curve.min() >= -1e-9 + problem.ranks[rank].static_bytes
