import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.errors import InfeasibleError
from farpipe.plan.partition import StageRoom, divide_layers

ROOMS = st.builds(
    StageRoom,
    layer_s=st.integers(1, 5).map(float),
    extra_s=st.integers(0, 6).map(float),
    most_layers=st.none() | st.integers(1, 8),
)


def slowest(rooms, layers):
    return max(room.extra_s + n * room.layer_s for room, n in zip(rooms, layers, strict=True))


@given(st.integers(1, 9), st.lists(ROOMS, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_equals_brute_force(num_layers, rooms):
    every = [
        layers
        for layers in itertools.product(range(1, num_layers + 1), repeat=len(rooms))
        if sum(layers) == num_layers
        and all(room.most_layers is None or n <= room.most_layers for room, n in zip(rooms, layers, strict=True))
    ]
    if not every:
        with pytest.raises(InfeasibleError):
            divide_layers(num_layers, rooms)
        return
    layers = divide_layers(num_layers, rooms)
    assert sum(layers) == num_layers
    assert tuple(layers) in every
    assert slowest(rooms, layers) == min(slowest(rooms, other) for other in every)


def test_equal_stages_get_equal_layers():
    assert divide_layers(32, [StageRoom(1.0)] * 8) == [4] * 8


def test_a_slow_device_and_a_head_get_fewer_layers():
    rooms = [StageRoom(1.0), StageRoom(2.0), StageRoom(1.0, extra_s=3.0)]
    assert divide_layers(12, rooms) == [6, 3, 3]


def test_what_rounding_alone_makes_smaller_is_not_taken_for_better():
    assert divide_layers(7, [StageRoom(0.1)] * 3) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_too_few_layers_or_too_little_memory_is_infeasible():
    with pytest.raises(InfeasibleError, match="3 layers are too few for 4 stages"):
        divide_layers(3, [StageRoom(1.0)] * 4)
    with pytest.raises(InfeasibleError, match="memory holds 4 of 8 layers"):
        divide_layers(8, [StageRoom(1.0, most_layers=2)] * 2)
