"""Tables of the lattice: degrees that a request leaves open, a row for every combination, and costs that rows share."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.spec import Job, Model, Site
from farpipe.core.step import occupied_s
from farpipe.planning.cost import JobCosts, Layout, memory
from farpipe.planning.cost.adapters import trained_model_params
from farpipe.planning.cost.compute import device_layer_params
from farpipe.planning.cost.transfer import narrowed_bytes, rank_link, replica_link, ring_bytes
from farpipe.planning.planner.candidates import (
    context_degrees,
    context_exchanges,
    data_degrees,
    expert_degrees,
    microbatches,
    pipeline_degrees,
    shapes,
    shares_experts,
    tensor_degrees,
)
from farpipe.planning.planner.partition import coarse_modes
from farpipe.planning.workload.layout import MAX_SITES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OneRank = Callable[..., Layout]
"""Layout of one rank, by its split and its number of replicas."""

MAX_STAGES: Final = 1024
"""Largest number of ranks of a point."""
MAX_ROWS: Final = 200_000
"""Largest number of combinations; those with the most devices are kept."""


class Split(NamedTuple):
    """Degrees and size on which the costs of a layer depend: a row of the tables."""

    tensor: int
    context: int
    expert: int
    size: int
    """Sequences in a microbatch."""


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
    """Row of the tables, see `Split`."""
    width: Ints
    """Devices of one replica of a rank."""


class OrderTable(NamedTuple):
    """Site sets as orders of sites; O of them, of L sites at most."""

    orders: Ints
    """[O, L]: sites by number, in pipeline order."""
    sizes: Ints
    """[O]: number of sites in each order."""
    times: Ints
    """[O]: sites that hold a whole pipeline each; 1: a pipeline over the order."""
    ring: Floats
    """[O, 2]: latency and bytes per second of the slowest link around the sites with whole pipelines."""


class SiteTable(NamedTuple):
    """Devices that are left, kind, and largest tensor degree, by site."""

    num_devices: Ints
    kind: Ints
    most_tensor: Ints


class LinkTable(NamedTuple):
    """Latency and bytes per second by source and target, [S, S]."""

    latency_s: Floats
    rate: Floats


class MemoryTable(NamedTuple):
    """Bytes and parameters that fill a device; [K] kinds of sites, [R] rows, [M] modes of recomputing."""

    layer_bytes: Floats
    """[K, R, M]: activations of one layer."""
    working_bytes: Floats
    """[K, R, M]: working memory."""
    ends_bytes: Floats
    """[R, 2]: activations of embedding and head."""
    layer_params: Floats
    """[R]: parameters of one layer, of all its tensor-parallel devices."""
    ends_params: Floats
    """[2]: parameters of embedding and head."""
    limit_bytes: Floats
    """[K]: bytes of a device that a plan may fill."""


class StageTable(NamedTuple):
    """Times and memory of stages; [V] rows of degrees, [K] kinds of sites, [R] rows of tables, [M] modes."""

    layer_s: Floats
    """[K, R, M, 3]: F, I and W of one layer."""
    base_s: Floats
    """[K, R]: fixed time of a stage."""
    ends_s: Floats
    """[K, R, 2]: embedding and head."""
    state_bytes: Floats
    """[V]: optimizer state, weights and gradient of one parameter."""
    num_layers: int
    sync: Floats
    """[K, V, 2]: latency of the replicas' reduction inside a site, and seconds per parameter of one device."""
    memory: MemoryTable
    overlap: float
    """Share of computing beside which collectives run."""


class LatticeTables(NamedTuple):
    """Costs that `lattice_kernel.estimate` reads."""

    stages: StageTable
    message_bytes: Floats
    """[R]: a message between stages, between sites."""
    hop_s: Floats
    """[K, R]: a message between stages inside a site."""
    exchanged_bytes: float
    """Gradients of the whole model."""
    overhead_s: float
    slowest: Floats
    """[V]: share of computing for which the slowest replica keeps the others waiting."""


