"""What is planned is what is run: rehearsed steps over the emulated WAN take as long as predicted."""

import pytest

from farpipe.problem import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.runtime.run import run
from farpipe.runtime.run_spec import RunSpec
from farpipe.schedule.library import order
from farpipe.simulate import simulate

pytestmark = pytest.mark.slow


def two_sites(num_microbatches=16, forward_s=0.020, latency_s=0.020, mbit_per_s=200):
    """Four ranks, two per site, 0.5 MB messages; backward takes twice as long as forward."""
    rate = mbit_per_s * 1e6 / 8
    links = {name: Link(latency_s=latency_s, bandwidth_bytes_per_s=rate) for name in ("a>b", "b>a")}
    wan = Hop(forward=Transfer(link="a>b", bytes=5e5), backward=Transfer(link="b>a", bytes=5e5))
    stages = [Stage(rank=r, forward_s=forward_s, input_grad_s=forward_s, weight_grad_s=forward_s) for r in range(4)]
    hops = (None, wan, None)
    return Problem(num_microbatches=num_microbatches, ranks=(Rank(),) * 4, stages=tuple(stages), links=links, hops=hops)


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "eager"])
def test_measured_step_time_is_the_predicted_one(method, tmp_path):
    problem = two_sites()
    schedule = order(method, problem)
    predicted = simulate(problem, schedule)
    spec = RunSpec(problem=problem, schedule=schedule, sites=("a", "a", "b", "b"), num_steps=6, device="sleep")
    summary = run(spec, tmp_path)
    assert summary.makespan_s == pytest.approx(predicted.makespan_s, rel=0.05)
    inter_site_s, intra_site_s = predicted.exposed_s.mean(axis=0)
    assert summary.exposed_inter_site_s == pytest.approx(inter_site_s, abs=0.05 * predicted.makespan_s)
    assert summary.exposed_intra_site_s == pytest.approx(intra_site_s, abs=0.05 * predicted.makespan_s)
