"""What farpipe claims against CrossPipe, on the points of its grid that decide it."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "crosspipe_grid.py"


@pytest.fixture(scope="module")
def grid():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[PATH.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[PATH.stem]


@pytest.mark.slow
def test_a_third_less_time_than_the_best_traditional_order_in_the_same_memory(grid):
    """At latency = message = 2 F; the order is proven the best of those with one stage per rank."""
    row = grid.point(grid.EQUAL, (2.0, 2.0), {"one": 20.0, "v": 1.0})
    assert row["less than the best traditional"] >= 0.336
    assert row["gap in its placement"] < 1e-6
    assert row["less than 1f1b"] > row["less than the best traditional"]


def test_without_delay_the_named_orders_take_what_is_published(grid):
    for name in ("1f1b", "zb-h1"):
        ours = grid.named_s(name, grid.TRADITIONAL[name], (0.0, 0.0), grid.EQUAL)
        assert ours == pytest.approx(grid.PUBLISHED[0, 0][name], abs=0.0005)


def test_every_placement_is_the_same_model_in_the_same_memory(grid):
    whole = grid.two_sites("one", (1.0, 1.0), grid.EQUAL)
    for shape in ("v", "round"):
        halves = grid.two_sites(shape, (1.0, 1.0), grid.EQUAL)
        for figure in ("forward_s", "input_grad_s", "weight_grad_s", "activation_bytes", "weight_stash_bytes"):
            per_rank = [halves.table(figure)[list(stages)].sum(axis=0) for stages in halves.stages_of_rank]
            assert per_rank == [pytest.approx(row) for row in whole.table(figure)]
        assert halves.ranks == whole.ranks
        assert [hop is not None for hop in halves.hops].count(True) == {"v": 2, "round": 3}[shape]


def test_memory_that_1f1b_needs_is_too_little_for_interleaved(grid):
    assert grid.named_s("interleaved", "round", (0.0, 0.0), grid.EQUAL) is None
    assert grid.named_s("interleaved", "round", (0.0, 0.0), grid.TWICE) is not None