class Bounds(NamedTuple):
    """Limits of the points that are estimated."""

    max_devices: int
    alone: bool
    """True if one stage per rank is open."""
    in_v: bool
    """True if two stages per rank in a V are open."""
    virtual: int
    """Stages on each rank where they are in no V."""
    fewest_stages: int
    most_stages: int
    slack: float
    """Times the best step up to which others are estimated."""
    shared: bool
    """True if the best is that of all orders so far, the last order first; else each order's own."""


class Scratch(NamedTuple):
    """Space for the ranks of one point."""

    kinds: Ints
    ranks: Ints
    travel_s: Floats
    extra_s: Floats
    stage_s: Floats
    most: Ints
    flights: Ints
    groups: tuple[Floats, Floats, Ints, Ints]
    """Stages that are identical, see `lattice_kernel._group`."""
    low_s: Floats
    """[R]: seconds of a layer on the fastest site of the order, by row of the tables."""
    idle: Floats
    """[R]: share of a stage's time that filling and draining takes for each rank, on the first site of the order."""
    counts: Ints
    """Ranks of every site of the order."""
    most_ranks: Ints
    """Ranks that every site of the order can have."""


class Question(NamedTuple):
    """All that estimates of a lattice need besides the orders of sites."""

    rows: Ints
    """[V, 7]: the columns of `Rows`."""
    scan: Ints
    """[V]: order in which rows are estimated, those with the least work first, so that the best are known early."""
    sites: SiteTable
    links: LinkTable
    tables: LatticeTables
    bounds: Bounds


def new_scratch(layer_s: Floats, num_sites: int) -> Scratch:
    """Space for pipelines of up to MAX_STAGES ranks over `num_sites`."""
    rows, modes = layer_s.shape[1], layer_s.shape[2]
    holds, count = np.empty((MAX_STAGES, modes), np.int64), np.empty(MAX_STAGES, np.int64)
    groups = (np.empty(MAX_STAGES), np.empty((MAX_STAGES, modes)), holds, count)
    ranks = (np.empty(MAX_STAGES, np.int64), np.empty(MAX_STAGES, np.int64), np.empty(MAX_STAGES))
    stages = (np.empty(MAX_STAGES), np.empty((MAX_STAGES, modes)), np.empty((MAX_STAGES, modes), np.int64))
    of_rows, of_sites = (np.empty(rows), np.empty(rows)), (np.empty(num_sites, np.int64), np.empty(num_sites, np.int64))
    return Scratch(*ranks, *stages, np.empty(MAX_STAGES, np.int64), groups, *of_rows, *of_sites)


