"""Admission: jobs that could never run in a fleet are refused when they are submitted."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from farpipe.fleet.job import FleetJob, sizes
from farpipe.fleet.policies.places import QUANTUM, across, alone, max_sites
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Snapshot, Space

AMPLE: Final = 1e12
"""Bytes/s of every link while a submitted job is judged: rates change, and a slow link is no reason to refuse it."""


def why_refused(state: Snapshot, job: FleetJob) -> str:
    """Reason for which `job` can never run in this fleet, and what would help; empty if it can."""
    empty = Space({name: site.num_devices for name, site in state.sites.items()}, dict.fromkeys(state.rates, AMPLE))
    if any(state.world.quotes.placement(job.kind, devices, empty.rates) for devices in _places(empty, job)):
        return ""
    if not _has_room(empty, job.min_devices):
        return _too_wide(empty, job.min_devices)
    if job.kind.num_devices:
        return (
            f"{job.min_devices} devices are more than any site has, and with duration_s for model and num_steps nobody "
            f"knows how fast it would be over several; min_devices {max(empty.devices.values())} would do"
        )
    doubled = (job.max_devices << k for k in range(1, max(1, empty.num_devices // job.max_devices).bit_length()))
    enough = next((n for n in doubled if state.world.quotes.needed_rate(job.kind, n) is not None), None)
    helps = f"max_devices {enough} would do" if enough else "it needs devices with more memory"
    return (
        f"{job.kind.model} with global_batch {job.kind.global_batch} does not fit {job.max_devices} devices of any "
        f"site; {helps}"
    )


def _places(empty: Space, job: FleetJob) -> Iterator[Devices]:
    """Places on all sizes of the job, those at one site first."""
    most = max_sites(empty.devices.values(), job.min_devices)
    for number in sizes(job):
        yield from alone(empty, number)
    for number in sizes(job):
        yield from across(empty, number, most, lambda site: 0.0)


def _has_room(empty: Space, number: int) -> bool:
    pipelines = across(empty, number, max_sites(empty.devices.values(), number), lambda site: 0.0)
    return bool(alone(empty, number)) or next(pipelines, None) is not None


def _too_wide(empty: Space, min_devices: int) -> str:
    total = empty.num_devices
    most = bisect_left(range(min(min_devices, total + 1)), True, lo=1, key=lambda n: not _has_room(empty, n)) - 1
    ask = f"ask for {most} at most"
    if min_devices > total:
        return f"min_devices {min_devices} is more than the {total} devices of all sites; {ask}"
    return (
        f"min_devices {min_devices} is more than a pipeline over linked sites can have; {ask}, or link the others; "
        f"every site of it gives at least {QUANTUM} devices"
    )
