"""All degrees that a request leaves open as one table, and about what a step takes at each, on each order of sites.

What a layer costs is asked of the cost model once for each kind of site, tensor degree and microbatch size; everything
else is closed forms over arrays (`lattice_kernel`). The estimates order the search and make quotes; they are no bounds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.cost import JobCosts, Layout, memory
from farpipe.cost.transfer import narrowed_bytes, rank_link, replica_link, ring_bytes
from farpipe.plan.candidates import data_degrees, microbatches, pipeline_degrees, shapes, tensor_degrees
from farpipe.plan.placement import MAX_SITES
from farpipe.plan.site_paths import best_paths
from farpipe.plan.stage_modes import coarse_modes
from farpipe.spec import Cluster, Job, Site

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_ROWS: Final = 200_000


class Rows(NamedTuple):
    """Degrees, one combination per row."""

    tensor: Ints
    inside: Ints
    """Replicas of a rank on its own site."""
    num_microbatches: Ints
    pipeline: Ints
    data: Ints
    """Replicas at all sites."""
    table: Ints
    """Row of the tables: tensor degree and microbatch size."""


class Use(NamedTuple):
    """One use of sites: a pipeline over `order`, or whole pipelines at each of `homes`, one of which is `order`."""

    order: tuple[int, ...]
    homes: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """``alone``, ``pipelines`` over several sites, or ``replicas`` at several."""
        return "replicas" if self.homes else "alone" if len(self.order) == 1 else "pipelines"


class Promise(NamedTuple):
    """One point of the lattice and about what a step takes there."""

    step_s: float
    use: Use
    layout: Layout
    in_v: bool


@dataclass(frozen=True)
class Left:
    """The rest of a cluster: devices per site and bytes per second per directed link, by the sites' numbers."""

    num_devices: Ints
    rate: Floats
    """[S, S]; 0 where there is no link."""


