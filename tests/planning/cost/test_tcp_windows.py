"""Messages over plain TCP: slow start after a pause, windows that are too small for the way."""

import math
from dataclasses import replace

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import Job, parse_job
from farpipe.planning.cost import JobCosts, Layout, place_evenly, step_cost
from farpipe.planning.cost.tcp_windows import ColdLink, cold_link

LINK = ColdLink(125e6, 0.1, 8, 2.7e6)
"""1 Gbit/s over 50 ms one way."""
MEASURED = [
    # one way, message, pause, connections: share of the rate that the first and that later messages got
    (0.050, 3e6, 0.05, 8, 0.053, 0.943),
    (0.050, 8e6, 0.05, 1, 0.069, 0.288),
    (0.050, 3e6, 1.00, 8, 0.053, 0.079),
    (0.050, 8e6, 1.00, 8, 0.104, 0.211),
    (0.025, 8e6, 0.15, 1, 0.136, 0.526),
    (0.025, 3e6, 1.00, 1, 0.064, 0.118),
    (0.010, 3e6, 0.15, 1, 0.157, 0.945),
    (0.010, 3e6, 1.00, 8, 0.258, 0.291),
    (0.005, 3e6, 0.05, 8, 0.466, 0.953),
]
"""By benchmarks.transport.single_messages."""


@pytest.mark.parametrize(("latency_s", "num_bytes", "pause_s", "count", "first", "later"), MEASURED)
def test_messages_take_as_long_as_measured_ones(latency_s, num_bytes, pause_s, count, first, later):
    link = replace(LINK, round_trip_s=2 * latency_s, num_streams=count)
    cold_s, window = link.sent(num_bytes, link.first_window_bytes)
    for _ in range(9):
        warm_s, window = link.sent(num_bytes, link.after_pause(window, pause_s + latency_s))

    assert num_bytes / 125e6 / cold_s == pytest.approx(first, rel=0.12)
    assert num_bytes / 125e6 / warm_s == pytest.approx(later, rel=0.12)


def test_a_pause_within_the_timeout_keeps_the_window():
    assert LINK.after_pause(1e6, 0.29) == 1e6
    assert LINK.after_pause(1e6, 0.61) == 2.5e5
    assert LINK.after_pause(1e6, math.inf) == LINK.first_window_bytes == 14_480


def test_only_the_first_messages_of_a_step_wait_for_windows():
    took_s = LINK.messages_s(6e6, 16, 0.2, 3.0)

    assert len(took_s) == 16
    assert took_s[0] > took_s[1] > took_s[-1] == pytest.approx(6e6 / 125e6)


def test_larger_packets_and_more_connections_start_faster():
    slow_s, jumbo_s, more_s = (
        link.messages_s(6e6, 1, math.inf, math.inf)[0]
        for link in (LINK, replace(LINK, mtu_bytes=9001), replace(LINK, num_streams=16))
    )
    assert jumbo_s < slow_s
    assert more_s < slow_s


TWO = """
[model]
preset = "llama-2-7b"
[training]
sequence_length = 2048
global_batch = 16
[cluster]
sites = [{{ name = "a", device = "h100-sxm", num_devices = 8 }}, {{ name = "b", device = "h100-sxm", num_devices = 8 }}]
links = [{{ between = ["a", "b"], latency = "50 ms", bandwidth = "1 Gbit/s"{more} }}]
"""


def _job(more: str) -> Job:
    return parse_job(TWO.format(more=more))


def test_a_link_says_that_its_connections_start_slowly():
    plain, warm = _job(", slow_start = true, streams = 16, mtu = 9001").cluster, _job("").cluster

    assert cold_link(warm, warm.links[0], 1) is None
    assert cold_link(plain, plain.links[0], 2) == ColdLink(125e6, 0.1, 32, 2.7e6, 9001)
    assert plain.links[0].bandwidth_bytes_per_s == 125e6  # windows are counted for each message
    with pytest.raises(InputError, match='"rdma" has no slow_start'):
        _job(', slow_start = true, kind = "rdma"')
    with pytest.raises(InputError, match=r"links\[0\].mtu: packets are counted with slow_start = true only"):
        _job(", mtu = 9001")


def test_a_step_over_cold_connections_takes_longer_than_over_warm_ones():
    def step_s(more: str) -> float:
        job, layout = _job(more), Layout(2, 1, 8, 1, 1, 16)
        step = step_cost(JobCosts(job.model, job.training), layout, place_evenly(["a", "b"], [16, 16]), job.cluster)
        return simulate(step.problem, order("1f1b", step.problem)).makespan_s

    assert step_s(", slow_start = true") > step_s(", slow_start = true, streams = 16") > step_s("") * 1.01


@pytest.mark.parametrize("batch", [64, 4096])
def test_jobs_over_cold_connections_are_planned(batch):
    text = TWO.format(more=", slow_start = true").replace("global_batch = 16", f"global_batch = {batch}")
    pins = '[layout]\nsites = ["a", "b"]\npipeline = 2\ndata = 4\ntensor = 2\nreplicas = "inside"\n'
    plan = planning.plan(parse_job(f"{text}{pins}num_microbatches = {batch // 4}"))

    assert len(plan.problem.hops[0].forward.occupies_s) == batch // 4
