"""Check of a fleet policy: random fleets in which the rules must hold after every event."""

import math
import random
from collections.abc import Mapping
from itertools import pairwise

from farpipe.core.arguments import expect_kind
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import DevicesChanged, Event, LinkChanged, Price, PriceChanged, SiteBack, SiteLost
from farpipe.fleet.job import FleetJob, JobPlacement, JobState, Kind
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import Devices, StopCosts
from farpipe.fleet.simulator import Failures, Simulator
from farpipe.fleet.snapshot import Snapshot
from farpipe.fleet.state import FleetState, first_state
from farpipe.fleet.stops import planned

SITES = ("amber", "birch", "cedar")
HOUR_S = 3600.0


class SimpleQuotes:
    """Quotes without a planner: work shared by the devices, slowed by links that are too thin."""

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        """As in `Quotes`."""
        number = sum(count for _, count in devices)
        step_s = kind.global_batch / number**0.9
        pairs = [(a, b) for (a, _), (b, _) in pairwise(devices)]
        names = [name for a, b in pairs for name in (f"{a}>{b}", f"{b}>{a}")]
        if any(rates.get(name, 0.0) <= 0 for name in names):
            return None
        size = float(kind.global_batch * kind.sequence_length)
        step_s = max([step_s, *(size / rates[name] for name in names)])
        power = {site: 400.0 * count for site, count in devices}
        return JobPlacement(devices, step_s, dict.fromkeys(names, size / step_s), power)

    def state_bytes(self, kind: Kind) -> float:
        """As in `Quotes`."""
        return 1e9 * kind.global_batch

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """As in `Quotes`."""
        return float(kind.sequence_length * num_devices**0.9)


def check_policy(policy: Policy, *, num_fleets: int = 3, seed: int = 0) -> None:
    """Check a fleet policy on random fleets, on half of them with stops that take a quarter of an hour.

    It must not raise, not ask for what is not there, and leave no job waiting in an empty fleet. Prices, sites and
    links change meanwhile, devices fail. Raises AssertionError with everything that is wrong. Takes some seconds.
    """
    if not callable(getattr(policy, "decide", None)):
        expect_kind("check_policy: policy", policy, (), "a policy, an object with `name` and `decide`")
    found = violations(policy, num_fleets=num_fleets, seed=seed)
    found += violations(policy, num_fleets=num_fleets, seed=seed, stops=StopCosts(stop_s=900.0, copy_every_s=36000.0))
    assert not found, "\n".join(found)


def violations(
    policy: Policy, *, num_fleets: int = 5, num_jobs: int = 30, seed: int = 0, stops: StopCosts | None = None
) -> list[str]:
    """Every rule that `policy` or the fleet under it broke in some random fleets; empty if it conforms.

    It must not raise, not ask for what is not there, leave no job waiting in an empty fleet, and give the same
    decisions for the same fleet.
    """
    found: list[str] = []
    for index in range(num_fleets):
        found += _play(policy, num_jobs, random.Random(f"{seed} {index}"), f"fleet {index}", stops)
    return found


def _play(policy: Policy, num_jobs: int, draw: random.Random, name: str, stops: StopCosts | None) -> list[str]:
    found: list[str] = []
    jobs = random_jobs(num_jobs, draw)

    def after(state: FleetState, event: Event) -> None:
        found.extend(f"{name}: after {event}: {why}" for why in (*broken(state), *state.refusals))

    state = first_state(random_cluster(draw), policy, SimpleQuotes(), stops)
    simulator = Simulator(state, Failures(device_hours=200.0, final_share=0.1, seed=draw.randrange(99)), after=after)
    outcome = simulator.run(jobs, random_events(draw))
    ended = sum(record.final is not None for record in outcome.records)
    if simulator.state.jobs or ended < num_jobs:
        found.append(f"{name}: {num_jobs - ended + len(simulator.state.jobs)} of {num_jobs} jobs never ended")
    return found


