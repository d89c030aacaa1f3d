"""What is taken can be started, and what can't be is refused with what would help."""

import random
from dataclasses import replace

import pytest

from benchmarks.fleet.baselines import COMPARED
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.event_effects import why_refused
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.simulator import Failures, Simulator
from farpipe.fleet.state import first_state
from farpipe.testing.policies import SimpleQuotes

KIND = Kind("llama-3-8b", 512, 64)


def fleet_of(sizes, pairs, rate=1e9):
    sites = tuple(preset_site(f"s{index}", "a100-80gb", number) for index, number in enumerate(sizes))
    both = [pair for a, b in pairs for pair in ((a, b), (b, a))]
    links = [SiteLink(source=f"s{a}", target=f"s{b}", latency_s=0.01, bandwidth_bytes_per_s=rate) for a, b in both]
    return Cluster(sites=sites, links=tuple(links))


def mesh(number):
    return [(a, b) for a in range(number) for b in range(a + 1, number)]


def job(name, least, most=None, steps=10):
    return FleetJob(name, KIND, 0.0, steps, least, most or least)


def simulated(policy, cluster, jobs, *, stops=None, **options):
    return Simulator(first_state(cluster, COMPARED[policy], SimpleQuotes(), stops), **options).run(jobs)


@pytest.mark.parametrize("policy", ["easy", "srtf", "bace", "atlas", "cr-ldf", "farpipe"])
def test_a_job_wider_than_three_sites_is_started_and_blocks_nobody(policy):
    jobs = [job("wide", 32), *(job(f"narrow{index}", 8) for index in range(4))]
    outcome = simulated(policy, fleet_of([8] * 5, mesh(5)), jobs)
    assert [record.finished_s is not None for record in outcome.records] == [True] * 5


@pytest.mark.parametrize("seed", range(40))
def test_every_job_that_is_taken_starts_in_an_empty_fleet(seed):
    """Any sizes of sites, any links, most of them too thin."""
    draw = random.Random(seed)
    number = draw.randint(1, 7)
    pairs = [pair for pair in mesh(number) if draw.random() < 0.5]
    cluster = fleet_of([draw.choice([4, 8, 12, 16, 64]) for _ in range(number)], pairs, draw.choice([1e3, 1e9]))
    least = draw.choice([1, 4, 12, 16, 20, 32, 64, 96, 128])
    asked = job("only", least, least * draw.choice([1, 2]))
    state = first_state(cluster, POLICIES["farpipe"], SimpleQuotes())
    (record,) = simulated("farpipe", cluster, [asked]).records
    assert (record.finished_s is None) == bool(why_refused(state, asked)) == bool(record.refused)


def test_a_job_over_sites_that_no_one_path_joins_is_refused():
    """A hub with four leaves: a pipeline over three of them at most."""
    state = first_state(fleet_of([8] * 5, [(0, 1), (0, 2), (0, 3), (0, 4)]), POLICIES["farpipe"], SimpleQuotes())
    assert why_refused(state, job("wide", 24)) == ""
    why = why_refused(state, job("wide", 32))
    assert "min_devices 32 is more than a pipeline over linked sites can have; ask for 24 at most" in why
    assert why.endswith("every site of it gives at least 8 devices")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "easy", "single-region"])
def test_what_a_policy_never_starts_is_named_waits_and_blocks_nobody(policy):
    """On links that stall every pipeline."""
    jobs = [job("wide", 16), job("narrow", 8)]
    outcome = simulated(policy, fleet_of([8, 8], [(0, 1)], rate=1.0), jobs, idle_power={"s0": 60.0, "s1": 60.0})
    data = outcome.to_data()
    wide, narrow = data["jobs"]
    assert narrow["finished_s"] == data["span_s"] < 3600
    assert f"{policy} starts it nowhere, even were it alone: its 16 devices are more than the 8" in wide["unfinished"]
    assert data["max_wait_s"] == wide["queued_s"] > 59 * 86400
    assert sum(outcome.idle_energy_kwh.values()) == pytest.approx(0.06 * 8 * data["span_s"] / 3600)


def test_a_job_behind_another_is_told_so():
    class Last:
        name = "last"

        def decide(self, view):
            return [] if not view.now_s or len(view.queue) > 1 else POLICIES["fcfs"].decide(view)

    state = first_state(fleet_of([8], []), Last(), SimpleQuotes())
    records = Simulator(state).run([job("a", 8), job("b", 8)]).records
    assert records[0].unfinished == "last keeps it waiting for others; were it alone it would start"


def test_a_job_that_faults_never_let_come_further_is_given_up():
    """With a restart after every microsecond of work; the fleet before its first job idles for nobody."""
    asked = replace(job("only", 8), submit_s=1e6)
    outcome = simulated(
        "fcfs",
        fleet_of([8], []),
        [asked],
        failures=Failures(device_hours=1e-9),
        idle_power={"s0": 60.0},
        stops=StopCosts(first_pause_s=0.0),
    )
    (record,) = outcome.records
    assert record.unfinished == "given up at 0% of its steps after 1,000 failures in a row"
    assert outcome.utilization == pytest.approx(1.0)
    assert sum(outcome.idle_energy_kwh.values()) == pytest.approx(0.0)