class Lattice:
    """The lattice of one job (its training decided) over the sites of its cluster; costs are asked for once."""

    def __init__(self, job: Job, costs: JobCosts) -> None:
        self.job, self.costs = _measured_only(job, costs), costs
        self.sites = tuple(site for _, site in job.used_sites())
        self.number = {site.name: index for index, site in enumerate(self.sites)}
        self.kind_of_site, self._kinds = _kinds(self.sites)
        self.most_tensor = np.array([_most_tensor(job, site) for site in self.sites])
        self._last: tuple[Left, list[list[int]]] | None = None
        self._alike: dict[tuple[int, int], bool] = {}

    @cached_property
    def latency_s(self) -> Floats:
        """[S, S] of every directed link."""
        latency = np.zeros((len(self.sites), len(self.sites)))
        for link in _links(self.job.cluster, self.number):
            latency[self.number[link.source], self.number[link.target]] = link.latency_s
        return latency

    @cached_property
    def whole(self) -> Left:
        """All of the cluster."""
        rate = np.zeros((len(self.sites), len(self.sites)))
        for link in _links(self.job.cluster, self.number):
            rate[self.number[link.source], self.number[link.target]] = link.bandwidth_bytes_per_s
        return Left(np.array([site.num_devices for site in self.sites]), rate)

    def left(self, devices: Mapping[str, int], bytes_per_s: Mapping[str, float]) -> Left:
        """The rest of a cluster where these figures replace its own; names of sites and of links (``a>b``)."""
        num_devices, rate = self.whole.num_devices.copy(), self.whole.rate.copy()
        for name, number in devices.items():
            if name in self.number:
                num_devices[self.number[name]] = max(0, number)
        for name, value in bytes_per_s.items():
            source, _, target = name.partition(">")
            if source in self.number and target in self.number:
                rate[self.number[source], self.number[target]] = max(0.0, value)
        return Left(num_devices, rate)

    @cached_property
    def rows(self) -> Rows:
        """Every combination of degrees that the pins, the batch and all devices of the cluster allow."""
        return _rows(self.job, self.sites, self._table_rows)

    @cached_property
    def _table_rows(self) -> dict[tuple[int, int], int]:
        """By tensor degree and microbatch size; filled as rows are made."""
        return {}

    @cached_property
    def _sizes(self) -> Ints:
        """[V]: sequences in a microbatch."""
        of_row = {row: size for (_, size), row in self._table_rows.items()}
        return np.array([of_row[int(row)] for row in self.rows.table])

    @cached_property
    def tables(self) -> tuple[Any, ...]:
        """The arrays that `lattice_kernel.estimate` reads."""
        return _tables(self)

    @property
    def kinds(self) -> Sequence[Site]:
        """One site of each kind."""
        return self._kinds

    def likeness(self, site: int) -> tuple[int, int]:
        """Equal for sites that differ in name, prices and links alone."""
        return int(self.kind_of_site[site]), self.sites[site].num_devices

    @property
    def allow(self) -> tuple[bool, bool]:
        """True for each of one stage per rank and two in a V that is open."""
        open_shapes = shapes(self.job)
        return any(not in_v for _, in_v in open_shapes), any(in_v for _, in_v in open_shapes)

    def uses(self, left: Left) -> list[Use]:
        """The best order of every set of sites for one pipeline, and every set for whole pipelines at each."""
        wanted, pinned = self.job.layout.replicas, self.job.layout.sites
        found: list[Use] = []
        if wanted != "across":
            found += [Use(tuple(path)) for path in self._paths(left, pinned)]
        if wanted != "inside":
            found += self._rings(left, pinned)
        return found

    def _paths(self, left: Left, pinned: Sequence[str] | None) -> list[list[int]]:
        if pinned is not None:
            path = [self.number[name] for name in pinned]
            linked = all(left.rate[a, b] > 0 and left.rate[b, a] > 0 for a, b in pairwise(path))
            return [path] if linked else []
        return self._best_paths(left)

    def _best_paths(self, left: Left) -> list[list[int]]:
        """For every set of sites its best order; those of the `left` that was asked for last are kept."""
        if self._last is None or self._last[0] is not left:
            self._last = left, best_paths(self._weight(left), left.num_devices, MAX_SITES)
        return self._last[1]

    def _weight(self, left: Left) -> Floats:
        """Seconds that a link takes of a step, about: all activations of the batch once, and its latency."""
        training = self.job.training
        sent = training.tokens_per_step * self.job.model.hidden * memory.element_bytes(training.precision)
        with np.errstate(divide="ignore"):
            return np.where(left.rate > 0, self.latency_s + sent / left.rate, np.inf)

    def _rings(self, left: Left, pinned: Sequence[str] | None) -> list[Use]:
        """Sets of alike sites around which there are links, the smallest first in each."""
        found = []
        for path in self._best_paths(left) if len(self.sites) > 1 else []:
            ring = list(zip(path, path[1:] + path[:1], strict=True))
            linked = len(path) > 1 and all(left.rate[a, b] > 0 and left.rate[b, a] > 0 for a, b in ring)
            if not linked or (pinned is not None and {self.sites[index].name for index in path} != set(pinned)):
                continue
            if all(self._are_alike(path[0], other) for other in path[1:]):
                smallest = min(path, key=lambda index: left.num_devices[index])
                found.append(Use((smallest,), tuple(path)))
        return found

    def _are_alike(self, one: int, other: int) -> bool:
        """True if a whole pipeline at one of two sites stands for one at the other."""
        from farpipe.plan.placement import differing_keys

        if (one, other) not in self._alike:
            self._alike[one, other] = not differing_keys(self.sites[one], self.sites[other])
        return self._alike[one, other]

    def promises(
        self, left: Left, most: int, slack: float = 1.3, max_devices: int | None = None, shared: bool = False
    ) -> list[list[Promise]]:
        """For every use of sites that works its `most` best points, the best first; the uses as `uses` gives them.

        `slack` and `shared` as for `lattice_kernel.estimate`: the larger the slack, the more points that are worse than
        the best are known; shared, uses are left out that are worse than the best of all uses by so much.
        """
        uses = self.uses(left)
        if not uses or not self.rows.table.size:
            return []
        step_s, points = self._estimates(uses, left, (slack, shared), most, max_devices)
        found = [
            [self._promise(use, *point) for point in zip(seconds, at, strict=True) if math.isfinite(point[0])]
            for use, seconds, at in zip(uses, step_s.tolist(), points.tolist(), strict=True)
        ]
        return [of_use for of_use in found if of_use]

    def _estimates(
        self, uses: Sequence[Use], left: Left, limits: tuple[float, bool], most: int, max_devices: int | None
    ) -> tuple[Floats, Ints]:
        """The least estimates of every use, the fastest first, and their points: [O, most]."""
        from farpipe.plan import lattice_kernel  # here, for numba takes a third of a second to import

        compiled: Any = lattice_kernel.estimate
        width = max(len(use.order) for use in uses)
        orders = np.array([use.order + (-1,) * (width - len(use.order)) for use in uses])
        sizes = np.array([len(use.order) for use in uses])
        times = np.array([max(1, len(use.homes)) for use in uses])
        ring = np.array([self._ring(use.homes, left) for use in uses])
        sites = (left.num_devices, self.kind_of_site, self.most_tensor)
        step_s, points = np.empty((len(uses), most)), np.zeros((len(uses), most), np.int64)
        allowed = np.iinfo(np.int64).max if max_devices is None else max_devices
        table, links, bounds = self._table, (self.latency_s, left.rate), (self.allow, *limits)
        compiled(orders, sizes, times, ring, *table, allowed, sites, links, self.tables, *bounds, step_s, points)
        return step_s, points

    @cached_property
    def _table(self) -> tuple[Ints, Ints]:
        """`rows` as the kernel reads them, [V, 6], and the order in which it looks at them: the least work first."""
        from farpipe.plan import lattice_kernel

        least_s: Any = lattice_kernel.least_work_s
        table = np.stack(self.rows, axis=1)
        return table, np.argsort(least_s(table, self.tables[0][0]), kind="stable")

    def _ring(self, homes: Sequence[int], left: Left) -> tuple[float, float]:
        ring = list(zip(homes, (*homes[1:], *homes[:1]), strict=True))
        if not ring:
            return 0.0, 1.0
        return max(float(self.latency_s[pair]) for pair in ring), min(float(left.rate[pair]) for pair in ring)

    def _promise(self, use: Use, step_s: float, index: int) -> Promise:
        v, in_v = index // 2, bool(index % 2)
        rows = self.rows
        names = tuple(self.sites[home].name for home in use.homes)
        virtual = 2 if in_v else (self.job.layout.virtual or 1)
        degrees = (int(rows.pipeline[v]), int(rows.data[v]), int(rows.tensor[v]), virtual)
        layout = Layout(*degrees, int(self._sizes[v]), int(rows.num_microbatches[v]), names)
        return Promise(step_s, use, layout, in_v)


