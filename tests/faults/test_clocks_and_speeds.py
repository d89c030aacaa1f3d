"""Clocks that differ by seconds, and a rank three times as slow: measured as it is, and nothing else changes."""

import pytest

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.run_spec import RunSpec
from trainings import equal_states, losses, state

pytestmark = pytest.mark.slow

SKEWS_NS = [0, 7_000_000_000, -3_000_000_000, 3600_000_000_000]


def test_clocks_that_differ_by_seconds_and_an_hour_change_neither_the_training_nor_what_is_measured(
    make, undisturbed, program, tmp_path
):
    spec = make(2)
    run(spec, tmp_path / "run", rank_program=program(skews=SKEWS_NS))
    expected_losses, expected_state = undisturbed(2)
    assert losses(tmp_path / "run") == expected_losses
    assert equal_states(state(tmp_path / "run", spec), expected_state)
    timeline = Timeline.load(tmp_path / "run" / "timeline.json")
    assert 0 < timeline.makespan_s < 2.5, "the clocks' difference is not in it"
    assert (timeline.messages["arrival_s"] - timeline.messages["end_s"]).min() > -0.5


def step_of_two(slowness):
    """Two ranks at two sites, the second so many times as slow."""
    stages = tuple(
        Stage(rank=rank, forward_s=0.01 * f, input_grad_s=0.01 * f, weight_grad_s=0.01 * f)
        for rank, f in enumerate((1, slowness))
    )
    link = Link(latency_s=0.005, bandwidth_bytes_per_s=12.5e6)
    hop = Hop(forward=Transfer(link="a>b", bytes=50_000), backward=Transfer(link="b>a", bytes=50_000))
    links = {"a>b": link, "b>a": link}
    return Problem(num_microbatches=4, ranks=(Rank(),) * 2, stages=stages, links=links, hops=(hop,))


@pytest.mark.alone
def test_a_rank_three_times_as_slow_makes_the_step_as_slow_as_the_simulator_says(program, tmp_path):
    problem = step_of_two(slowness=1)
    schedule = order("1f1b", problem)
    settings = {"sites": ("a", "b"), "num_steps": 8, "device": "sleep", "transport": TransportSettings(timeout_s=5)}
    spec = RunSpec.bare(problem=problem, schedule=schedule, **settings)
    measured_s = run(spec, tmp_path / "run", rank_program=program(slow=1)).makespan_s
    usual_s, slow_s = (simulate(step_of_two(slowness), schedule).makespan_s for slowness in (1, 3))
    assert slow_s * 0.99 < measured_s < slow_s * 1.4
    assert measured_s > 1.8 * usual_s
