"""Documents of light paths: what they say of a step, and what they are refused for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import LightPath, LightPaths, LitHop, LitStep
from two_sites import two_sites

PROBLEM = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=2, num_microbatches=3)
SCHEDULE = order("1f1b", PROBLEM)


def lit_hop(direction="forward", stage=0, wait_s=(0.0, 0.01, 0.02), rate=(1.0, 2.0, 4.0), latency_s=(0.1, 0.2, 0.3)):
    return LitHop(direction=direction, stage=stage, wait_s=wait_s, bandwidth_bytes_per_s=rate, latency_s=latency_s)


def light_paths(*steps):
    return LightPaths(schedule=SCHEDULE, steps=tuple(LitStep(hops=hops) for hops in steps))


def test_a_document_survives_a_round_trip(tmp_path):
    paths = light_paths((lit_hop(), lit_hop("backward", 1)), ())
    paths.save(tmp_path / "light.json")
    assert LightPaths.load(tmp_path / "light.json") == paths


def test_steps_take_their_turns():
    paths = light_paths((lit_hop(),), ())
    assert [paths.of_step(step).path("forward", 0, 1) for step in range(3)] == [
        LightPath(0.01, 2.0, 0.2),
        None,
        LightPath(0.01, 2.0, 0.2),
    ]


@settings(deadline=None)
@given(
    seconds=st.lists(st.floats(0, 1), min_size=12, max_size=12),
    rates=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
)
def test_every_message_of_the_predicted_step_has_its_own_times(seconds, rates):
    forward = lit_hop(wait_s=tuple(seconds[:3]), latency_s=tuple(seconds[3:6]), rate=tuple(rates[:3]))
    backward = lit_hop("backward", 1, tuple(seconds[6:9]), tuple(rates[3:]), tuple(seconds[9:]))
    paths = light_paths((forward, backward))
    rows = simulate(paths.problem(PROBLEM, 0), SCHEDULE).messages
    for row in rows:
        hop = (forward, backward)[row["kind"]]
        path = hop.path(int(row["microbatch"]))
        took_s = path.wait_s + row["bytes"] / path.bandwidth_bytes_per_s + path.latency_s
        assert row["start_s"] == row["ready_s"], "nobody waits for another's light path"
        assert row["arrival_s"] - row["ready_s"] == pytest.approx(took_s)
    assert len(rows) == 6


def test_a_hop_without_light_paths_takes_no_time():
    rows = simulate(light_paths(()).problem(PROBLEM, 0), SCHEDULE).messages
    assert np.array_equal(rows["arrival_s"], rows["ready_s"])


@pytest.mark.parametrize(
    ("hop", "says"),
    [
        ({"stage": 1}, r"steps\[0\].hops\[0\]: stage 1 of 2 sends nothing forward"),
        ({"direction": "backward"}, "stage 0 of 2 sends nothing backward"),
        ({"stage": 9}, "stage 9 of 2"),
        ({"wait_s": (0.0,)}, "wait_s: expected one per microbatch, 3, found 1"),
    ],
)
def test_light_paths_of_another_step_are_refused(hop, says):
    with pytest.raises(InputError, match=says):
        light_paths((lit_hop(**hop),)).expect_fit(PROBLEM)


def test_light_paths_of_another_number_of_microbatches_are_refused():
    other = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=2, num_microbatches=4)
    with pytest.raises(InputError, match="of 2 ranks and 3 microbatches, the run has 2 and 4"):
        light_paths((lit_hop(),)).expect_fit(other)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wait_s": [-1.0, 0.0, 0.0]}, "wait_s"),
        ({"bandwidth_bytes_per_s": [0.0, 1.0, 1.0]}, "bandwidth_bytes_per_s"),
        ({"latency_s": [float("nan"), 0.0, 0.0]}, "latency_s"),
        ({"direction": "up"}, "direction"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_is_wrong_in_a_document_is_named(change, says):
    data = light_paths((lit_hop(),)).to_data()
    data["steps"][0]["hops"][0] |= change
    with pytest.raises(InputError, match=says):
        LightPaths.from_data(data)
