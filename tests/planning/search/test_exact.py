import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import check
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.simulate import simulate
from farpipe.core.step import Action, Problem, Rank, Schedule, least_activation_bytes
from farpipe.core.step.codes import B, F, I, W, encode
from farpipe.core.step.player import Player
from farpipe.planning.search.exact import _orders_of, solve
from farpipe.planning.search.greedy import greedy_orders, one_by_one
from farpipe.planning.search.step import fits_memory, search_step, to_orders, to_schedule
from strategies import POSITIVE_SECONDS, problems
from two_sites import two_sites


def rank_orders(stage, num_microbatches, kinds):
    """Every order of one stage's actions that keeps F before I before W."""
    tokens = [j for j in range(num_microbatches) for _ in kinds]
    for order in set(itertools.permutations(tokens)):
        seen = [0] * num_microbatches
        row = []
        for j in order:
            row.append(Action(stage, kinds[seen[j]], j))
            seen[j] += 1
        yield tuple(row)


def brute_force_s(problem, kinds="FIW"):
    """The step time of the best of all orders that fit memory."""
    step = search_step(problem)
    player = Player(step.arrays)
    of_stage = [list(rank_orders(s, problem.num_microbatches, kinds)) for s in range(problem.num_stages)]
    of_rank = [of_stage[stages[0]] for stages in problem.stages_of_rank]
    idle = [()] * problem.num_ranks

    def fits(rank, row):
        chains, place = problem.chains, {action: index for index, action in enumerate(row)}
        for stage, kind, j in row:
            before = chains.previous[j] if kind == "F" else chains.next[j] if kind == kinds[1] else -1
            if before >= 0 and place[stage, kind, int(before)] > place[stage, kind, j]:
                return False
        alone = Schedule(problem.num_microbatches, (*idle[:rank], row, *idle[rank + 1 :]))
        return fits_memory(step, to_orders(alone))

    of_rank = [[row for row in rows if fits(rank, row)] for rank, rows in enumerate(of_rank)]
    every = (to_orders(Schedule(problem.num_microbatches, rows)) for rows in itertools.product(*of_rank))
    return min(map(player.makespan_s, every))


def exactly(problem, split=True, **options):
    step = search_step(problem)
    return solve(step, first_answer(step, split), lower_bound_s(problem), time_limit_s=5, split=split, **options)


def first_answer(step, split=True):
    """Greedy's worst, or what fits wherever anything does."""
    found, orders = greedy_orders(step, split=split), to_orders(one_by_one(step.problem))
    return found[-1] if found else (Player(step.arrays).makespan_s(orders), orders)


def with_a_link_each(problem: Problem) -> Problem:
    """Every hop and direction with a link of its own, and no collectives."""
    links, hops = {}, []
    for index, hop in enumerate(problem.hops):
        ways = {}
        for way in ("forward", "backward"):
            transfer = getattr(hop, way)
            if transfer is not None:
                name = transfer.link if isinstance(transfer.link, str) else transfer.link[0]
                links[f"{way} {index}"] = problem.links[name]
                ways[way] = transfer.model_copy(update={"link": f"{way} {index}"})
        hops.append(type(hop)(**ways))
    return problem.model_copy(update={"links": links, "hops": tuple(hops), "sync": None, "exchanges": ()})


def with_headroom(problem, headroom):
    """So much memory on every rank, but what one sequence needs; None: unlimited."""
    least = least_activation_bytes(problem).tolist()
    headrooms = [headroom if headroom is None else max(headroom, need) for need in least]
    ranks = tuple(Rank(memory_bytes=headroom) for headroom in headrooms)
    return problem.model_copy(update={"ranks": ranks})


TINY = problems(max_ranks=2, max_stages=1, max_microbatches=2, seconds=POSITIVE_SECONDS)


@given(TINY, st.sampled_from([2.0, 3.0, None]))
@settings(max_examples=15, deadline=None)
def test_it_agrees_with_brute_force_where_a_link_serves_one_hop(problem, headroom):
    problem = with_headroom(with_a_link_each(problem), headroom)
    result = exactly(problem)
    assert result.proven
    assert result.makespan_s == pytest.approx(brute_force_s(problem))
    assert result.lower_bound_s == pytest.approx(result.makespan_s)


