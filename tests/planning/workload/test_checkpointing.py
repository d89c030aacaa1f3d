"""Choice of recomputed layers: optimal on tiny batches, never over memory, no worse than uniform."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule import check, memory_curve
from farpipe.planning.cost.chunk_laws import Load
from farpipe.planning.workload.candidate_cuts import total_law
from farpipe.planning.workload.checkpointing import (
    MemoryModel,
    choose_layers,
    diagonal_program,
    memory_model,
    recomputation_bound_s,
    recomputation_s,
    refined,
    solve_program,
)
from farpipe.planning.workload.chunk import followed, load_of
from farpipe.planning.workload.cut import Cut, cut_batch
from farpipe.planning.workload.order import chunk_order
from planning.workload.batches import costs
from planning.workload.test_order import CHAINS, follows_of


def tiny(counts, num_stages, seed, tightness):
    """A memory model of random sizes whose headrooms lie between what recomputing everything and nothing needs."""
    rng = np.random.default_rng(seed)
    follows = follows_of(counts)
    order, shape = chunk_order(follows, (0,) * num_stages), (num_stages, len(follows))
    held, again = rng.uniform(4, 8, shape), rng.uniform(0.5, 2, shape)
    layers = np.full(num_stages, 2)
    model = MemoryModel(order, held, held / 3, 0 * held, layers, again, np.zeros(num_stages), np.zeros(num_stages))
    most, least = (model.used(np.full(shape, c)).max(axis=1) for c in (0, 2))
    headroom = least + tightness * (most - least)
    return MemoryModel(order, held, held / 3, 0 * held, layers, again, headroom, headroom)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=2).map(lambda c: sorted(c, reverse=True)),
    st.integers(1, 2),
    st.integers(0, 1000),
    st.floats(0.05, 0.95),
)
def test_the_program_is_optimal_against_brute_force(counts, num_stages, seed, tightness):
    model = tiny(counts, num_stages, seed, tightness)
    price, rows, least, bound = diagonal_program(model)
    every = (np.array(c, float) for c in product(range(3), repeat=price.size))
    best = min(float(price @ c) for c in every if (rows @ c >= least - 1e-9).all())
    found = solve_program(price, rows, least, bound, integer=True)
    assert price @ np.rint(found) == pytest.approx(best, rel=0.006, abs=1e-9)
    layers = choose_layers(model)
    assert model.fits(layers)
    assert recomputation_s(model, layers) <= best * 1.006 + 1e-9


@settings(deadline=None, max_examples=30)
@given(CHAINS, st.integers(1, 4), st.integers(0, 1000), st.floats(0.0, 1.0))
def test_choices_fit_and_are_ordered_as_they_should_be(counts, num_stages, seed, tightness):
    model = tiny(counts, num_stages, seed, tightness)
    chosen = {rule: choose_layers(model, rule) for rule in ("chunk", "uniform", "full")}
    assert all(model.fits(layers) for layers in chosen.values())
    price = {rule: recomputation_s(model, layers) for rule, layers in chosen.items()}
    assert price["chunk"] <= price["uniform"] * 1.006 + 1e-9
    assert price["uniform"] <= price["full"] + 1e-9
    assert recomputation_bound_s(model) <= price["chunk"] + 1e-6


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.1, 1.0))
def test_polishing_keeps_every_constraint_and_lowers_what_it_can(seed, share):
    rng = np.random.default_rng(seed)
    rows, counts = rng.uniform(0, 1, (6, 5)) * (rng.random((6, 5)) < 0.6), rng.integers(0, 5, 5).astype(float)
    price, least = rng.uniform(0.1, 1, 5), share * (rows @ counts)
    found = refined(price, rows, least, counts)
    assert (rows @ found >= least - 1e-8).all()
    assert ((found >= 0) & (found <= counts)).all()
    for index in np.flatnonzero(found):
        fewer = found.copy()
        fewer[index] -= 1
        assert (rows @ fewer < least - 1e-12).any()


def chunks_of(stage_costs, lengths, slices):
    load = Load(*(np.array([v]) for v in (1.0, 0.5, False, 0.0, False, 0.0, 0.0)))
    law = total_law(stage_costs, load)
    longest = max(lengths)
    target_s = (law.pair_s * longest**2 / 2 + law.token_s * longest) / slices
    return cut_batch(lengths, Cut(target_s, 1 << 40), law).chunks()


@pytest.mark.parametrize("shrinks", [False, True], ids=["as-many", "fewer"])
@pytest.mark.parametrize("extra", [(0, 0, 0, 0), (2, 2, 0, 0)])
def test_the_memory_model_is_that_of_the_problem(extra, shrinks):
    stage_costs = costs()
    chunks = chunks_of(stage_costs, [65536, 50_000, 30_000, 9000, 4000, 3000, 500], 5)
    load, follows = load_of(chunks), followed(chunks)
    order = chunk_order(follows, extra, shrinks=shrinks)
    model = memory_model(stage_costs, load, order)
    layers = np.tile(np.arange(len(chunks)) % 3, (4, 1))
    problem, schedule = stage_costs.problem(load, follows, layers), order.schedule()
    check(problem, schedule, memory=False)
    for rank in range(4):
        curve = memory_curve(problem, schedule, rank)
        at_backwards = [curve[i] for i, a in enumerate(schedule.ranks[rank]) if a.kind == "B"]
        expected = model.used(layers)[rank] + problem.ranks[rank].static_bytes
        assert at_backwards == pytest.approx(expected.tolist())
        assert curve.max() == pytest.approx(max(at_backwards))


def test_what_does_not_fit_says_by_how_much():
    model = tiny([3, 2], 2, 0, 0.5)
    tight = replace(model, headroom=model.headroom / 10, headroom_without=model.headroom / 10)
    with pytest.raises(InfeasibleError, match=r"stage \d would hold \d+ chunks at once and be .* over the"):
        choose_layers(tight)
    assert recomputation_bound_s(tight) == np.inf
    with pytest.raises(InfeasibleError, match="recomputes nothing"):
        choose_layers(model, "none")
