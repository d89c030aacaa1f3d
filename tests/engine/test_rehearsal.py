"""Plans and runs agree: rehearsed steps over the emulated WAN take as long as predicted."""

import pytest

from attempts import assert_most_of_five_steps
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.launch.run import run
from farpipe.engine.run_spec import RunSpec

pytestmark = [pytest.mark.slow, pytest.mark.alone]


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
    """The median of five steps is within 5 %; where others keep the machine busy, nothing can be concluded."""
    problem = two_sites()
    schedule = order(method, problem)
    predicted = simulate(problem, schedule)
    spec = RunSpec.bare(problem=problem, schedule=schedule, sites=("a", "a", "b", "b"), num_steps=8, device="sleep")
    start = lambda: run(spec, tmp_path)  # noqa: E731
    assert_most_of_five_steps(start, tmp_path, lambda step: is_as_predicted(step, predicted))


def is_as_predicted(step, predicted):
    """True if step time and exposed times are within 5 % of the step; never faster than the links allow."""
    assert step["makespan_s"] > 0.99 * predicted.makespan_s
    tolerance = 0.05 * predicted.makespan_s
    inter_site_s, intra_site_s = predicted.exposed_s.mean(axis=0)
    return (
        abs(step["makespan_s"] - predicted.makespan_s) <= tolerance
        and abs(step["exposed_inter_site_s"] - inter_site_s) <= tolerance
        and abs(step["exposed_intra_site_s"] - intra_site_s) <= tolerance
    )
