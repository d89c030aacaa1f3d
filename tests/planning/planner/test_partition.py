import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError
from farpipe.planning.planner.partition import StageOption, divide_layers

WAYS = st.builds(
    StageOption,
    layer_s=st.integers(1, 5).map(float),
    extra_s=st.integers(0, 6).map(float),
    most_layers=st.none() | st.integers(1, 8),
    recompute=st.sampled_from(["none", "full"]),
)
STAGES = st.lists(st.lists(WAYS, min_size=1, max_size=2), min_size=1, max_size=4)


def seconds(options, num_layers):
    """The fastest of a stage's modes that holds so many layers; infinity where none does."""
    fit = [option for option in options if option.most_layers is None or num_layers <= option.most_layers]
    return min((option.extra_s + num_layers * option.layer_s for option in fit), default=math.inf)


def slowest(stages, layers):
    return max(seconds(options, n) for options, n in zip(stages, layers, strict=True))


def squares(stages, layers):
    return sum(seconds(options, n) ** 2 for options, n in zip(stages, layers, strict=True))


@given(st.integers(1, 9), STAGES)
@settings(max_examples=200, deadline=None)
def test_equals_brute_force(num_layers, stages):
    every = [
        layers
        for layers in itertools.product(range(1, num_layers + 1), repeat=len(stages))
        if sum(layers) == num_layers and slowest(stages, layers) < math.inf
    ]
    if not every:
        with pytest.raises(InfeasibleError):
            divide_layers(num_layers, stages)
        return
    found = divide_layers(num_layers, stages)
    assert found.layers in every
    assert found.slowest_s == slowest(stages, found.layers) == min(slowest(stages, other) for other in every)
    even = [layers for layers in every if slowest(stages, layers) == found.slowest_s]
    assert squares(stages, found.layers) == min(squares(stages, layers) for layers in even)
    for options, n, mode in zip(stages, found.layers, found.recompute, strict=True):
        same = [option for option in options if option.recompute == mode]
        assert seconds(same, n) == seconds(options, n)


def test_equal_stages_get_equal_layers():
    assert divide_layers(32, [[StageOption(1.0)]] * 8).layers == (4,) * 8


def test_a_slow_device_and_a_head_get_fewer_layers():
    options = [[StageOption(1.0)], [StageOption(2.0)], [StageOption(1.0, extra_s=3.0)]]
    assert divide_layers(12, options).layers == (6, 3, 3)


def test_only_the_stages_that_lack_memory_recompute():
    early = [StageOption(3.0, most_layers=2), StageOption(4.0, most_layers=8, recompute="full")]
    late = [StageOption(3.0), StageOption(4.0, recompute="full")]
    found = divide_layers(8, [early, early, late])
    assert found.recompute == ("none", "none", "none")
    assert divide_layers(12, [early, early, late]).recompute == ("full", "full", "none")


def test_pinned_layers_are_kept_and_end_stages_may_have_none():
    stages = [[StageOption(1.0)], [StageOption(1.0)], [StageOption(1.0, most_layers=3)]]
    assert divide_layers(8, stages, [0, 6, 2]).layers == (0, 6, 2)
    with pytest.raises(InfeasibleError, match="out of memory: stage 2 of 3 holds 3 of its 4 layers"):
        divide_layers(8, stages, [0, 4, 4])


def test_what_rounding_alone_makes_smaller_is_not_taken_for_better():
    assert divide_layers(7, [[StageOption(0.1)]] * 3).layers in ((3, 2, 2), (2, 3, 2), (2, 2, 3))


def test_too_few_layers_or_too_little_memory_is_infeasible():
    with pytest.raises(InfeasibleError, match="3 layers are too few for 4 stages"):
        divide_layers(3, [[StageOption(1.0)]] * 4)
    with pytest.raises(InfeasibleError, match="out of memory: its 2 stages together hold 4 of 8 layers"):
        divide_layers(8, [[StageOption(1.0, most_layers=2)]] * 2)
    with pytest.raises(
        InfeasibleError, match="stage 0 of 3 holds not a single layer, nor do 1 others what they should"
    ):
        divide_layers(8, [[StageOption(1.0, most_layers=n)] for n in (-2, 85, 0)])
