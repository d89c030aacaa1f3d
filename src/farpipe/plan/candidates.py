"""Every layout that a job allows: degrees of parallelism, microbatch sizes, orders of sites."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farpipe.cost import Layout
from farpipe.errors import InfeasibleError
from farpipe.plan.placement import place_ranks, site_orders
from farpipe.spec import Job, Site

MICROBATCH_SIZES = (1, 2, 4, 8)
"""Tried when neither the job nor its number of microbatches says."""


@dataclass(frozen=True)
class Candidate:
    """One way to spread the job: `sites` has the site of every pipeline rank."""

    layout: Layout
    sites: tuple[Site, ...]

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the sites in pipeline order."""
        return tuple(dict.fromkeys(site.name for site in self.sites))

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.layout.pipeline * self.layout.devices_per_rank

    def __str__(self) -> str:
        at = self.layout
        degrees = f"pipeline {at.pipeline} x data {at.data} x tensor {at.tensor}"
        virtual = f", {at.virtual} stages per rank" if at.virtual > 1 else ""
        return (
            f"{' > '.join(self.order)}: {degrees}{virtual}, {at.num_microbatches} microbatches of {at.microbatch_size}"
        )


def candidates(job: Job) -> list[Candidate]:
    """Every layout that the job's pins, its batch and the sites' devices allow.

    Raises InfeasibleError, naming what is in the way, when there is none.
    """
    found = [
        Candidate(layout, tuple(sites))
        for order in site_orders(job.cluster, job.layout.sites)
        for layout in _layouts(job, order)
        if (sites := place_ranks(order, layout.pipeline, layout.devices_per_rank)) is not None
    ]
    if not found:
        raise InfeasibleError(_why_none(job))
    return found


def _layouts(job: Job, order: tuple[Site, ...]) -> Iterator[Layout]:
    num_devices = sum(site.num_devices for site in order)
    virtual = job.layout.virtual or 1
    for tensor in _tensor_degrees(job, order):
        for data in _data_degrees(job, num_devices // tensor):
            for microbatch_size, num_microbatches in _microbatches(job, data):
                for pipeline in _pipeline_degrees(job, order, num_devices // (tensor * data), virtual):
                    yield Layout(pipeline, data, tensor, virtual, microbatch_size, num_microbatches)


def _tensor_degrees(job: Job, order: Iterable[Site]) -> list[int]:
    if job.layout.tensor is not None:
        return [job.layout.tensor]
    most = min(site.devices_per_machine for site in order)
    return [t for t in _powers_of_two(most) if job.model.num_heads % t == 0]


def _data_degrees(job: Job, most: int) -> list[int]:
    batch = job.training.global_batch
    pinned = job.layout.data
    return [d for d in ([pinned] if pinned else range(1, most + 1)) if d <= most and batch % d == 0]


def _microbatches(job: Job, data: int) -> list[tuple[int, int]]:
    """(microbatch size, number of microbatches) that make up a replica's share of the batch."""
    share = job.training.global_batch // data
    count, size = job.layout.num_microbatches, job.training.microbatch_size
    sizes = [size] if size else [share // count] if count else MICROBATCH_SIZES
    pairs = [(s, share // s) for s in sizes if s and share % s == 0]
    return [(s, m) for s, m in pairs if count in (None, m)]


def _pipeline_degrees(job: Job, order: tuple[Site, ...], most: int, virtual: int) -> list[int]:
    pins = job.layout
    if pins.pipeline is not None:
        return [pins.pipeline] if pins.pipeline <= most else []
    if pins.layers is not None:
        return [len(pins.layers) // virtual] if len(pins.layers) % virtual == 0 else []
    return [p for p in range(len(order), min(most, job.model.num_layers // virtual) + 1) if p <= 16 or p % 4 == 0]


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _why_none(job: Job) -> str:
    pins, batch = job.layout, job.training.global_batch
    per_replica = (pins.pipeline or 1) * (pins.tensor or 1)
    needed = per_replica * (pins.data or 1)
    if needed > job.cluster.num_devices:
        return (
            f"layout: pipeline {pins.pipeline or 1} x data {pins.data or 1} x tensor {pins.tensor or 1} needs {needed} "
            f"devices, the cluster has {job.cluster.num_devices}; add {needed - job.cluster.num_devices} devices or "
            "pin less"
        )
    if pins.data is not None and batch % pins.data:
        return f"layout.data: {pins.data} replicas do not divide training.global_batch {batch}"
    if pins.num_microbatches is not None or job.training.microbatch_size is not None:
        return (
            f"training.global_batch {batch}: no number of replicas makes {pins.num_microbatches or 'any number of'} "
            f"microbatches of {job.training.microbatch_size or 'any size'} of it; change one of them"
        )
    return (
        f"layout: no placement of the pinned degrees on the {len(job.cluster.sites)} sites: every pipeline rank needs "
        f"its {(pins.tensor or 1) * (pins.data or 1)} devices on one site, every site in the order at least one rank, "
        f"and every stage at least one of the {job.model.num_layers} layers"
    )
