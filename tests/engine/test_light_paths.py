"""Runs whose messages have light paths of their own."""

import json

import pytest

from attempts import assert_most_of_five_steps
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import Hop, LightPaths, Link, LitHop, LitStep, Problem, Rank, Stage, Transfer
from farpipe.engine.launch.run import run
from farpipe.engine.links.links import LinkShape, OwnPath
from farpipe.engine.run_settings import LinkChange
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport.passages import Passage


def two_ranks(kind=None):
    """Two ranks at two sites, 20 kB messages."""
    link = Link(latency_s=0.005, bandwidth_bytes_per_s=1e7, kind=kind)
    hop = Hop(forward=Transfer(link="a>b", bytes=2e4), backward=Transfer(link="b>a", bytes=2e4))
    stages = tuple(Stage(rank=rank, forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02) for rank in range(2))
    links = {"a>b": link, "b>a": link}
    return Problem(num_microbatches=4, ranks=(Rank(),) * 2, stages=stages, links=links, hops=(hop,))


PROBLEM = two_ranks()
SCHEDULE = order("1f1b", PROBLEM)


def light_paths(schedule=SCHEDULE, scales=(1.0, 3.0)):
    """Steps in which every message has another rate and delay."""

    def hop(direction, stage, scale):
        waits, rates = (0.0, 0.01, 0.0, 0.005), (1e6, 2e6, 4e6, 1e6)
        return LitHop(
            direction=direction,
            stage=stage,
            wait_s=tuple(scale * wait for wait in waits),
            bandwidth_bytes_per_s=rates,
            latency_s=tuple(scale * latency for latency in (0.02, 0.05, 0.01, 0.03)),
        )

    steps = tuple(LitStep(hops=(hop("forward", 0, scale), hop("backward", 1, scale))) for scale in scales)
    return LightPaths(schedule=schedule, steps=steps)


def spec(**settings):
    body = {"problem": PROBLEM, "schedule": SCHEDULE, "sites": ("a", "b"), "num_steps": 4, "device": "sleep"}
    return RunSpec.bare(**(body | {"light_paths": light_paths()} | settings))


def test_a_message_is_on_a_path_of_its_own_from_when_it_waited_enough():
    path = OwnPath(0.5, LinkShape(0.25, 100.0))
    assert path.passage(50, 1_000) == Passage(500_001_000, 1_000_001_000, 1_250_001_000)


def test_only_messages_between_stages_have_light_paths():
    run = spec()
    assert run.own_path("forward", 0, 0, 1) == OwnPath(0.01, LinkShape(0.05, 2e6))
    assert run.own_path("forward", 3, 0, 1).wait_s == pytest.approx(0.03)
    assert run.own_path("sync", 0, 0, 1) is None
    assert spec(light_paths=None).own_path("forward", 0, 0, 1) is None


def test_a_run_over_light_paths_survives_a_round_trip():
    assert RunSpec.from_json(spec().to_json()) == spec()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"emulate_links": False}, "for emulated links"),
        ({"problem": two_ranks("intra-site")}, "at one site"),
        ({"schedule": order("gpipe", PROBLEM)}, "another order"),
    ],
)
def test_light_paths_that_a_run_cannot_take_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        spec(**settings)


@pytest.mark.slow
@pytest.mark.alone
def test_steps_over_light_paths_take_as_long_as_predicted(tmp_path):
    """The median of five steps within 5 % of each one's own; messages within a few ms of their own times."""
    predicted_s = [simulate(light_paths().problem(PROBLEM, step), SCHEDULE).makespan_s for step in range(2)]
    assert predicted_s[1] > 1.2 * predicted_s[0]

    def is_as_predicted(line):
        assert line["predicted_makespan_s"] == predicted_s[line["step"] % 2]
        return abs(line["makespan_s"] / line["predicted_makespan_s"] - 1) < 0.05

    assert_most_of_five_steps(lambda: run(spec(num_steps=6), tmp_path), tmp_path, is_as_predicted)
    for row in Timeline.load(tmp_path / "timeline.json").messages:
        path = spec().own_path(("forward", "backward")[row["kind"]], 0, row["stage"], row["microbatch"])
        assert row["end_s"] - row["start_s"] == pytest.approx(2e4 / path.shape.bandwidth_bytes_per_s, abs=1e-6)


@pytest.mark.slow
def test_links_change_before_their_step(tmp_path):
    changes = tuple(LinkChange(step=3, link=name, latency_s=0.05, bandwidth_bytes_per_s=1e6) for name in PROBLEM.links)
    slower = {change.link: Link(latency_s=0.05, bandwidth_bytes_per_s=1e6) for change in changes}
    run(spec(light_paths=None, num_steps=6, link_changes=changes), tmp_path / "run")
    steps = [json.loads(line)["makespan_s"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (simulate(PROBLEM.over(links, [("a>b", "b>a")]), SCHEDULE).makespan_s for links in ({}, slower))
    assert len(steps) == 6
    assert min(steps[:3]) >= before - 1e-3
    assert min(steps[3:]) >= after - 1e-3 > before * 1.5
