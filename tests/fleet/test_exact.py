"""The exact place against every place that there is, and CP-SAT against enumeration."""

import random
from itertools import permutations, product

import pytest

from benchmarks.fleet.baselines import cost_first
from benchmarks.fleet.exact_place import ORACLE, _alone, ask, enumerated, exact, solved
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import JobSubmitted, Price, PriceChanged
from farpipe.fleet.job import FleetJob, JobState, Kind
from farpipe.fleet.policies import POLICIES, places
from farpipe.fleet.policies.places import is_stall_free
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.state import first_state
from farpipe.testing.policies import SimpleQuotes

KIND = Kind("llama-3-8b", 512, 64)


def fleet(seed, num_sites, quotes=None):
    """Sites, links and prices drawn at random; about half of the links would stall a job of 16 devices."""
    draw = random.Random(seed)
    names = [f"s{index}" for index in range(num_sites)]
    sites = tuple(preset_site(name, "a100-80gb", 4 * draw.randint(1, 6)) for name in names)
    pairs = [(a, b) for a in names for b in names if a != b]
    rate = SimpleQuotes().needed_rate(KIND, 16)
    links = [
        SiteLink(source=a, target=b, latency_s=draw.uniform(0, 0.2), bandwidth_bytes_per_s=rate * draw.uniform(0.7, 3))
        for a, b in pairs
    ]
    cluster = Cluster(sites=sites, links=tuple(links))
    state = first_state(cluster, POLICIES["fcfs"], quotes(cluster) if quotes else SimpleQuotes())
    prices = {name: Price(draw.uniform(5, 100), 0.0) for name in names}
    return View(state.handle(PriceChanged(0.0, prices))[0])


def queued(num_devices, kind=KIND):
    return JobState(FleetJob("job", kind, 0.0, 100, num_devices, num_devices))


def every_place(view, job, num_devices, unit):
    """All of them, by brute force."""
    space = view.space()
    for count in range(1, len(space.devices) + 1):
        for path in permutations(sorted(space.devices), count):
            for shares in product(range(unit, num_devices + 1, unit), repeat=count):
                devices = tuple(zip(path, shares, strict=True))
                if sum(shares) == num_devices and space.has(devices) and is_stall_free(view, space, job, devices):
                    yield view.start(space, job, devices)


@pytest.mark.parametrize("seed", range(12))
def test_no_place_is_cheaper_than_the_exact_one(seed):
    view, job, number = fleet(seed, 4), queued(16), 16
    found = exact(view, view.space(), job, number)
    costs = [places.electricity_usd_per_step(view, p) for p in every_place(view, job, number, 8) if p]
    if not costs:
        assert found is None
        return
    placed = view.start(view.space(), job, found)
    assert places.electricity_usd_per_step(view, placed) == pytest.approx(min(costs))


@pytest.mark.parametrize("seed", range(8))
def test_the_solver_finds_what_enumeration_finds(seed):
    """CP-SAT divides costs into a million steps, so equal to that."""
    view, job, number = fleet(seed, 5), queued(16), 16
    question = ask(view, view.space(), job, number)
    one, other = enumerated(question, _alone(question)), solved(question, _alone(question))
    assert (one is None) == (other is None)
    if one and other:
        assert question.cost(other)[0] == pytest.approx(question.cost(one)[0], rel=1e-4)


def test_the_oracle_crosses_where_a_longer_path_is_cheaper():
    """Three cheap sites of 8 in a row: `bace` looks at three sites at most, a fourth is exact."""
    names = ("a", "b", "c", "d")
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in names)
    pairs = [("a", "b"), ("b", "c"), ("c", "d")]
    links = [
        SiteLink(source=one, target=other, latency_s=0.0, bandwidth_bytes_per_s=1e9)
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]
    state = first_state(Cluster(sites=sites, links=tuple(links)), ORACLE, SimpleQuotes())
    started, commands = state.handle(JobSubmitted(0.0, queued(32).job))
    assert [site for site, _ in commands[0].placement.devices] in (list("abcd"), list("dcba"))
    assert not started.refusals


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_rules_are_never_better_than_the_exact_place_with_the_planners_quotes(seed):
    kind = Kind("llama-3.2-1b", 2048, 256)
    view, job = fleet(seed, 8, PlannerQuotes), queued(24, kind)
    question = ask(view, view.space(), job, 24)
    best = exact(view, view.space(), job, 24)
    for rule in (places.bace, cost_first, places.compact):
        devices = rule(view, view.space(), job, 24)
        if devices is None or not is_stall_free(view, view.space(), job, devices):
            continue
        placed = view.start(view.space(), job, devices)
        cheapest = view.start(view.space(), job, best)
        assert question.cost(cheapest)[0] <= question.cost(placed)[0] * (1 + 1e-6)
