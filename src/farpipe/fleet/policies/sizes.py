"""Numbers of devices that a job may get."""

from farpipe.fleet.job import FleetJob


def sizes(job: FleetJob) -> list[int]:
    """The most first, then halves of it, down to the least that the job wants."""
    found = [job.max_devices]
    while found[-1] // 2 > job.min_devices:
        found.append(found[-1] // 2)
    return found if found[-1] == job.min_devices else [*found, job.min_devices]
