"""The simulator against closed forms, and its event log against its own sums."""

import io
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from farpipe.core.spec import Cluster, Prices, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import Price, PriceChanged
from farpipe.fleet.job import FleetJob, JobPlacement, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import RATE_STEP, PlannerQuotes, StopCosts
from farpipe.fleet.requests import request_of
from farpipe.fleet.simulator import Failures, Simulator
from farpipe.fleet.state import first_state
from farpipe.planning.planner.quotes import Planner
from farpipe.testing.policies import SimpleQuotes, random_cluster, random_events, random_jobs

KIND = Kind("llama-3-8b", 512, 64)
NO_STOPS = StopCosts(restart_s=0.0)


class OneSecond(SimpleQuotes):
    """A step is a second on any devices."""

    def placement(self, kind, devices, rates):
        return JobPlacement(devices, 1.0, {}, {site: 400.0 * number for site, number in devices})


def erlang_c_wait_s(servers, arrival_per_s, service_s):
    """Mean wait in M/M/c (Erlang, 1917)."""
    load = arrival_per_s * service_s
    rho = load / servers
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - rho)
    return last / (sum(terms) + last) * service_s / (servers * (1 - rho))


@pytest.mark.slow
def test_m_m_c_waits_as_erlang_says():
    """Jobs of one device each on 8 devices: the mean of 8 runs within three standard errors of the closed form."""
    servers, service_s, rho, means = 8, 50_000.0, 0.85, []
    site = preset_site("only", "a100-80gb", servers)
    for seed in range(8):
        draw, now, jobs = random.Random(seed), 0.0, []
        for index in range(1000):
            now += draw.expovariate(servers * rho / service_s)
            steps = max(1, round(draw.expovariate(1 / service_s)))
            jobs.append(FleetJob(f"j{index}", KIND, now, steps, 1, 1))
        state = first_state(Cluster(sites=(site,)), POLICIES["fcfs"], OneSecond(), NO_STOPS)
        records = Simulator(state).run(jobs, tick_s=0.0).records
        waits = [record.final.first_start_s - record.job.submit_s for record in records]
        means.append(sum(waits[200:]) / len(waits[200:]))
    mean = sum(means) / len(means)
    error = (sum((m - mean) ** 2 for m in means) / len(means) / (len(means) - 1)) ** 0.5
    assert abs(mean - erlang_c_wait_s(servers, servers * rho / service_s, service_s)) < 3 * error


def test_a_single_jobs_bill_is_its_closed_form():
    prices = Prices(rent_usd_per_device_hour=2.0, pue=1.2, electricity_usd_per_mwh=50.0, carbon_g_per_kwh=300.0)
    site = preset_site("only", "a100-80gb", 8).model_copy(update={"prices": prices})
    state = first_state(Cluster(sites=(site,)), POLICIES["fcfs"], OneSecond(), NO_STOPS)
    changes = [PriceChanged(1800.0, {"only": Price(-10.0, 100.0)})]
    outcome = Simulator(state, idle_power={"only": 60.0}).run([FleetJob("j", KIND, 0.0, 3600, 4, 4)], changes)
    (record,) = outcome.records
    spent = record.final.spent
    kwh = 4 * 0.4 * 1.2
    assert record.jct_s == pytest.approx(3600)
    assert spent.energy_kwh["only"] == pytest.approx(kwh)
    assert spent.electricity_usd["only"] == pytest.approx(kwh / 1000 * (50 - 10) / 2)
    assert spent.carbon_g["only"] == pytest.approx(kwh * (300 + 100) / 2)
    assert spent.rent_usd["only"] == pytest.approx(4 * 2.0)
    assert outcome.idle_energy_kwh["only"] == pytest.approx(4 * 0.06 * 1.2)
    assert outcome.utilization == pytest.approx(0.5)