def broken(state: Snapshot) -> list[str]:
    """Every invariant that `state` breaks, in words; empty if it is sound."""
    found = [planned(state).space().overdrawn()]
    if not any(job.phase == "stopping" for job in state.jobs.values()):
        found.append(state.space().overdrawn())  # devices that were taken from a site are held until jobs have stopped
    for name, job in state.jobs.items():
        if name in state.ended:
            found.append(f"{name} has ended and is still there")
        found += [f"{name}: {why}" for why in _misplaced(job)]
        if not 0 <= job.num_stored <= job.num_done <= job.job.num_steps:
            found.append(
                f"{name} has done {job.num_done} of {job.job.num_steps} steps, {job.num_stored} in a checkpoint"
            )
        if job.phase != "queued" and max(job.copies.values(), default=0.0) > job.num_done:
            found.append(f"{name} has done {job.num_done} steps, and copies of {dict(job.copies)}")
        if not 0 <= job.since_s <= state.now_s:
            found.append(f"{name} is as of {job.since_s} s at {state.now_s} s")
    return [why for why in found if why]


def _misplaced(job: JobState) -> list[str]:
    """What is wrong with the devices that a job holds or has reserved."""
    here, found = job.placement, list[str]()
    if (here is None) != (job.phase == "queued"):
        found.append(f"{job.phase} with placement {here}")
    if job.reserved is not None and (job.leaves or job.phase not in ("queued", "stopping")):
        found.append(f"{job.phase} and has reserved {job.reserved}")
    for placement in filter(None, (here, job.reserved)):
        if not job.job.min_devices <= placement.num_devices <= job.job.max_devices:
            found.append(f"{placement.num_devices} devices, from {job.job.min_devices} to {job.job.max_devices}")
        if len(set(placement.sites)) != len(placement.sites):
            found.append(f"at one site twice: {placement.devices}")
        if not (placement.step_s > 0 and math.isfinite(placement.step_s)):
            found.append(f"steps of {placement.step_s} s")
    return found


def random_cluster(draw: random.Random) -> Cluster:
    """Three linked sites."""
    sites = [preset_site(name, "a100-80gb", 8 * draw.randint(2, 8)) for name in SITES]
    links = [
        SiteLink(source=a, target=b, latency_s=0.03, bandwidth_bytes_per_s=draw.uniform(1e4, 1e7))
        for a in SITES
        for b in SITES
        if a != b
    ]
    return Cluster(sites=tuple(sites), links=tuple(links))


def random_jobs(num_jobs: int, draw: random.Random) -> list[FleetJob]:
    """Jobs that all fit the smallest site."""
    jobs, now = [], 0.0
    for index in range(num_jobs):
        now += draw.expovariate(1 / (0.3 * HOUR_S))
        least = draw.choice([1, 4, 8])
        kind = Kind("llama-3-8b", draw.choice([512, 4096]), draw.choice([64, 256]))
        jobs.append(FleetJob(f"job{index}", kind, now, draw.randint(1, 400), least, least * draw.choice([1, 2])))
    return jobs


def random_events(draw: random.Random) -> list[Event]:
    """Prices that change every hour, and everything that can happen to a site or a link, undone later."""
    hours = range(1, 60)
    events: list[Event] = [
        PriceChanged(hour * HOUR_S, {site: Price(draw.uniform(-50, 200), draw.uniform(0, 600)) for site in SITES})
        for hour in hours
    ]
    site, link = draw.choice(SITES), ">".join(draw.sample(SITES, 2))
    events += [SiteLost(3.2 * HOUR_S, site), SiteBack(5.7 * HOUR_S, site)]
    events += [LinkChanged(4.1 * HOUR_S, link, 0.0), LinkChanged(6.1 * HOUR_S, link, 1e6)]
    events += [DevicesChanged(7.3 * HOUR_S, draw.choice(SITES), 8)]
    return events
