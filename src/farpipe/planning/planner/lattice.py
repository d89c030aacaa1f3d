"""All degrees that a request leaves open as one table, and about what a step takes at each, on each order of sites.

What a layer costs is asked of the cost model once for each kind of site, tensor degree and microbatch size; everything
else is closed forms over arrays (`lattice_kernel`). The estimates order the search and make quotes; they are no bounds.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from farpipe.core.errors import InputError
from farpipe.core.spec import ContextExchange, Job
from farpipe.planning.cost import JobCosts, Layout
from farpipe.planning.planner.candidates import Candidate, context_exchanges, num_stages, placed, shapes
from farpipe.planning.planner.lattice_tables import (
    Bounds,
    Floats,
    Ints,
    LatticeTables,
    LinkTable,
    OrderTable,
    Question,
    Rows,
    SiteTable,
    Split,
    most_tensor,
    new_scratch,
    rows_of,
    tables_of,
)
from farpipe.planning.planner.partition import coarse_modes
from farpipe.planning.planner.site_sets import Left, Sites, SiteSet


class Estimate(NamedTuple):
    """One point of the lattice with about the seconds of its step."""

    step_s: float
    site_set: SiteSet
    layout: Layout
    in_v: bool


class Lattice(Sites):
    """The lattice of one job (its training decided) over the sites of its cluster; costs are asked for once."""

    def __init__(self, job: Job, costs: JobCosts) -> None:
        if job.data.packing is not None:
            raise InputError(
                f"data.packing = {job.data.packing!r}: layouts are compared for sequences of one length only; plan the "
                "documents (`farpipe plan`, `planning.plan`), or leave out data.packing"
            )
        super().__init__(_measured_only(job, costs), job.training.tokens_per_step)
        self.costs = costs
        self.most_tensor = np.array([most_tensor(job, site) for site in self.sites])
        self._exchanges: dict[Split, ContextExchange] = {}

    @cached_property
    def rows(self) -> Rows:
        """Every combination of degrees that the pins, the batch and all devices of the cluster allow."""
        return rows_of(self.job, self.sites, self._table_rows)

    @cached_property
    def _table_rows(self) -> dict[Split, int]:
        """Rows of the tables; filled as rows of degrees are made."""
        return {}

    @cached_property
    def _splits(self) -> list[Split]:
        """The split of every row of the tables."""
        return list(self._table_rows)

    @cached_property
    def tables(self) -> LatticeTables:
        """Costs by kind of site and row, as `lattice_kernel.estimate` reads them."""
        return tables_of(self.job, self.costs, self.kinds, self.rows, self._table_rows, self.one_rank)

    def one_rank(self, split: Split, data: int) -> Layout:
        """Layout of one rank and one microbatch."""
        tensor, context, expert, size = split
        return Layout(1, data, tensor, 1, size, 1, (), context, self._exchange(split), expert)

    def _exchange(self, split: Split) -> ContextExchange:
        """Fastest method of sharing a sequence, as a layer on the first kind of site tells."""
        if split not in self._exchanges:
            fits = context_exchanges(self.job, split.tensor, split.context)
            fastest = min(fits, key=partial(self._layer_s, split)) if len(fits) > 1 else fits[0]
            self._exchanges[split] = fastest
        return self._exchanges[split]

    def _layer_s(self, split: Split, exchange: ContextExchange) -> float:
        at, site = Layout(1, 1, split.tensor, 1, split.size, 1, (), split.context, exchange), self.kinds[0]
        none, one = self.costs.apart(at, site, coarse_modes(self.costs, [site])[0], embedding=False, head=False)
        return one.seconds - none.seconds

    @property
    def allow(self) -> tuple[bool, bool]:
        """(True if one stage per rank is open, True if two in a V are)."""
        open_shapes = shapes(self.job)
        return any(not in_v for _, in_v in open_shapes), any(in_v for _, in_v in open_shapes)

    @property
    def _virtual(self) -> int:
        """Stages on each rank where they are in no V."""
        return self.job.layout.stages_per_rank or 1

    def estimates(
        self,
        left: Left,
        most: int,
        slack: float = 1.3,
        max_devices: int | None = None,
        shared: bool = False,
        every_order: bool = False,
    ) -> list[list[Estimate]]:
        """The `most` best points of every site set that works, the best first; in the order of `site_sets`.

        `slack` and `shared` as for `lattice_kernel.estimate`: the larger the slack, the more points that are worse than
        the best are known; shared, site sets are left out that are worse than the best of all by so much.
        """
        site_sets = self.site_sets(left, every_order)
        if not site_sets or not self.rows.table.size:
            return []
        step_s, points = self._estimates(site_sets, left, (slack, shared), most, max_devices)
        found = [
            [self._estimate(site_set, *point) for point in zip(seconds, at, strict=True) if math.isfinite(point[0])]
            for site_set, seconds, at in zip(site_sets, step_s.tolist(), points.tolist(), strict=True)
        ]
        return [of_set for of_set in found if of_set]

    def _estimates(
        self, site_sets: Sequence[SiteSet], left: Left, limits: tuple[float, bool], most: int, max_devices: int | None
    ) -> tuple[Floats, Ints]:
        """The least estimates of every site set, the fastest first, and their points, 2 x row + `in_v`: [O, most]."""
        from farpipe.planning.planner import lattice_kernel  # here, for numba takes a third of a second to import

        compiled: Any = lattice_kernel.estimate
        width = max(len(site_set.order) for site_set in site_sets)
        asked = OrderTable(
            np.array([site_set.order + (-1,) * (width - len(site_set.order)) for site_set in site_sets]),
            np.array([len(site_set.order) for site_set in site_sets]),
            np.array([max(1, len(site_set.homes)) for site_set in site_sets]),
            np.array([self._ring(site_set.homes, left) for site_set in site_sets]),
        )
        sites = SiteTable(left.num_devices, self.kind_of_site, self.most_tensor)
        allowed = np.iinfo(np.int64).max if max_devices is None else max_devices
        bounds = Bounds(allowed, *self.allow, self._virtual, *num_stages(self.job), *limits)
        best = np.empty((len(site_sets), most)), np.zeros((len(site_sets), most), np.int64)
        links = LinkTable(self.latency_s, left.rate)
        scratch = new_scratch(self.tables.stages.layer_s, width)
        compiled(asked, Question(*self._scanned, sites, links, self.tables, bounds), best, scratch)
        return best

    @cached_property
    def _scanned(self) -> tuple[Ints, Ints]:
        """`rows` as the kernel reads them, [V, 7], and the order in which it scans them: the least work first.

        Rows whose ranks can't hold all layers at any site, with one microbatch in flight, are left out.
        """
        by_work = np.argsort(self._least_work_s(), kind="stable")
        return np.stack(self.rows, axis=1), by_work[self._most_layers()[by_work] >= self.job.model.num_layers]

    def _most_layers(self) -> Floats:
        """Layers that the memory of all ranks holds, of every row, with one microbatch in flight: [V]."""
        rows, stages, memory = self.rows, self.tables.stages, self.tables.stages.memory
        state_bytes = stages.state_bytes * memory.layer_params[rows.table]
        most = np.zeros(rows.table.size)
        for kind, mode in np.ndindex(memory.layer_bytes.shape[0], memory.layer_bytes.shape[2]):
            each = state_bytes + memory.layer_bytes[kind, rows.table, mode]
            free = memory.limit_bytes[kind] - memory.working_bytes[kind, rows.table, mode]
            most = np.maximum(most, rows.pipeline * np.floor(free / each + 1e-9))
        return most

    def _least_work_s(self) -> Floats:
        """Work of every row with its bubble on the first kind of site, but for the number of layers: [V]."""
        from farpipe.planning.planner.lattice_kernel import V_BUBBLE

        rows, layer_s = self.rows, self.tables.stages.layer_s[0]
        f, b, w = layer_s[:, 0].T
        idle = np.minimum(V_BUBBLE, np.maximum(0.0, f + b - 2 * w) / (f + b + w))[rows.table]
        low_s = layer_s.sum(axis=2).min(axis=1)[rows.table]
        work_s: Floats = (rows.num_microbatches + (rows.pipeline - 1) * idle) * low_s / rows.pipeline
        return work_s

    def candidate(self, estimate: Estimate) -> Candidate | None:
        """The candidate of an estimate on the whole cluster; None where it does not fit there after all."""
        order = [self.sites[index] for index in estimate.site_set.order]
        return placed(self.job, order, estimate.layout, estimate.in_v)

    def candidates(self) -> Iterator[Candidate]:
        """The candidates of all points on the best order of every set of sites, whether or not memory is enough."""
        rows = self.rows
        for site_set in self.site_sets(self.whole):
            most_tensor = self.most_tensor[list(site_set.sites)].min()
            inside = (rows.data == rows.inside * max(1, len(site_set.homes))) & (rows.tensor <= most_tensor)
            for v in np.flatnonzero(inside).tolist():
                for in_v in (
                    shape for shape in (False, True) if self.allow[shape] and (rows.pipeline[v] > 1 or not shape)
                ):
                    found = self.candidate(self._estimate(site_set, math.inf, 2 * v + in_v))
                    if found is not None:
                        yield found

    def _ring(self, homes: Sequence[int], left: Left) -> tuple[float, float]:
        ring = list(zip(homes, (*homes[1:], *homes[:1]), strict=True))
        if not ring:
            return 0.0, 1.0
        return max(float(self.latency_s[pair]) for pair in ring), min(float(left.rate[pair]) for pair in ring)

    def _estimate(self, site_set: SiteSet, step_s: float, index: int) -> Estimate:
        v, in_v = index // 2, bool(index % 2)
        rows = self.rows
        names = tuple(self.sites[home].name for home in site_set.homes)
        virtual = 2 if in_v else self._virtual
        split = self._splits[rows.table[v]]
        degrees = (int(rows.pipeline[v]), int(rows.data[v]), split.tensor, virtual, split.size)
        count = int(rows.num_microbatches[v])
        layout = Layout(*degrees, count, names, split.context, self._exchange(split), split.expert)
        return Estimate(step_s, site_set, layout, in_v)


def _measured_only(job: Job, costs: JobCosts) -> Job:
    """A profile tells of one device: with one, layers are not divided over several unless the job pins that."""
    open_keys = [key for key in ("tensor", "context") if getattr(job.layout, key) is None]
    if not costs.profiles or not open_keys:
        return job
    return job.model_copy(update={"layout": job.layout.model_copy(update=dict.fromkeys(open_keys, 1))})