@pytest.mark.parametrize("copy_every_s", [0.0, 36000.0])
@pytest.mark.parametrize("policy", ["bace", "srtf", "farpipe"])
def test_everything_can_be_computed_anew_from_the_event_log(policy, copy_every_s):
    draw, log = random.Random(7), io.StringIO()
    cluster, jobs, events = random_cluster(draw), random_jobs(40, draw), random_events(draw)
    stops = StopCosts(copy_every_s=copy_every_s)
    state = first_state(cluster, POLICIES[policy], SimpleQuotes(), stops)
    outcome = Simulator(state, Failures(device_hours=300.0, seed=1), log=log).run(jobs, events)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    device_s, power_j, sent, since = 0.0, {}, {}, {}
    for line in lines:
        before = since.get(line["job"])
        if before:
            seconds = line["time_s"] - before["time_s"]
            device_s += seconds * sum(before["devices"].values())
            for site, watts in before["power_w"].items():
                power_j[site] = power_j.get(site, 0.0) + watts * seconds
            for link, rate in before["sent_bytes_per_s"].items():
                sent[link] = sent.get(link, 0.0) + rate * seconds
        since[line["job"]] = line
    spent = outcome.spent
    assert device_s == pytest.approx(sum(spent.device_s.values()))
    for site, joules in power_j.items():
        assert joules / 3.6e6 * cluster.site(site).prices.pue == pytest.approx(spent.energy_kwh[site])
    assert {link: num for link, num in sent.items() if num} == pytest.approx(
        {link: num for link, num in spent.sent_bytes.items() if num}
    )
    assert outcome.num_refused == 0


def log_of_a_random_fleet():
    draw, log = random.Random(3), io.StringIO()
    cluster, jobs, events = random_cluster(draw), random_jobs(40, draw), random_events(draw)
    state = first_state(cluster, POLICIES["farpipe"], SimpleQuotes())
    Simulator(state, Failures(device_hours=100.0, final_share=0.2, seed=5), log=log).run(jobs, events)
    return log.getvalue()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_fleet_in_every_process():
    """Sets of strings have another order in every process."""
    program = "from test_simulator import *; print(log_of_a_random_fleet(), end='')"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert found.stdout == log_of_a_random_fleet()


def test_an_empty_trace_is_an_empty_outcome():
    state = first_state(random_cluster(random.Random(0)), POLICIES["fcfs"], SimpleQuotes())
    data = Simulator(state).run([]).to_data()
    assert data["mean_jct_s"] is None
    assert data["jobs"] == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"min_devices": 64, "max_devices": 64}, "min_devices 64 is more than the 24 devices of all sites; ask for 16"),
        (
            {"min_devices": 20, "max_devices": 64},
            "20 is more than a pipeline over linked sites can have; ask for 16",
        ),
        ({"kind": Kind("llama-3-70b", 512, 64)}, "does not fit 4 devices of any site; max_devices 16 would do"),
        ({"kind": Kind("llama-3-405b", 512, 64)}, "it needs devices with more memory"),
    ],
)
def test_an_impossible_job_is_refused_at_submission_with_what_would_help(change, why):
    """Two sites of 16 and 8 devices without a link."""
    log, sites = io.StringIO(), tuple(preset_site(f"s{n}", "a100-80gb", n) for n in (16, 8))
    cluster = Cluster(sites=sites)
    state = first_state(cluster, POLICIES["fcfs"], PlannerQuotes(cluster))
    job = replace(FleetJob("giant", Kind("llama-3-8b", 512, 64), 0.0, 10, 4, 4), **change)
    data = Simulator(state, log=log).run([job]).to_data()
    refused = [json.loads(line) for line in log.getvalue().splitlines()][-1]
    assert refused["event"] == "refuse"
    assert why in refused["why"]
    assert data["jobs"][0]["refused"] == refused["why"]


def test_what_a_policy_asks_for_and_does_not_get_is_in_the_event_log():
    class Failing:
        name = "failing"

        def decide(self, view):
            if view.now_s < 100.0:
                raise ZeroDivisionError("no luck")
            return POLICIES["fcfs"].decide(view)

    log = io.StringIO()
    state = first_state(random_cluster(random.Random(0)), Failing(), SimpleQuotes())
    outcome = Simulator(state, log=log).run([FleetJob("j", KIND, 0.0, 10, 4, 4)], tick_s=60.0)
    rejects = [line for line in map(json.loads, log.getvalue().splitlines()) if line["event"] == "reject"]
    assert "failing failed: ZeroDivisionError: no luck" in rejects[0]["why"]
    assert outcome.num_refused == len(rejects) > 0
    assert outcome.records[0].finished_s is not None, "the next decision counts"


