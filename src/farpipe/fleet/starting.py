"""Cost of starting a job somewhere: its restart, reading its checkpoint, and moving that there."""

from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.snapshot import World
from farpipe.fleet.space import Space


def start_on(world: World, space: Space, job: JobState, devices: tuple[tuple[str, int], ...]) -> Placement | None:
    """The job starting on `devices` out of `space`, with what its start takes; None if it can't."""
    if not space.has(devices):
        return None
    stored_at = job.placement.sites[0] if job.placement and job.phase == "running" else job.stored_at
    rates, sent = space.rates, dict[str, float]()
    seconds = 0.0
    if stored_at is not None and all(stored_at != site for site, _ in devices):
        link = f"{stored_at}>{devices[0][0]}"
        rate = world.stops.transfer_share * rates.get(link, 0.0)
        if rate <= 0:
            return None
        sent[link], rates = rate, {**rates, link: rates[link] - rate}
        seconds = world.quotes.state_bytes(job.job.kind) / rate
    placement = world.quotes.placement(job.job.kind, devices, rates)
    if placement is None:
        return None
    seconds += startup_s(world.stops, world.quotes.state_bytes(job.job.kind), job, placement.num_devices)
    steps = placement.link_bytes_per_s
    both = {link: steps.get(link, 0.0) + sent.get(link, 0.0) for link in {**steps, **sent}} if sent else steps
    return Placement(placement.devices, placement.step_s, steps, placement.power_w, seconds, both)


def startup_s(stops: StopCosts, state_bytes: float, job: JobState, num_devices: int) -> float:
    """Seconds until the first step: restart; its checkpoint is read, and written before if the job is running."""
    seconds = stops.restart_s
    if job.stored_at is not None or job.phase == "running":
        seconds += state_bytes / (stops.checkpoint_bytes_per_s * num_devices)
    if job.phase == "running" and job.placement is not None:
        seconds += state_bytes / (stops.checkpoint_bytes_per_s * job.placement.num_devices)
    return seconds
