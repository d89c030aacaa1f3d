"""Traces of the fleet benchmarks: the Philly trace mapped to models, Acme-like mixes, their offered load.

Nothing is measured here.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.strict import read_csv
from farpipe.fleet.job import FleetJob, Kind

SIZES: Final = {
    8: (Kind("llama-3.2-1b", 2048, 256),),
    16: (Kind("llama-3.2-1b", 2048, 256), Kind("llama-3.2-3b", 2048, 256), Kind("llama-3-8b", 4096, 256)),
    32: (Kind("llama-3.2-3b", 2048, 256), Kind("llama-3-8b", 4096, 256), Kind("llama-2-13b", 4096, 512)),
    64: (Kind("llama-2-13b", 4096, 512), Kind("qwen2.5-32b", 4096, 512), Kind("llama-3-70b", 4096, 1024)),
    128: (Kind("qwen2.5-32b", 4096, 512), Kind("llama-3-70b", 4096, 1024)),
    256: (Kind("llama-3-70b", 4096, 1024),),
}
"""Kinds of training by requested devices, in rotation: the rule of ours that maps sizes to models of 1.3B to 70B."""


@dataclass(frozen=True)
class RawJob:
    """A line of a cluster's trace."""

    submit_s: float
    duration_s: float
    num_devices: int
    tenant: str


def read_philly(path: Path | str, min_devices: int = 8) -> list[RawJob]:
    """Jobs of the Philly trace (Jeon et al., ATC 2019) with at least `min_devices`: submit_s, duration_s, num_gpus."""
    jobs = []
    for place, row in read_csv(path)[1]:
        try:
            found = float(row["submit_s"]), float(row["duration_s"]), int(row["num_gpus"]), row["virtual_cluster"]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{place}: not a line of the Philly trace: {error}") from None
        if found[2] >= min_devices and found[1] > 0:
            jobs.append(RawJob(*found))
    return sorted(jobs, key=lambda job: job.submit_s)


def acme_like(num_jobs: int, seed: int, mean_gap_s: float) -> list[RawJob]:
    """Jobs like those of Acme's LLM cluster Kalos (Hu et al., NSDI 2024): few large ones, most of them short.

    Sizes are powers of two from 8 to 1024 whose shares halve with each doubling, durations lognormal, arrivals
    Poisson. Only the mean size and the range are the published ones.
    """
    draw = random.Random(f"acme {seed}")
    sizes = [8 << k for k in range(8)]
    jobs, now = [], 0.0
    for index in range(num_jobs):
        now += draw.expovariate(1 / mean_gap_s)
        size = draw.choices(sizes, [2.0**-k for k in range(8)])[0]
        jobs.append(RawJob(now, draw.lognormvariate(8.5, 1.5), size, f"tenant{index % 5}"))
    return jobs


def offered_load(jobs: Sequence[RawJob], num_devices: int) -> float:
    """Device-seconds asked for over those that there are between the first and the last submission."""
    span = jobs[-1].submit_s - jobs[0].submit_s
    return sum(job.duration_s * job.num_devices for job in jobs) / (num_devices * span)


def at_load(jobs: Sequence[RawJob], num_devices: int, load: float) -> list[RawJob]:
    """The same jobs, submitted faster or slower so that `offered_load` is `load`, the first one at zero."""
    factor = offered_load(jobs, num_devices) / load
    begin = jobs[0].submit_s
    return [RawJob((job.submit_s - begin) * factor, job.duration_s, job.num_devices, job.tenant) for job in jobs]


def as_jobs(
    raw: Sequence[RawJob], step_s: Callable[[Kind, int], float], *, shrink: int = 2, grow: int = 2
) -> list[FleetJob]:
    """Raw jobs as trainings that last as long on what was requested, by `step_s` of a kind on so many devices.

    They may have from a part (`shrink`) to a multiple (`grow`) of the requested devices; 1 and 1: rigid. What is
    trained goes by `SIZES`, in rotation; larger requests train what the largest size does.
    """
    jobs, num_of_size = list[FleetJob](), dict.fromkeys(SIZES, 0)
    for index, job in enumerate(raw):
        size = max(size for size in SIZES if size <= max(job.num_devices, min(SIZES)))
        kind = SIZES[size][num_of_size[size] % len(SIZES[size])]
        num_of_size[size] += 1
        steps = max(1, round(job.duration_s / step_s(kind, job.num_devices)))
        bounds = max(1, job.num_devices // shrink), job.num_devices * grow
        jobs.append(FleetJob(f"job{index}", kind, job.submit_s, steps, *bounds, tenant=job.tenant))
    return jobs