def test_a_hop_between_sites_is_quoted_by_the_planner_on_just_its_devices_and_links():
    """Beside Planner.quote itself; the closed form, which keeps the layout of one site, is never faster."""
    sites = tuple(preset_site(name, "a100-80gb", 32) for name in "abc")
    pairs = [(a, b) for a in "abc" for b in "abc" if a != b]
    links = tuple(SiteLink(source=a, target=b, latency_s=0.02, bandwidth_bytes_per_s=4e9) for a, b in pairs)
    cluster, kind = Cluster(sites=sites, links=links), Kind("llama-2-13b", 4096, 512)
    devices, rates = (("a", 16), ("b", 16)), {"a>b": 1e9, "b>a": 1e9, "a>c": 9e9}
    planned = PlannerQuotes(cluster).placement(kind, devices, rates)
    formula = PlannerQuotes(cluster, hop_quotes="closed-form").placement(kind, devices, rates)
    rate = RATE_STEP ** math.ceil(math.log(1e9) / math.log(RATE_STEP))
    only = {"c": 0, "a": 16, "b": 16}, {link.name: rate if "c" not in link.name else 0.0 for link in links}
    quote = Planner().quote(request_of(kind), cluster, devices=only[0], bytes_per_s=only[1])
    assert planned.step_s == quote.step_s <= formula.step_s
    assert planned.link_bytes_per_s == pytest.approx(dict(quote.link_bytes_per_s))
    assert max(planned.link_bytes_per_s.values()) <= rate, "no link is reserved beyond its rate"
    assert PlannerQuotes(cluster).placement(kind, devices, {"a>b": 1e9}) is None


def test_sites_that_are_alike_share_the_planners_quotes():
    """Whatever their names, prices and order are; a site with another link is asked about anew."""
    sites = tuple(preset_site(name, "a100-80gb", 32) for name in "abcd")
    pairs = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    latency_s = {pair: 0.05 if "d" in pair else 0.02 for pair in pairs}
    links = tuple(SiteLink(source=a, target=b, latency_s=latency_s[a, b], bandwidth_bytes_per_s=4e9) for a, b in pairs)
    asked = []

    class Counted(Planner):
        def quote(self, *args, **kwargs):
            asked.append(kwargs["devices"])
            return super().quote(*args, **kwargs)

    quotes = PlannerQuotes(Cluster(sites=sites, links=links), Counted())

    def step_s(one, other):
        devices, rates = ((one, 16), (other, 16)), {f"{one}>{other}": 1e9, f"{other}>{one}": 1e9}
        placement = quotes.placement(Kind("llama-2-13b", 4096, 512), devices, rates)
        assert placement.devices == devices
        assert set(placement.link_bytes_per_s) == set(rates)
        return placement.step_s

    assert step_s("a", "b") == step_s("c", "a") == step_s("b", "c")
    assert len(asked) == 1
    assert step_s("a", "d") > step_s("a", "b")
    assert len(asked) == 2


def test_a_failed_job_that_goes_on_is_in_the_queue_in_the_log():
    log = io.StringIO()
    draw = random.Random(4)
    state = first_state(random_cluster(draw), POLICIES["easy"], SimpleQuotes())
    Simulator(state, Failures(device_hours=50.0, final_share=0.2), log=log).run(random_jobs(30, draw))
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    fails = [index for index, line in enumerate(lines) if line["event"] == "fail"]
    later = [{line["job"] for line in lines[index + 1 :]} for index in fails]
    found = [(lines[index]["phase"], lines[index]["job"] in names) for index, names in zip(fails, later, strict=True)]
    assert {("queued", True), ("ended", False)} == set(found)


def test_a_fleet_that_is_under_way_goes_on_and_what_is_overdue_happens_at_once():
    """Four jobs for one place, 100 s each: played from any moment on, they end as in the whole simulation."""
    state = first_state(
        Cluster(sites=(preset_site("only", "a100-80gb", 8),)), POLICIES["fcfs"], OneSecond(), StopCosts(restart_s=7.0)
    )
    seen = []
    jobs = [FleetJob(f"j{k}", KIND, float(k), 100, 8, 8) for k in range(4)]
    whole = Simulator(state, after=lambda now, _: seen.append(now)).run(jobs, tick_s=0.0)
    ends = {one.job.name: one.finished_s for one in whole.records}
    middle = next(
        now for now in seen if len(now.jobs) == 2 and any(job.phase == "running" for job in now.jobs.values())
    )
    for late_s in (0.0, 30.0):
        later = replace(middle, now_s=middle.now_s + late_s)
        assert {one.job.name: one.finished_s for one in Simulator(later).run([]).records} == pytest.approx(
            {name: ends[name] for name in middle.jobs}
        )
    overdue = replace(middle, now_s=ends["j2"] + 50.0)
    assert next(iter(Simulator(overdue).run([]).records)).finished_s == ends["j2"] + 50.0
