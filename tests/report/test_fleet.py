"""Pictures of a simulated fleet: their bars and their queue against the log of the same fleet."""

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from farpipe.fleet.conformance import SimpleQuotes, random_cluster, random_jobs
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from farpipe.report.fleet import _bars, _queue, draw_fleet


def outcome(seed, policy="bace"):
    draw = random.Random(seed)
    cluster = random_cluster(draw)
    jobs = random_jobs(20, draw)
    return Simulator(first_state(cluster, POLICIES[policy], SimpleQuotes(), StopCosts(restart_s=60.0))).run(jobs)


@pytest.mark.parametrize("policy", ["fcfs", "bace"])
@pytest.mark.parametrize("seed", range(4))
def test_bars_are_what_jobs_held(seed, policy):
    done = outcome(seed, policy)
    drawn, rows = defaultdict(float), defaultdict(list)
    for site, job, first, count, begin_s, end_s, _ in _bars(done):
        assert first >= 0
        assert first + count <= done.num_devices[site]
        assert begin_s <= end_s
        drawn[job] += count * (end_s - begin_s)
        for row in range(first, first + count):
            rows[site, row].append((begin_s, end_s))
    for spans in rows.values():
        spans.sort()
        assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in pairwise(spans)), "one job each"
    held: dict[str, tuple[float, int]] = {}
    expected = defaultdict(float)
    for change in done.changes:
        since_s, number = held.get(change.job, (change.time_s, 0))
        expected[change.job] += number * (change.time_s - since_s)
        held[change.job] = change.time_s, sum(change.devices.values())
    assert sum(expected.values()) > 0
    assert drawn == pytest.approx({job: expected[job] for job in drawn})
    assert sum(drawn.values()) == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize("seed", range(4))
def test_the_queue_is_never_negative_and_ends_empty(seed):
    times_s, levels = _queue(outcome(seed))
    assert times_s == sorted(times_s)
    assert min(levels) == 0 == levels[-1]
    assert max(levels) > 0


@pytest.mark.slow
def test_the_picture_has_a_gantt_and_a_queue_for_every_policy(tmp_path):
    draw_fleet([outcome(0, "fcfs"), outcome(0)], tmp_path / "fleet.svg")
    text = (tmp_path / "fleet.svg").read_text()
    assert text.count('<g id="axes_') == 4