@given(TINY, st.booleans())
@settings(max_examples=15, deadline=None)
def test_the_sequence_of_microbatches_can_be_asked_for_and_left_open(problem, in_order):
    problem = with_headroom(with_a_link_each(problem), 3.0)
    result, best_s = exactly(problem, in_order=in_order), brute_force_s(problem)
    assert result.makespan_s >= best_s * (1 - 1e-9)
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    if not in_order:
        assert result.proven
        assert result.makespan_s == pytest.approx(best_s)


@given(problems(max_ranks=3, max_stages=1, max_microbatches=2))
@settings(max_examples=15, deadline=None)
def test_its_bound_holds_and_its_answer_is_possible_on_any_tiny_problem(problem):
    result = exactly(problem)
    best_s = brute_force_s(problem)
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    assert result.makespan_s >= best_s * (1 - 1e-9)


@pytest.mark.slow
@given(problems(max_ranks=2, max_stages=4, max_microbatches=3), st.sampled_from([1.0, 1.5, 2.0]))
@settings(max_examples=40, deadline=None)
def test_no_bound_is_above_what_the_exact_search_finds(problem, factor):
    """Several stages per rank, shared links, collectives, little memory; the search is not told the bound."""
    ranks = tuple(Rank(memory_bytes=factor * need) for need in least_activation_bytes(problem).tolist())
    step = search_step(problem.model_copy(update={"ranks": ranks}))
    found = solve(step, first_answer(step), 0.0, time_limit_s=2)
    assert lower_bound_s(step.problem) <= found.makespan_s * (1 + 1e-9)


@given(problems(max_ranks=2, max_stages=1, max_microbatches=3, seconds=POSITIVE_SECONDS))
@settings(max_examples=15, deadline=None)
def test_joined_backwards_agree_with_brute_force(problem):
    problem = with_headroom(with_a_link_each(problem), 4.0)
    result = exactly(problem, split=False)
    assert result.makespan_s == pytest.approx(brute_force_s(problem, "FB"))
    if result.orders is not None:
        assert {a.kind for row in to_schedule(result.orders, problem.num_microbatches, "").ranks for a in row} == {
            *"FB"
        }


@given(TINY)
@settings(max_examples=15, deadline=None)
def test_more_memory_never_makes_the_optimum_worse(problem):
    problem = with_a_link_each(problem)
    found = [exactly(with_headroom(problem, headroom)).makespan_s for headroom in (2.0, 3.0, 4.0)]
    assert found == sorted(found, reverse=True)


@given(TINY)
@settings(max_examples=15, deadline=None)
def test_a_faster_link_never_makes_the_optimum_worse(problem):
    slow = with_a_link_each(problem)
    links = {name: link.model_copy(update={"latency_s": link.latency_s / 2}) for name, link in slow.links.items()}
    assert exactly(slow.model_copy(update={"links": links})).makespan_s <= exactly(slow).makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("chunks", [1, 2])
def test_its_answer_fits_memory_and_is_what_the_simulator_says(chunks):
    problem = two_sites((3, 4, 2), (1, 1), num_ranks=3, num_microbatches=4, in_flight=2, chunks=chunks)
    result = exactly(problem)
    assert result.orders is not None
    schedule = to_schedule(result.orders, 4, "exact")
    check(problem, schedule)
    assert simulate(problem, schedule).makespan_s == result.makespan_s


def test_durations_without_a_common_tick_still_give_a_bound():
    problem = two_sites(
        (1.0, 2**0.5, 0.7390851332151607), (0.1234567, 0.3), num_ranks=3, num_microbatches=4, in_flight=3
    )
    result = exactly(problem)
    assert result.lower_bound_s <= result.makespan_s <= result.lower_bound_s * 1.001


@given(problems(max_ranks=3, max_stages=4, max_microbatches=4), st.sampled_from([I, B]))
@settings(max_examples=50, deadline=None)
def test_actions_without_a_time_that_begin_together_come_in_a_valid_order(problem, back):
    """The solver's times leave their order open: slices of a sequence, and stages of one rank, need theirs."""
    step, kinds = search_step(problem), (F, I, W) if back == I else (F, B)
    cells = itertools.product(range(problem.num_stages), range(problem.num_microbatches))
    codes = [encode(kind, s * problem.num_microbatches + j) for s, j in cells for kind in kinds]
    built = SimpleNamespace(step=step, size=dict.fromkeys(codes, 0), back=back)
    check(problem, to_schedule(_orders_of(dict.fromkeys(codes, 0), built), problem.num_microbatches, "exact"))
