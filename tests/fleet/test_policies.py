"""Every policy keeps the rules in random fleets, and what sets each apart shows."""

from dataclasses import replace

import pytest

from benchmarks.fleet.baselines import COMPARED
from farpipe.core.errors import UsageError
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import (
    JobStarted,
    JobSubmitted,
    LinkChanged,
    Migrate,
    Price,
    PriceChanged,
    SiteBack,
    SiteLost,
    Tick,
)
from farpipe.fleet.job import FleetJob, JobState, Kind
from farpipe.fleet.policies import POLICIES, policy_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.orders import bace_priority, by_work_left
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.queueing import QueuePolicy
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.snapshot import Space
from farpipe.fleet.state import first_state
from farpipe.testing import check_policy
from farpipe.testing.policies import SimpleQuotes, violations

KIND = Kind("llama-3-8b", 512, 64)


def cluster(*num_devices, rate=1e9):
    names = [f"s{index}" for index in range(len(num_devices))]
    sites = tuple(preset_site(name, "a100-80gb", number) for name, number in zip(names, num_devices, strict=True))
    pairs = [(a, b) for a in names for b in names if a != b]
    links = [SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=rate) for a, b in pairs]
    return Cluster(sites=sites, links=tuple(links))


def job(name, submit_s=0.0, num_steps=100, least=8, most=8):
    return FleetJob(name, KIND, submit_s, num_steps, least, most)


def run(policy, jobs, fleet, events=()):
    state = first_state(fleet, COMPARED[policy] if isinstance(policy, str) else policy, SimpleQuotes())
    simulator = Simulator(state)
    outcome = simulator.run(jobs, events)
    return {record.job.name: record for record in outcome.records}


@pytest.mark.parametrize("name", COMPARED)
def test_every_policy_conforms(name):
    check_policy(COMPARED[name])


def test_the_kit_finds_a_policy_that_asks_for_what_is_not_there():
    class Greedy:
        name = "greedy"

        def decide(self, view):
            return [Decision(job.name, (("amber", job.job.max_devices),)) for job in view.queue]

    found = violations(Greedy(), num_fleets=1)
    assert any("is not free" in why for why in found)


@pytest.mark.slow
def test_the_kit_finds_a_policy_that_raises_and_one_that_starves():
    class Broken:
        name = "broken"

        def decide(self, view):
            raise ZeroDivisionError

    class Idle:
        name = "idle"

        def decide(self, view):
            return []

    assert any("ZeroDivisionError" in why for why in violations(Broken(), num_fleets=1))
    assert any("never ended" in why for why in violations(Idle(), num_fleets=1))


def test_first_come_first_served_blocks_and_backfilling_lets_short_jobs_past():
    """One site of 16: `long` holds 8, `wide` needs all 16, `short` would fit beside `long`."""
    jobs = [job("long", 0.0, 2000), job("wide", 1.0, 10, 16, 16), job("short", 2.0, 10)]
    blocked, filled = run("fcfs", jobs, cluster(16)), run("easy", jobs, cluster(16))
    assert blocked["short"].finished_s > blocked["wide"].finished_s
    assert filled["short"].finished_s < filled["long"].finished_s
    assert filled["wide"].finished_s == pytest.approx(blocked["wide"].finished_s), "which is not delayed"


def test_backfilling_does_not_let_a_job_past_that_would_delay_the_first():
    jobs = [job("long", 0.0, 2000), job("wide", 1.0, 10, 16, 16), job("longer", 2.0, 4000)]
    found = run("easy", jobs, cluster(16))
    assert found["longer"].final.first_start_s >= found["wide"].finished_s


def test_shortest_first_and_preemption():
    jobs = [job("long", 0.0, 3000), job("middle", 1.0, 600), job("short", 2.0, 20)]
    waited = run("sjf", jobs, cluster(8))
    stopped = run("srtf", [*jobs[:2], job("short", 4000.0, 20)], cluster(8))
    assert waited["short"].finished_s < waited["middle"].finished_s
    assert stopped["long"].final.num_preemptions >= 1
    assert stopped["short"].jct_s < 1000


