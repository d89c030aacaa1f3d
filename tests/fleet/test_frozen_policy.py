"""Figures of the policies that stay as they are: a constant that is changed, on purpose or not, changes one of them."""

import random
from dataclasses import replace
from functools import partial
from math import pi, sin

import pytest

from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import Price, PriceChanged
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import farpipe_policy, places, policy_of
from farpipe.fleet.policies.draft import DecisionDraft
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.orders import bace_priority
from farpipe.fleet.policies.queueing import QueuePolicy
from farpipe.fleet.policies.worth import Objective
from farpipe.fleet.simulator import Failures, Simulator
from farpipe.fleet.state import first_state
from farpipe.testing.policies import SimpleQuotes, random_cluster, random_events, random_jobs

HOUR_S = 3600.0
SITES = ("amber", "birch", "cedar")


def cluster(rate):
    """Three sites, all linked."""
    sites = tuple(preset_site(name, "a100-80gb", 32) for name in SITES)
    ends = [(a, b) for a in SITES for b in SITES if a != b]
    links = [SiteLink(source=a, target=b, latency_s=0.03, bandwidth_bytes_per_s=rate) for a, b in ends]
    return Cluster(sites=sites, links=tuple(links))


def trace(gap_s, mean_steps, num_jobs=100):
    """Jobs of 1 to 64 devices, a quarter of them with a deadline."""
    draw, now_s, jobs = random.Random(7), 0.0, []
    for index in range(num_jobs):
        now_s += draw.expovariate(1 / gap_s)
        kind = Kind("llama-3-8b", 512, draw.choice([64, 256]))
        least, steps = draw.choice([1, 4, 8, 16, 40]), round(mean_steps * draw.lognormvariate(0, 1)) + 1
        most = least * draw.choice([1, 2])
        run_s = steps * kind.global_batch / most**0.9
        deadline_s = now_s + draw.uniform(1.1, 3) * run_s + HOUR_S if draw.random() < 0.25 else None
        jobs.append(FleetJob(f"job{index}", kind, now_s, steps, least, most, deadline_s=deadline_s))
    return jobs


def prices():
    """Ten days of prices with their dear hours at other times of the day, and noise."""
    draw = random.Random(3)
    for hour in range(240):
        costs = {
            site: Price(60 + 55 * sin((hour + 3 * k) * pi / 12) + draw.uniform(-5, 5), 0.0)
            for k, site in enumerate(SITES)
        }
        yield PriceChanged(hour * HOUR_S, costs)


def calm():
    """Long jobs that leave half of the devices free, so that prices decide where they run and when."""
    kind = Kind("llama-3-8b", 512, 64)
    narrow = [FleetJob(f"narrow{k}", kind, 0.0, 3_000, 1, 1) for k in range(24)]
    return narrow + [FleetJob(f"wide{k}", kind, (27 + 24 * k) * HOUR_S, 20_000, 32, 32) for k in range(4)]


def patient():
    """A job that needs all sites behind shorter ones that never end."""
    kind = Kind("llama-3-8b", 512, 64)
    short = [FleetJob(f"short{day}", kind, day * 24 * HOUR_S + 60, 80_000, 32, 32) for day in range(60)]
    return [FleetJob("long", kind, 0.0, 10**6, 96, 96), *short]


CASES = {
    "busy": (trace(0.25 * HOUR_S, 1200), 1e7),
    "well linked": (trace(0.25 * HOUR_S, 1200), 1e12),
    "calm": (calm(), 1e12),
    "patient": (patient(), 1e7),
}
"""Jobs, and bytes/s of the links."""


def figures(policy, case):
    """Mean JCT in s, USD, moves, preemptions."""
    jobs, rate = CASES[case]
    data = Simulator(first_state(cluster(rate), policy, SimpleQuotes())).run(jobs, prices()).to_data()
    return data["mean_jct_s"], data["total_usd"], data["num_moves"], data["num_preemptions"]


FROZEN = {  # by policy and case, as `figures` lists them
    ("farpipe", "busy"): (170371.051576797, 280.57947640676474, 13, 29),
    ("farpipe", "well linked"): (103599.7917590521, 202.2614777279042, 48, 126),
    ("farpipe", "calm"): (172812.54721356058, 57.72529929314456, 9, 0),
    ("farpipe", "patient"): (737460.9293, 4784.549928091412, 0, 3),
    ("bace", "busy"): (121474.51224283226, 209.81976582890232, 0, 0),
    ("bace", "calm"): (172772.6489, 80.67124058, 0, 0),
    ("bace", "patient"): (883504.9067, 4728.25724105, 0, 0),
    ("srtf", "busy"): (137148.1545, 261.10398745, 0, 42),
    ("srtf", "calm"): (172772.6489, 80.73997184, 0, 0),
    ("srtf", "patient"): (327216.0009, 4807.4811875, 0, 1),
    ("easy", "busy"): (122308.1517, 212.54414438, 0, 0),
    ("easy", "calm"): (172772.6489, 80.73997184, 0, 0),
    ("easy", "patient"): (883504.9067, 4728.25724105, 0, 0),
}


