import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.engine.transport.clock import Clock, PingTimes, offset_ns

TIMES = st.integers(-(10**18), 10**18)
DELAYS = st.integers(0, 10**9)


def test_the_clock_is_the_machines_plus_its_skew():
    clock = Clock(skew_ns=-5_000_000_000)
    machine_ns = time.monotonic_ns()
    assert 0 <= clock.now_ns() - (machine_ns - 5_000_000_000) < 1_000_000_000
    assert clock.from_machine_ns(7) == 7 - 5_000_000_000


def test_the_skew_comes_from_the_environment(monkeypatch):
    assert Clock.from_environment() == Clock(0)
    monkeypatch.setenv("FARPIPE_TEST_CLOCK_SKEW_NS", "-12")
    assert Clock.from_environment() == Clock(-12)
    monkeypatch.setenv("FARPIPE_TEST_CLOCK_SKEW_NS", "a bit")
    with pytest.raises(InputError, match="FARPIPE_TEST_CLOCK_SKEW_NS: expected whole nanoseconds, found 'a bit'"):
        Clock.from_environment()


def ping(start, offset, there, thinking, back):
    arrived = start + there
    return PingTimes(start, arrived + offset, arrived + thinking + offset, arrived + thinking + back)


@given(TIMES, TIMES, DELAYS, DELAYS)
def test_equal_ways_there_and_back_give_the_exact_offset(start, offset, one_way, thinking):
    assert offset_ns([ping(start, offset, one_way, thinking, one_way)]) == offset


@given(TIMES, TIMES, st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1))
def test_the_offset_is_wrong_by_half_the_shortest_round_trip_at_most(start, offset, delays):
    pings = [ping(start, offset, *delay) for delay in delays]
    shortest = min(there + back for there, _, back in delays)
    assert abs(offset_ns(pings) - offset) <= shortest / 2 + 1