def _measured_only(job: Job, costs: JobCosts) -> Job:
    """A profile tells of one device: with one, layers are not divided over several unless the job pins that."""
    if not costs.profiles or job.layout.tensor is not None:
        return job
    return job.model_copy(update={"layout": job.layout.model_copy(update={"tensor": 1})})


def _links(cluster: Cluster, number: Mapping[str, int]) -> Iterator[Any]:
    return (link for link in cluster.links if link.source in number and link.target in number)


def _kinds(sites: Sequence[Site]) -> tuple[Ints, list[Site]]:
    """The kind of every site, and one site of each kind; the same but for name, devices and prices."""
    kinds: list[Site] = []
    bare: list[Site] = []
    numbers = []
    for site in sites:
        same = site.model_copy(update={"name": "", "num_devices": 0, "prices": None})
        if same not in bare:
            bare.append(same)
            kinds.append(site)
        numbers.append(bare.index(same))
    return np.array(numbers), kinds


def _most_tensor(job: Job, site: Site) -> int:
    return job.layout.tensor or min(site.devices_per_machine, site.num_devices)


def _rows(job: Job, sites: Sequence[Site], table: dict[tuple[int, int], int]) -> Rows:
    num_devices = sum(site.num_devices for site in sites)
    homes = sorted({1, *range(2, min(len(sites), MAX_SITES) + 1)} if job.layout.replicas != "inside" else {1})
    found: set[tuple[int, ...]] = set()
    degrees = sorted({t for site in sites for t in tensor_degrees(job, [site])})
    for tensor in degrees:
        for data in data_degrees(job, num_devices // tensor):
            for size, count in microbatches(job, data):
                row = table.setdefault((tensor, size), len(table))
                for times in (h for h in homes if data % h == 0):
                    inside = data // times
                    most = num_devices // (tensor * (inside if times == 1 else data))
                    for p in pipeline_degrees(job, sites, most, job.layout.virtual or 1, fewest=1):
                        found.add((tensor, inside, count, p, data, row))
    by_devices = sorted(found, key=lambda r: (-r[0] * r[4] * r[3], r))[:MAX_ROWS]
    columns = np.array(by_devices, np.int64).reshape(-1, 6).T
    return Rows(*(np.ascontiguousarray(column) for column in columns))


def _tables(lattice: Lattice) -> tuple[Any, ...]:
    job, costs, rows = lattice.job, lattice.costs, lattice.rows
    model, training = job.model, job.training
    modes = [coarse_modes(costs, [site]) for site in lattice.kinds]
    num_modes = max(map(len, modes))
    shape = (len(lattice.kinds), len(lattice._table_rows))
    layer_s, layer_bytes = np.full((*shape, num_modes, 3), 1e18), np.full((*shape, num_modes), 1e30)
    working = np.zeros((*shape, num_modes))
    base_s, ends_s, hop_s = np.zeros(shape), np.zeros((*shape, 2)), np.zeros(shape)
    ends_bytes, message = np.zeros((shape[1], 2)), np.zeros(shape[1])
    for (tensor, size), row in lattice._table_rows.items():
        at = Layout(1, 1, tensor, 1, size, 1)
        boundary = memory.boundary_bytes(model, training, at)
        message[row] = narrowed_bytes(boundary, training)
        for kind, site in enumerate(lattice.kinds):
            if tensor > min(site.devices_per_machine, site.num_devices) and job.layout.tensor is None:
                continue
            for index, mode in enumerate(modes[kind]):
                none, one = costs.apart(at, site, mode, embedding=False, head=False)
                layer_s[kind, row, index] = [
                    getattr(one, name) - getattr(none, name) for name in ("forward_s", "input_grad_s", "weight_grad_s")
                ]
                layer_bytes[kind, row, index] = one.activation_bytes - none.activation_bytes
                working[kind, row, index] = one.working_bytes
            base_s[kind, row] = none.seconds
            for end, (embedding, head) in enumerate(((True, False), (False, True))):
                cost, _ = costs.apart(at, site, modes[kind][0], embedding=embedding, head=head)
                ends_s[kind, row, end] = cost.seconds - none.seconds
                ends_bytes[row, end] = cost.activation_bytes - none.activation_bytes
            effective = rank_link(site, costs.calibration(site), at, 0, 1)
            hop_s[kind, row] = effective.seconds(boundary)
    state = _per_row(rows, lambda at: memory.state_bytes(1.0 / at.tensor, training, at))
    sync = np.stack([_sync(lattice, site) for site in lattice.kinds])
    ends_params = _ends_params(model)
    limits = np.array([site.plannable_bytes for site in lattice.kinds])
    overlap = min(costs.calibration(site).overlap_fraction for site in lattice.kinds) if training.overlap else 0.0
    bytes_of = (layer_bytes, working, ends_bytes, float(model.num_layer_params), ends_params, limits)
    step = (layer_s, base_s, ends_s, state, model.num_layers, sync, bytes_of, overlap)
    exchanged = float(model.num_params * memory.gradient_bytes(training.precision))
    overhead_s = max(costs.calibration(site).step_overhead_s for site in lattice.kinds)
    return step, message, hop_s, exchanged, overhead_s


def _ends_params(model: Any) -> Floats:
    """Parameters of the embedding's and of the head's stage besides layers; a tied head has a copy."""
    copy = model.vocab_size * model.hidden if model.tied_embeddings else 0
    return np.array([model.num_embedding_params, model.num_head_params + copy], np.float64)


def _per_row(rows: Rows, figure: Any) -> Floats:
    """[V]: `figure` of a layout with the row's tensor and data degrees, asked for once each."""
    known: dict[tuple[int, int], float] = {}
    found = np.empty(rows.table.size)
    for index, key in enumerate(zip(rows.tensor.tolist(), rows.data.tolist(), strict=True)):
        if key not in known:
            known[key] = figure(Layout(1, key[1], key[0], 1, 1, 1))
        found[index] = known[key]
    return found


def _sync(lattice: Lattice, site: Site) -> Floats:
    """[V, 2]: latency of the replicas' reduction inside `site`, and seconds per parameter of one device."""
    calibration, precision = lattice.costs.calibration(site), lattice.job.training.precision
    known: dict[tuple[int, int], tuple[float, float]] = {}
    found = np.zeros((lattice.rows.table.size, 2))
    for index, key in enumerate(zip(lattice.rows.tensor.tolist(), lattice.rows.inside.tolist(), strict=True)):
        if key not in known:
            effective = replica_link(site, calibration, Layout(1, key[1], key[0], 1, 1, 1))
            size = ring_bytes("all-reduce", memory.gradient_bytes(precision), key[1])
            known[key] = (effective.latency_s, size / effective.bandwidth_bytes_per_s)
        found[index] = known[key]
    return found