def test_cost_first_follows_the_price():
    prices = PriceChanged(0.0, {"s0": Price(90.0, 0.0), "s1": Price(-5.0, 0.0), "s2": Price(40.0, 0.0)})
    for name in ("cr-lcf", "bace"):
        final = run(name, [job("only", 10.0)], cluster(8, 8, 8), [prices])["only"].final
        assert list(final.spent.device_s) == ["s1"], name


def test_the_paper_s_baselines_take_the_cheapest_and_the_largest_region():
    prices = PriceChanged(0.0, {"s0": Price(90.0, 0.0), "s1": Price(5.0, 0.0), "s2": Price(40.0, 0.0)})
    for name, site in (("lcf", "s1"), ("ldf", "s2")):
        records = run(name, [job("only", 10.0), job("wide", 20.0, least=48, most=48)], cluster(8, 16, 32), [prices])
        assert list(records["only"].final.spent.device_s) == [site], name
        assert records["wide"].finished_s is None, "one region at a time"


class EightAreFastest(SimpleQuotes):
    """More devices than eight only slow a step."""

    def placement(self, kind, devices, rates):
        found = super().placement(kind, devices, rates)
        return found and replace(found, step_s=float(max(8, found.num_devices)))


@pytest.mark.parametrize("name", ["bace", "lcf", "ldf", "cr-lcf", "cr-ldf"])
def test_policies_of_bace_s_paper_take_the_size_with_the_shortest_step(name):
    state = first_state(cluster(32), COMPARED[name], EightAreFastest())
    _, (start,) = state.handle(JobSubmitted(0.0, job("only", least=8, most=32)))
    assert start.placement.num_devices == 8


def test_bace_crosses_only_where_links_do_not_stall_it():
    wide = job("wide", 0.0, 10, 16, 16)
    good = run("bace", [wide], cluster(8, 8))["wide"]
    assert set(good.final.spent.device_s) == {"s0", "s1"}
    thin = cluster(8, 8, 16, rate=1.0)
    assert set(run("bace", [wide], thin)["wide"].final.spent.device_s) == {"s2"}


def test_bace_s_order_weighs_work_on_idle_links_and_need_of_links_on_busy_ones():
    """`small` has less work, `thrifty` needs less of the links."""
    jobs = [JobState(job("small", 0.0, 100, 32, 32)), JobState(job("thrifty", 0.0, 900, 8, 8))]
    state = first_state(cluster(8, 8, rate=1e9), POLICIES["bace"], SimpleQuotes())
    idle = bace_priority(View(state), jobs)
    assert idle[0] < idle[1]
    busy = View(state)
    busy.space = lambda: Space(dict(state.space().devices), dict.fromkeys(state.rates, 50000000.0))
    small, thrifty = bace_priority(busy, jobs)
    work, need = by_work_left(busy, jobs), [state.world.quotes.needed_rate(KIND, number) for number in (32, 8)]
    assert small == pytest.approx(-0.05 * (1 - work[0] / work[1]))
    assert thrifty == pytest.approx(-0.95 * (1 - need[1] / need[0]))
    assert thrifty < small


def test_an_unknown_policy_is_named():
    with pytest.raises(UsageError, match="did you mean 'bace'"):
        policy_of("bake")


def test_own_policy_moves_to_the_cheaper_site_when_that_repays_the_stop():
    prices = [
        PriceChanged(0.0, {"s0": Price(10.0, 0.0), "s1": Price(20.0, 0.0)}),
        PriceChanged(7200.0, {"s0": Price(300.0, 0.0), "s1": Price(20.0, 0.0)}),
    ]
    long = run("farpipe", [job("long", 10.0, 20000)], cluster(8, 8), prices)["long"]
    assert long.final.num_moves == 1
    assert set(long.final.spent.device_s) == {"s0", "s1"}
    short = run("farpipe", [job("short", 10.0, 750)], cluster(8, 8), prices)["short"]
    assert short.final.num_moves == 0


