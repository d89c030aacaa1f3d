"""Every layout that a job allows: degrees of parallelism, microbatch sizes, orders of sites, shapes of the pipeline."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Final

from farpipe.cost import Layout, round_robin, v_shape
from farpipe.errors import InfeasibleError
from farpipe.plan.orders import V_ORDERS
from farpipe.plan.placement import differing_keys, missing_link, place_ranks, replica_sites, site_orders
from farpipe.search import SEARCHES
from farpipe.spec import ContextExchange, Job, Site
from farpipe.units import counted

MICROBATCH_SIZES: Final = (1, 2, 4, 8, 16)
"""Tried when neither the job nor its number of microbatches says."""
MAX_PAIRS_TOLD: Final = 3
"""Pairs of unlike sites that a message names."""
Shape = tuple[int, bool]
"""Stages on each rank, and whether they are placed in a V instead of round robin."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to spread the job: `sites` has the site of every pipeline rank, of the first replica if each is at a site
    of its own. Equal only to itself."""

    layout: Layout
    sites: tuple[Site, ...]
    in_v: bool = False
    """True if the stages go down the ranks and up again, instead of round and round."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every stage."""
        at = self.layout
        return tuple(v_shape(at.pipeline) if self.in_v else round_robin(at.pipeline, at.num_stages))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of the sites in use, in pipeline order if the pipeline is over all of them."""
        return self.layout.replica_sites or tuple(dict.fromkeys(site.name for site in self.sites))

    @property
    def where(self) -> str:
        """``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them."""
        return (" + " if self.layout.replica_sites else " > ").join(self.order)

    @property
    def devices(self) -> dict[str, int]:
        """Devices in use by site."""
        at = self.layout
        if at.replica_sites:
            return dict.fromkeys(at.replica_sites, at.pipeline * at.devices_per_rank)
        return {name: ranks * at.devices_per_rank for name, ranks in Counter(s.name for s in self.sites).items()}

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.layout.pipeline * self.layout.data * self.layout.tensor * self.layout.context

    def __str__(self) -> str:
        at = self.layout
        degrees = f"pipeline {at.pipeline} x data {at.data} x tensor {at.tensor}"
        virtual = f", {at.virtual} stages per rank{' in a V' if self.in_v else ''}" if at.virtual > 1 else ""
        cut = f"{counted(at.num_microbatches, 'microbatch')} of {at.microbatch_size}"
        return f"{self.where}: {degrees}{virtual}{at.sharing}, {cut}"


def candidates(job: Job) -> list[Candidate]:
    """Every layout that the job's pins, its batch and the sites' devices allow.

    Raises InfeasibleError, naming what is in the way, when there is none.
    """
    wanted = job.layout.replicas
    found = [] if wanted == "across" else list(_inside(job))
    found += [] if wanted == "inside" else list(_across(job))
    if not found:
        raise InfeasibleError(_why_none(job))
    return found


def _inside(job: Job) -> Iterator[Candidate]:
    """Pipelines over one or several sites; the replicas of a rank are where the rank is."""
    for order in site_orders(job.cluster, job.layout.sites):
        for layout, in_v in _layouts(job, order):
            sites = place_ranks(order, layout.pipeline, layout.devices_per_rank)
            if sites is not None:
                yield Candidate(layout, tuple(sites), in_v)


def _across(job: Job) -> Iterator[Candidate]:
    """Whole pipelines at each of several sites, equally many, as far as the smallest of them has devices."""
    for homes in replica_sites(job.cluster, job.layout.sites):
        smallest, names = min(homes, key=lambda site: site.num_devices), tuple(site.name for site in homes)
        for layout, in_v in _layouts(job, (smallest,), len(homes)):
            spread = replace(layout, replica_sites=names)
            if place_ranks((smallest,), spread.pipeline, spread.devices_per_rank) is not None:
                yield Candidate(spread, homes[:1] * spread.pipeline, in_v)


def _layouts(job: Job, order: tuple[Site, ...], times: int = 1) -> Iterator[tuple[Layout, bool]]:
    """Layouts and whether they are in a V, on `times` the devices of `order` with as many replicas at least."""
    context, expert = job.layout.context or 1, job.layout.expert or 1
    num_devices = times * sum(site.num_devices for site in order) // context
    for tensor in tensor_degrees(job, order):
        for data in (d for d in data_degrees(job, num_devices // tensor) if d % times == 0):
            for microbatch_size, num_microbatches in microbatches(job, data):
                for virtual, in_v in shapes(job):
                    for pipeline in pipeline_degrees(job, order, num_devices // (tensor * data), virtual):
                        if pipeline > 1 or not in_v:
                            degrees = (pipeline, data, tensor, virtual, microbatch_size, num_microbatches)
                            for method in context_exchanges(job, tensor):
                                yield Layout(*degrees, (), context, method, expert), in_v


def context_exchanges(job: Job, tensor: int) -> list[ContextExchange]:
    """The pinned method, or both of those that the heads allow; a ring where nobody shares a sequence."""
    context, wanted = job.layout.context or 1, job.layout.context_exchange
    if context == 1:
        return ["ring"]
    fits: list[ContextExchange] = ["ring", "ulysses"] if job.model.divides_heads(tensor * context) else ["ring"]
    return [method for method in fits if wanted in (None, method)]


def shapes(job: Job) -> list[Shape]:
    """One stage per rank and two in a V, or as many as are pinned: two of them with both placements."""
    pinned, method = job.layout.virtual, job.schedule
    every: list[Shape] = [(1, False), (2, True), (2, False)]
    shapes = every if pinned is None else [shape for shape in every if shape[0] == pinned] or [(pinned, False)]
    if method is None or method in SEARCHES:
        return shapes
    return [shape for shape in shapes if shape[1] == (method in V_ORDERS)] or shapes


def tensor_degrees(job: Job, order: Iterable[Site]) -> list[int]:
    """Powers of two that divide heads and MLP, within a machine of every site of `order`; or the pinned degree."""
    if job.layout.tensor is not None:
        return [job.layout.tensor]
    most = min(min(site.devices_per_machine, site.num_devices) for site in order)
    return [t for t in _powers_of_two(most) if not job.model.num_heads % t and not job.model.ffn_hidden % t]


def data_degrees(job: Job, most: int) -> list[int]:
    """Numbers of replicas up to `most` that divide the batch; or the pinned one."""
    batch = job.training.global_batch
    pinned = job.layout.data
    return [d for d in ([pinned] if pinned else range(1, most + 1)) if d <= most and batch % d == 0]


def microbatches(job: Job, data: int) -> list[tuple[int, int]]:
    """(microbatch size, number of microbatches) that make up a replica's share of the batch."""
    share = job.training.global_batch // data
    count, size = job.layout.num_microbatches, job.training.microbatch_size
    sizes = [size] if size else [share // count] if count else MICROBATCH_SIZES
    pairs = [(s, share // s) for s in sizes if s and share % s == 0]
    return [(s, m) for s, m in pairs if count in (None, m)]


def pipeline_degrees(job: Job, order: Sequence[Site], most: int, virtual: int, fewest: int | None = None) -> list[int]:
    """Numbers of pipeline ranks up to `most`, at least one per site of `order`, or `fewest`."""
    pins = job.layout
    wanted = pins.pipeline
    if pins.layers is not None:
        num_ranks, rest = divmod(len(pins.layers), virtual)
        wanted = num_ranks if not rest and wanted in (None, num_ranks) else 0
    if wanted is not None:
        return [wanted] if 0 < wanted <= most else []
    return [
        p for p in range(fewest or len(order), min(most, job.model.num_layers // virtual) + 1) if p <= 16 or p % 4 == 0
    ]


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _why_none(job: Job) -> str:
    pins = job.layout
    if pins.replicas == "across" and (obstacle := why_no_replicas(job)):
        return f'layout.replicas = "across": {obstacle}'
    sequences = (pins.num_microbatches or 0) * (job.training.microbatch_size or 0)
    data = pins.data or (job.training.global_batch // sequences if sequences else 1)
    needed = (pins.pipeline or 1) * (pins.tensor or 1) * data
    if needed > job.cluster.num_devices:
        return (
            f"layout: pipeline {pins.pipeline or 1} x data {data} x tensor {pins.tensor or 1} needs {needed} "
            f"devices, the cluster has {job.cluster.num_devices}; add {needed - job.cluster.num_devices} devices or "
            "pin less"
        )
    if pins.replicas == "across":
        return (
            'layout.replicas = "across": data and training.global_batch must be multiples of the number of sites, and '
            "every site must have pipeline x tensor devices for each of its replicas"
        )
    return (
        f"layout: no placement of the pinned degrees on the {len(job.cluster.sites)} sites: every pipeline rank needs "
        f"its {(pins.tensor or 1) * (pins.data or 1)} devices on one site, every site in the order at least one rank, "
        f"and every stage at least one of the {job.model.num_layers} layers"
    )


def why_no_replicas(job: Job) -> str:
    """The key or link that keeps the job's sites from having a whole pipeline each; empty if nothing does."""
    pairs = list(combinations([site for _, site in job.used_sites()], 2))
    if not pairs:
        return "replicas at each of several sites need two sites at least"
    alike = [(a, b) for a, b in pairs if not differing_keys(a, b)]
    if any(missing_link(job.cluster, pair) is None for pair in alike):
        return ""  # two sites are a ring, and every ring has two that are
    if alike:
        source, target = missing_link(job.cluster, alike[0]) or (alike[0][0].name, alike[0][1].name)
        return f"replicas at each of several sites need links both ways: there is none from {source} to {target}"
    told = [f"{a.name} and {b.name} differ in {', '.join(differing_keys(a, b))}" for a, b in pairs[:MAX_PAIRS_TOLD]]
    more = f"; and {len(pairs) - MAX_PAIRS_TOLD} further pairs" if len(pairs) > MAX_PAIRS_TOLD else ""
    return f"replicas at each of several sites need sites that are alike: {'; '.join(told)}{more}"