@pytest.mark.parametrize(("name", "case"), FROZEN)
def test_figures_of_policies_stay(name, case):
    assert figures(policy_of(name), case) == pytest.approx(FROZEN[name, case], rel=1e-9)


PARAMETERS = [
    ("hour_value", 2.0, "busy"),
    ("factor", 2.0, "well linked"),
    ("max_queued_s", 20 * 24 * HOUR_S, "patient"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "case"), PARAMETERS)
def test_another_parameter_of_the_default_policy_shows_in_its_figures(name, value, case):
    assert figures(FarpipePolicy(**{name: value}), case) != pytest.approx(FROZEN["farpipe", case], rel=1e-6)


@pytest.mark.slow
def test_moves_at_one_event_show_in_the_figures_of_a_policy_that_saves_money():
    thrifty = FarpipePolicy(hour_value=8.0)
    assert figures(replace(thrifty, moves_per_event=1), "calm") != pytest.approx(figures(thrifty, "calm"), rel=1e-6)


CONSTANTS = [
    (farpipe_policy, "DEADLINE_S", 1800.0, "busy"),
    (farpipe_policy, "DEADLINE_SHARE", 0.5, "busy"),
    (farpipe_policy, "STOP_SHARE", 5.0, "well linked"),
    (farpipe_policy, "LOOKED_AT", 8, "busy"),
    (farpipe_policy, "MIN_RUN_S", 900.0, "busy"),
    (farpipe_policy, "REVIEW_S", 1800.0, "busy"),
    (farpipe_policy, "WIDTH_POWER", 1.0, "busy"),
    (places, "QUANTUM", 4, "busy"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name", "value", "case"), CONSTANTS)
def test_another_constant_of_the_default_policy_shows_in_its_figures(monkeypatch, module, name, value, case):
    monkeypatch.setattr(module, name, value)
    assert figures(policy_of("farpipe"), case) != pytest.approx(FROZEN["farpipe", case], rel=1e-6)


def test_another_horizon_shows_in_the_figures_of_the_default_policy(monkeypatch):
    monkeypatch.setattr(farpipe_policy, "Objective", partial(Objective, horizon_s=2 * HOUR_S))
    assert figures(policy_of("farpipe"), "calm") != pytest.approx(FROZEN["farpipe", "calm"], rel=1e-6)


def test_another_ageing_of_bace_shows_in_its_figures():
    policy = QueuePolicy("bace", partial(bace_priority, ageing_s=7 * 24 * HOUR_S), places.bace)
    assert figures(policy, "busy") != pytest.approx(FROZEN["bace", "busy"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["busy", "well linked", "calm"])
def test_running_jobs_that_are_not_looked_at_in_full_would_not_have_moved(monkeypatch, case):
    thrifty = FarpipePolicy(hour_value=8.0)
    expected = figures(thrifty, case)
    monkeypatch.setattr(farpipe_policy, "_may_repay", lambda *args: True)
    monkeypatch.setattr(DecisionDraft, "may_cross", lambda *args: True)
    assert figures(thrifty, case) == expected


def random_fleets():
    """States of all jobs in random fleets whose links, sites and prices change and whose jobs fail."""
    found = []
    for seed in range(6):
        draw = random.Random(seed)
        jobs = random_jobs(30, draw)
        state = first_state(random_cluster(draw), FarpipePolicy(hour_value=1.0), SimpleQuotes())
        outcome = Simulator(state, Failures(device_hours=200.0, seed=seed)).run(jobs, random_events(draw))
        found.append([(record.states, record.final) for record in outcome.records])
    return found


@pytest.mark.slow
def test_running_jobs_that_are_not_looked_at_anew_would_not_have_moved_in_random_fleets(monkeypatch):
    expected = random_fleets()
    monkeypatch.setattr(farpipe_policy, "_may_repay", lambda *args: True)
    assert random_fleets() == expected
    assert sum(final.num_moves for fleet in expected for _, final in fleet) > 20