def test_a_job_that_stayed_for_the_move_of_its_checkpoint_is_looked_at_again_when_a_link_has_got_faster():
    """Nothing else changes: the other site has had room, at the same price, since the job was looked at.

    Moves are looked for once in a quarter of an hour.
    """
    long, prices = job("long", 0.0, 20_000), {"s0": Price(300.0, 0.0), "s1": Price(20.0, 0.0)}
    state, (start,) = first_state(cluster(8, 8, rate=1e4), POLICIES["farpipe"], SimpleQuotes()).handle(
        PriceChanged(0.0, {"s0": Price(10.0, 0.0), "s1": Price(20.0, 0.0)}), JobSubmitted(0.0, long)
    )
    state, _ = state.handle(JobStarted(start.placement.startup_s, "long", 1))
    for event in (PriceChanged(7200.0, prices), LinkChanged(7300.0, "s0>s1", 1e9), Tick(8099.0)):
        state, commands = state.handle(event)
        assert not commands
    _, (move,) = state.handle(Tick(8100.0))
    assert (type(move), move.placement.sites) == (Migrate, ("s1",))


LOST = [SiteLost(5000.0, "s0"), SiteBack(1e6, "s0")]
"""No link of a lost site carries the checkpoint of a job that ran there."""


@pytest.mark.parametrize(
    ("most", "least", "fleet", "devices"),
    [
        (8, 8, (8, 8), {"s1": 8}),
        (8, 4, (8, 8), {"s1": 8}),
        (16, 8, (16, 8, 8), {"s1": 8, "s2": 8}),
    ],
)
@pytest.mark.parametrize("policy", ["farpipe", "srtf"])
def test_a_job_that_cannot_leave_its_lost_site_keeps_no_new_job_of_its_kind_from_others(
    policy, most, least, fleet, devices
):
    """`old` has less left and is asked first, for the same number of devices."""
    jobs = [job("old", 0.0, 1500, most, most), job("new", 6000.0, 2000, least, most)]
    cheap = PriceChanged(0.0, {site: Price(10.0 if site == "s0" else 90.0, 0.0) for site in ("s0", "s1")})
    simulator = Simulator(first_state(cluster(*fleet), POLICIES[policy], SimpleQuotes()))
    simulator.run(jobs, [cheap, *LOST])
    starts = {change.job: change for change in reversed(simulator.changes) if change.event == "start"}
    assert (starts["new"].time_s, starts["new"].devices) == (6000.0, devices)
    assert simulator.records["old"].final.queued_s > 9e5


def test_a_job_that_cannot_leave_its_lost_site_keeps_none_of_its_kind_from_stopping_another():
    jobs = [job("old", 0.0, 600), job("long", 1.0, 20_000), job("short", 6000.0, 200)]
    found = run("farpipe", jobs, cluster(8, 8), LOST)
    assert found["old"].final.queued_s > 9e5
    assert found["short"].final.first_start_s == 6000.0


def test_a_job_is_stopped_only_if_the_wait_costs_more():
    """`long` would run for 16 h, `nearly` ends in minutes: only the first one's devices are worth a stop."""
    first = job("long", 0.0, 9000)
    nearly = job("nearly", 0.0, 9000)
    short = job("short", 4000.0, 100)
    swapped = run("farpipe", [first, short], cluster(8))
    assert swapped["long"].final.num_preemptions == 1
    assert swapped["short"].jct_s < 1500
    at_end = replace(short, submit_s=run("farpipe", [nearly], cluster(8))["nearly"].finished_s - 300.0)
    waited = run(FarpipePolicy(factor=0.01), [nearly, at_end], cluster(8))
    assert waited["nearly"].final.num_preemptions == 0


@pytest.mark.parametrize(
    ("devices", "rate", "is_stopped"),
    [((8, 8), 1e9, True), ((8, 8), 1e5, False), ((8,), 1e5, True), ((8, 4), 1e5, True)],
)
def test_a_job_is_stopped_only_if_what_waits_saves_more_than_the_move_of_its_checkpoint(devices, rate, is_stopped):
    """64 GB at 50 kB/s take 15 days, and `short` would wait for a day; no move counts where no other site has room."""
    running = [job(f"long{place}", float(place), 9000) for place, number in enumerate(devices) if number == 8]
    found = run("farpipe", [*running, job("short", 4000.0, 100)], cluster(*devices, rate=rate))
    assert sum(found[long.name].final.num_preemptions for long in running) == is_stopped