def rows_of(job: Job, sites: Sequence[Site], table: dict[Split, int]) -> Rows:
    """Every combination of degrees that pins, batch and devices allow; fills `table`: the row of every split."""
    homes = sorted({1, *range(2, min(len(sites), MAX_SITES) + 1)} if job.layout.replicas != "inside" else {1})
    found: list[tuple[int, ...]] = []
    pipelines: list[list[int]] = []
    known: dict[int, list[int]] = {}
    for tensor, context in _shared_degrees(job, sites):
        width, num_devices = tensor * context, sum(site.num_devices // context for site in sites) * context
        for data in data_degrees(job, num_devices // width):
            most = num_devices // (width * data)
            if most not in known:
                known[most] = _pipeline_degrees(job, sites, most)
            for (size, count), expert in product(_microbatches(job, data, context), expert_degrees(job)):
                shared = partial(shares_experts, job, tensor=tensor, expert=expert)
                for times in (h for h in homes if data % h == 0 and shared(data // h * context)):
                    row = table.setdefault(Split(tensor, context, expert, size), len(table))
                    found.append((tensor, data // times, count, data, row, width))
                    pipelines.append(known[most])
    return _by_devices(found, pipelines)


def _by_devices(found: Sequence[tuple[int, ...]], pipelines: Sequence[Sequence[int]]) -> Rows:
    """The rows of degrees (tensor, inside, number of microbatches, data, table, width), each with each of its numbers
    of ranks, those with the most devices first."""
    each = (
        np.array(found, np.int64)
        .reshape(-1, 6)
        .repeat(np.array([len(ranks) for ranks in pipelines], np.int64), axis=0)
        .T
    )
    tensor, inside, count, data, row, width = each
    ranks = np.array([p for some in pipelines for p in some], np.int64)
    columns = (tensor, inside, count, ranks, data, row, width)
    chosen = np.lexsort((*columns[::-1], -width * data * ranks))[:MAX_ROWS]
    return Rows(*(np.ascontiguousarray(column[chosen]) for column in columns))


def _shared_degrees(job: Job, sites: Sequence[Site]) -> list[tuple[int, int]]:
    """Degrees of tensor and of context parallelism that go together."""
    tensor = sorted({t for site in sites for t in tensor_degrees(job, [site])})
    context = context_degrees(job, sum(site.num_devices for site in sites))
    return [(t, c) for t, c in product(tensor, context) if context_exchanges(job, t, c)]


def _microbatches(job: Job, data: int, context: int) -> list[tuple[int, int]]:
    """The `microbatches` of open sizes; the smallest alone where sequences are shared because the planner chose so.

    Half the sequences in a microbatch, each over half the devices, is the same work without an exchange.
    """
    every = microbatches(job, data)
    return every[:1] if context > 1 and job.layout.context is None else every


def _pipeline_degrees(job: Job, sites: Sequence[Site], most: int) -> list[int]:
    """Numbers of ranks of all shapes that are open; where layers are pinned, shapes differ in them."""
    open_shapes = {virtual for virtual, _ in shapes(job)} if job.layout.layers else {job.layout.stages_per_rank or 1}
    return sorted({p for virtual in open_shapes for p in pipeline_degrees(job, sites, most, virtual, fewest=1)})


def most_tensor(job: Job, site: Site) -> int:
    """Pinned tensor degree, or the devices of one machine of a site."""
    return job.layout.tensor or min(site.devices_per_machine, site.num_devices)


def tables_of(
    job: Job,
    costs: JobCosts,
    kinds: Sequence[Site],
    rows: Rows,
    row_of: Mapping[Split, int],
    one_rank: OneRank,
) -> LatticeTables:
    """The costs of a lattice: `kinds` has one site of each kind, `row_of` the row of every split.

    A layer costs `one` less `none`, stages with one layer and without.
    """
    training, modes = job.training, [coarse_modes(costs, [site]) for site in kinds]
    shape, num_modes = (len(kinds), len(row_of)), max(map(len, modes))
    times = (np.full((*shape, num_modes, 3), 1e18), np.zeros(shape), np.zeros((*shape, 2)))
    sizes = (np.full((*shape, num_modes), 1e30), np.zeros((*shape, num_modes)), np.zeros((shape[1], 2)))
    message, hop_s = np.zeros(shape[1]), np.zeros(shape)
    for split, row in row_of.items():
        at, tensor = one_rank(split, split.expert), split.tensor
        boundary = memory.boundary_bytes(job.model, training, at)
        message[row] = narrowed_bytes(boundary, training)
        for kind, site in enumerate(kinds):
            if tensor <= min(site.devices_per_machine, site.num_devices) or job.layout.tensor is not None:
                _fill(times, sizes, (kind, row), partial(costs.apart, at, site), modes[kind])
                hop_s[kind, row] = rank_link(site, costs.calibration(site), at, 0, 1).seconds(boundary)
    whole = [one_rank(split._replace(tensor=1), split.expert) for split in row_of]
    params = np.array([device_layer_params(job.model, at) for at in whole]), _ends_params(job.model)
    limits = np.array([site.plannable_bytes for site in kinds])
    splits = list(row_of)

    def layout_of(row: int, data: int) -> Layout:
        return one_rank(splits[row], data)

    def state_bytes(row: int, data: int) -> tuple[float]:
        return (memory.state_bytes(1.0 / splits[row].tensor, training, layout_of(row, data)),)

    state = _by_degrees(rows.table, rows.data, state_bytes)
    sync = np.stack([_sync(costs, job, site, rows, layout_of) for site in kinds])
    overlap = min(costs.calibration(site).overlap_fraction for site in kinds) if training.overlap else 0.0
    stages = StageTable(*times, state[:, 0], job.model.num_layers, sync, MemoryTable(*sizes, *params, limits), overlap)
    exchanged = trained_model_params(job.model, training) * memory.gradient_bytes(training)
    overhead_s = max(costs.calibration(site).step_overhead_s for site in kinds)
    return LatticeTables(stages, message, hop_s, exchanged, overhead_s, _slowest(costs, kinds, rows, splits))


def _slowest(costs: JobCosts, kinds: Sequence[Site], rows: Rows, splits: Sequence[Split]) -> Floats:
    """[V]: waiting for the slowest replica, as a share of computing."""
    laws = [costs.calibration(site) for site in kinds]

    def figures(row: int, data: int) -> tuple[float]:
        return (max(law.slowest(data * splits[row].context) for law in laws),)

    return _by_degrees(rows.table, rows.data, figures)[:, 0]


def _fill(
    times: tuple[Floats, Floats, Floats],
    sizes: tuple[Floats, Floats, Floats],
    at: tuple[int, int],
    apart: Any,
    modes: Any,
) -> None:
    """Enter the costs of stages at one kind of site and row; `apart` gives those without layers and with one."""
    (layer_s, base_s, ends_s), (layer_bytes, working_bytes, ends_bytes) = times, sizes
    for index, mode in enumerate(modes):
        none, one = apart(mode, embedding=False, head=False)
        names = ("forward_s", "input_grad_s", "weight_grad_s")
        layer_s[at][index] = [getattr(one, name) - getattr(none, name) for name in names]
        layer_bytes[at][index] = one.activation_bytes - none.activation_bytes
        working_bytes[at][index] = one.working_bytes
    base_s[at] = none.seconds
    for end, (embedding, head) in enumerate(((True, False), (False, True))):
        cost, _ = apart(modes[0], embedding=embedding, head=head)
        ends_s[at][end] = cost.seconds - none.seconds
        ends_bytes[at[1], end] = cost.activation_bytes - none.activation_bytes


def _ends_params(model: Model) -> Floats:
    """Parameters of the embedding's and of the head's stage besides layers; the last may have a copy of the first's."""
    copy = model.vocab_size * model.hidden if model.repeats_embedding else 0
    return np.array([model.num_embedding_params, model.num_head_params + copy], np.float64)


def _by_degrees(table: Ints, replicas: Ints, figures: Callable[[int, int], tuple[float, ...]]) -> Floats:
    """[V, n]: `figures` of each row's split and number of replicas, computed once each."""
    most = int(replicas.max(initial=0)) + 1
    pairs, row = np.unique(table * most + replicas, return_inverse=True)
    known = [figures(*divmod(pair, most)) for pair in pairs.tolist()]
    figures_of_rows: Floats = np.array(known, np.float64).reshape(len(known), -1)[row.ravel()]
    return figures_of_rows


def _sync(costs: JobCosts, job: Job, site: Site, rows: Rows, layout_of: Callable[[int, int], Layout]) -> Floats:
    """[V, 2]: latency of the replicas' reduction inside `site`, and seconds per parameter of one device."""
    calibration, size = costs.calibration(site), memory.gradient_bytes(job.training)

    def figures(row: int, inside: int) -> tuple[float, float]:
        at = layout_of(row, inside)
        effective = replica_link(site, calibration, at)
        return effective.latency_s, occupied_s(effective, ring_bytes("all-reduce", size, inside * at.context))

    return _by_degrees(rows.table, rows.inside, figures)