def test_a_running_job_moves_where_it_is_as_fast_to_make_room_at_one_site():
    """Six devices are free at either site: no place for twelve, nor for a pipeline of machines of eight."""
    here = [job("one", 0.0, 9000, 6, 6), job("first", 1.0, 100, 6, 6), job("other", 2.0, 9000, 6, 6)]
    wide = job("wide", 10_000.0, 20_000, 12, 12)
    found = run("farpipe", [*here, wide], cluster(12, 12))
    assert found["wide"].final.queued_s < 1
    assert [found[name].final.num_moves for name in ("one", "other")] in ([0, 1], [1, 0])
    assert [found[name].final.num_preemptions for name in ("one", "other")] == [0, 0]
    assert run(FarpipePolicy(moves=False, preempts=False), [*here, wide], cluster(12, 12))["wide"].final.queued_s > 3600


def test_where_wide_jobs_are_about_a_job_starts_where_least_is_to_spare_and_else_where_power_is_cheap():
    dear = [PriceChanged(0.0, {"s0": Price(10.0, 0.0), "s1": Price(100.0, 0.0)})]
    jobs = [job("one", 1.0, 100), job("other", 2.0, 100)]
    cheap = run("farpipe", jobs, cluster(32, 8), dear)
    assert [list(cheap[name].final.spent.device_s) for name in ("one", "other")] == [["s0"], ["s0"]]
    wide_first = run("farpipe", [job("wide", 0.0, 100, 20, 20), *jobs], cluster(32, 8), dear)
    assert list(wide_first["one"].final.spent.device_s) == ["s1"]
    alike = run("farpipe", [job("wide", 1.0, 100, 20, 20)], cluster(32, 32), [replace_prices(dear[0])])
    assert list(alike["wide"].final.spent.device_s) == ["s1"]


def replace_prices(event):
    return PriceChanged(event.time_s, {"s0": event.prices["s1"], "s1": event.prices["s0"]})


def test_a_stopped_job_waits_for_its_own_site_if_that_is_free_before_its_checkpoint_is_moved():
    """The move of 64 GB at 5 MB/s takes 3.6 h, `short`, which has a deadline, half an hour."""
    jobs = [job("ends", 0.0, 445), job("long", 1.0, 20_000), replace(job("short", 4000.0, 180), deadline_s=7600.0)]
    found = run("farpipe", jobs, cluster(8, 8, rate=1e7))
    assert found["long"].final.num_preemptions == 1
    assert list(found["long"].final.spent.device_s) == ["s1"]


def test_own_policy_runs_what_is_wider_than_a_site_even_where_every_link_slows_it():
    wide = job("wide", 0.0, 10, 16, 16)
    found = run("farpipe", [wide], cluster(8, 8, rate=1000.0))["wide"]
    assert set(found.final.spent.device_s) == {"s0", "s1"}
    assert found.finished_s is not None
    assert run("bace", [wide], cluster(8, 8, rate=1000.0))["wide"].finished_s is None


def test_own_policy_crosses_where_no_site_has_room_and_links_are_wide_enough():
    """The one site of 16 is taken; two sites of 8 are free."""
    jobs = [job("first", 0.0, 2000, 16, 16), job("second", 1.0, 10, 16, 16)]
    crossed = run("farpipe", jobs, cluster(8, 8, 16))["second"]
    assert set(crossed.final.spent.device_s) == {"s0", "s1"}
    waited = run("farpipe", jobs, cluster(8, 8, 16, rate=1.0))["second"]
    assert set(waited.final.spent.device_s) == {"s2"}
    assert crossed.finished_s < waited.finished_s


@pytest.mark.parametrize(("rate", "devices"), [(1e9, (("s0", 16), ("s1", 16))), (1e3, (("s0", 16),))])
def test_own_policy_runs_on_more_than_a_site_has_room_for_where_links_carry_it(rate, devices):
    """16 devices at one site, or 32 over two whose links do not slow it; over a slow one it would only lose."""
    records = run("farpipe", [job("only", num_steps=1000, least=16, most=32)], cluster(16, 16, rate=rate))
    assert set(dict(records["only"].final.spent.device_s)) == {site for site, _ in devices}


def test_own_policy_puts_a_short_wide_job_before_a_long_narrow_one():
    """Less time left, more work: with the order of work the narrow one would go first."""
    jobs = [job("first", 0.0, 50, 8, 8), job("narrow", 1.0, 300, 4, 4), job("wide", 2.0, 396, 8, 8)]
    waits = {
        order: {n: r.final.queued_s for n, r in run(FarpipePolicy(order=order), jobs, cluster(8)).items()}
        for order in ("rest", "work")
    }
    assert waits["rest"]["wide"] < waits["rest"]["narrow"]
    assert waits["work"]["narrow"] < waits["work"]["wide"]


def test_keys_are_those_of_the_plain_rule():
    """The quick look at who is urgent against the rule for every job."""
    policy = FarpipePolicy(max_queued_s=5000.0)
    jobs = [
        replace(job(f"j{i}", 100.0 * i, 50 + 37 * i % 90), deadline_s=40_000.0 if i % 3 else None) for i in range(40)
    ]
    seen = []

    class Watched:
        name = "watched"

        def decide(self, view):
            for of in (view.queue, view.active):
                plain = [j.left_at(view.now_s) * view.best_step_s(j.job) * j.job.max_devices**0.25 for j in of]
                plain = [policy._urgency(view, j) or key for key, j in zip(plain, of, strict=True)]
                assert policy.keys(view, of) == plain
                seen.extend(plain)
            return policy.decide(view)

    assert all(record.finished_s for record in run(Watched(), jobs, cluster(8)).values())
    assert min(seen) < 0 < max(seen)


def crowd(num_jobs=120, every_s=400.0):
    """Short jobs that take more than one site of 8 has, and a long one that came with the first."""
    jobs = [job(f"short{index}", 1.0 + every_s * index, 40) for index in range(num_jobs)]
    return [job("long", 0.5, 2000), *jobs]


@pytest.mark.parametrize("hours", [3, 8])
def test_nobody_waits_longer_than_the_bound(hours):
    """Then it goes before all that have not waited so long: the stop of one that has just begun takes half an hour."""
    bounded = FarpipePolicy(max_queued_s=hours * 3600.0)
    free = replace(bounded, max_queued_s=float("inf"))
    found, starved = (run(policy, crowd(), cluster(8))["long"].final for policy in (bounded, free))
    assert found.queued_s <= hours * 3600 + 1800 + 600
    assert starved.queued_s > 2 * 8 * 3600


def test_a_near_deadline_goes_first_and_one_that_is_lost_does_not():
    short = [job(f"short{index}", 1.0, 100) for index in range(20)]
    dated = replace(job("dated", 2.0, 900), deadline_s=14_000.0)
    met = run("farpipe", [*short, dated], cluster(8))["dated"]
    late = run("farpipe", [*short, replace(dated, deadline_s=None)], cluster(8))["dated"]
    lost = run("farpipe", [*short, replace(dated, deadline_s=3000.0)], cluster(8))["dated"]
    assert met.finished_s <= 14_000.0 < late.finished_s == lost.finished_s


def test_tenants_get_nearer_to_equal_shares():
    """One tenant's many short jobs against the longer ones of another."""
    jobs = [replace(job(f"a{index}", 1.0, 300), tenant="many") for index in range(12)]
    jobs += [replace(job(f"b{index}", 2.0, 450), tenant="few") for index in range(2)]
    fair, plain = (run(FarpipePolicy(fairness=f), jobs, cluster(8, 8)) for f in (2.0, 0.0))
    mean = [sum(found[f"b{index}"].finished_s for index in range(2)) for found in (fair, plain)]
    assert mean[0] < mean[1]


def test_a_larger_share_of_a_tenant_brings_its_jobs_forward():
    jobs = [replace(job(f"{name}{index}", 1.0, 300), tenant=name) for name in ("a", "b") for index in range(8)]
    plain = FarpipePolicy(fairness=2.0)
    ends = []
    for shares in ((("a", 4.0),), (), (("b", 4.0),)):
        found = run(replace(plain, tenant_shares=shares), jobs, cluster(8, 8, 8))
        ends.append(sum(found[f"a{index}"].finished_s for index in range(8)))
    assert ends[0] <= ends[1] <= ends[2]
    assert ends[0] < ends[2]


def test_policies_are_the_same_but_for_one_thing():
    fcfs, single = COMPARED["fcfs"], COMPARED["single-region"]
    assert isinstance(fcfs, QueuePolicy)
    assert (fcfs.order, fcfs.when_blocked) == (single.order, single.when_blocked)
