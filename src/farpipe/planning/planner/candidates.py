"""Candidates: a layout on sites; what is decided before the search, what a job allows, neighbours in hill climbing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, ContextExchange, Job, Site
from farpipe.core.spec.training import Zero
from farpipe.core.strict import nearest
from farpipe.core.units import counted
from farpipe.planning.cost import Layout, Profile, round_robin, v_shape
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.planner.orders import V_ORDERS
from farpipe.planning.search import SEARCHES
from farpipe.planning.workload.layout import place_ranks

MICROBATCH_SIZES: Final = (1, 2, 4, 8, 16)
"""Sizes that are tried where the job pins neither the size nor the number of microbatches."""
SHARED_TOKENS: Final = 4096
"""Least tokens of a sequence on each of the devices that share it, where the planner chooses their number."""
FEWEST_TOKENS: Final = 1024
"""Least tokens as SHARED_TOKENS, where a step has fewer sequences than there are devices."""
MAX_EXPERT: Final = 64
"""Largest degree of expert parallelism that the planner chooses."""
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
    def kind(self) -> str:
        """``alone``, ``pipelines`` over several sites, or ``replicas`` at several."""
        return "alone" if len(self.order) == 1 else "replicas" if self.layout.replica_sites else "pipelines"

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

    @property
    def degrees(self) -> str:
        """Degrees, shape and microbatches in words."""
        at = self.layout
        degrees = f"pipeline {at.pipeline} x data {at.data} x tensor {at.tensor}"
        virtual = f", {at.virtual} stages per rank{' in a V' if self.in_v else ''}" if at.virtual > 1 else ""
        return f"{degrees}{virtual}{at.sharing}, {counted(at.num_microbatches, 'microbatch')} of {at.microbatch_size}"

    def __str__(self) -> str:
        return f"{self.where}: {self.degrees}"


def placed(job: Job, order: Sequence[Site], layout: Layout, in_v: bool, linked: bool = False) -> Candidate | None:
    """The candidate of a layout on sites in this order; None where it does not fit there.

    `linked`: links are known to be there.
    """
    fewest, most = num_stages(job)
    if not fewest <= layout.num_stages <= most:
        return None
    if not (linked or job.cluster.missing_link(order) is None):
        return None
    sites = place_ranks(order, layout.pipeline, layout.devices_per_rank)
    return None if sites is None else Candidate(layout, tuple(sites), in_v)


def num_stages(job: Job) -> tuple[int, int]:
    """Fewest and most stages of a pipeline: as many as there are layers, or those whose layers the job pins."""
    pinned = len(job.layout.layers or ())
    return (pinned, pinned) if pinned else (1, job.model.num_layers)


def allows(job: Job, order: Sequence[Site], layout: Layout) -> bool:
    """True if the job's pins and its batch allow the degrees of a layout on sites in this order."""
    at = layout
    return (
        at.tensor in tensor_degrees(job, order)
        and at.data in data_degrees(job, at.data)
        and not at.data % max(1, len(at.replica_sites))
        and (at.microbatch_size, at.num_microbatches) in microbatches(job, at.data)
        and at.pipeline in pipeline_degrees(job, order, at.pipeline, at.virtual)
        and at.context in context_degrees(job, job.cluster.num_devices)
        and at.context_exchange in context_exchanges(job, at.tensor, at.context)
        and shares_experts(job, at.num_shares, at.tensor, at.expert)
    )


def shares_experts(job: Job, num_shares: int, tensor: int, expert: int) -> bool:
    """True if `num_shares` devices that hold the same slice can share a layer's experts evenly; where the degree is
    pinned, also if only all of the tensor-parallel ones can."""
    return not num_shares % expert or (job.layout.expert is not None and not num_shares * tensor % expert)


def context_degrees(job: Job, num_devices: int) -> list[int]:
    """The pinned number of devices that share a sequence, or powers of two that leave each of them enough tokens.

    Of documents only a pin says: see `context_degrees_of_chunks`.
    """
    if job.layout.context is not None or job.data.packing is not None:
        return [job.layout.context or 1]
    length, batch = job.training.sequence_length, job.training.global_batch
    most = max(length // SHARED_TOKENS, min(length // FEWEST_TOKENS, num_devices // batch), 1)
    return [c for c in _powers_of_two(min(most, num_devices)) if c == 1 or length % (2 * c) == 0]


def context_degrees_of_chunks(job: Job, tensor: int, num_devices: int) -> list[int]:
    """The pinned number of devices that share a chunk, or powers of two, and parts of `num_devices`, that divide the
    heads (Ulysses)."""
    wanted = job.layout.context
    every = (
        sorted({*_powers_of_two(num_devices), *_divisors(num_devices)})
        if wanted is None
        else [wanted] * (wanted <= num_devices)
    )
    return [c for c in every if c == 1 or job.model.divides_heads(tensor * c)]


def expert_degrees(job: Job) -> list[int]:
    """The pinned number of devices that share a layer's experts, or powers of two that divide these."""
    if job.layout.expert is not None or job.model.experts is None:
        return [job.layout.expert or 1]
    number = job.model.experts.num_experts
    return [e for e in _powers_of_two(min(number, MAX_EXPERT)) if number % e == 0]


def context_exchanges(job: Job, tensor: int, context: int) -> list[ContextExchange]:
    """The pinned method, or both of those that heads and windows allow; a ring where nobody shares a sequence."""
    wanted = job.layout.context_exchange
    if context == 1:
        return ["ring"]
    ring: list[ContextExchange] = [] if job.model.has_windows(job.training.sequence_length) else ["ring"]
    fits: list[ContextExchange] = [*ring, "ulysses"] if job.model.divides_heads(tensor * context) else ring
    return [method for method in fits if wanted in (None, method)]


def shapes(job: Job) -> list[Shape]:
    """One stage per rank and two in a V, or as many as are pinned: two of them with both placements."""
    pinned, method = job.layout.stages_per_rank, job.schedule
    every: list[Shape] = [(1, False), (2, True), (2, False)]
    if job.training.cpu_offloading_num_layers:
        return every[:1]
    shapes = every if pinned is None else [shape for shape in every if shape[0] == pinned] or [(pinned, False)]
    if method is None or method in SEARCHES:
        return shapes
    return [shape for shape in shapes if shape[1] == (method in V_ORDERS)] or shapes


def tensor_degrees(job: Job, order: Iterable[Site]) -> list[int]:
    """Powers of two, and parts of a machine that are none, that divide heads and MLP, within a machine of every site of
    `order`; or the pinned degree."""
    if job.layout.tensor is not None:
        return [job.layout.tensor]
    most = min(min(site.devices_per_machine, site.num_devices) for site in order)
    twos = [t for t in _powers_of_two(most) if not job.model.num_heads % t]
    every = sorted({*twos, *(t for t in _divisors(most) if job.model.divides_heads(t))})
    return [t for t in every if not job.model.ffn_hidden % t]


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


def pipeline_degrees(
    job: Job, order: Sequence[Site], most: int, virtual: int, fewest: int | None = None, *, every: bool = False
) -> list[int]:
    """Numbers of pipeline ranks up to `most`, at least one per site of `order`, or `fewest`: above 16 multiples of 4,
    or `every` one."""
    pins = job.layout
    wanted = pins.pipeline
    if pins.layers is not None:
        num_ranks, rest = divmod(len(pins.layers), virtual)
        wanted = num_ranks if not rest and wanted in (None, num_ranks) else 0
    if job.training.cpu_offloading_num_layers:
        wanted = 1
    if wanted is not None:
        return [wanted] if 0 < wanted <= most else []
    return [
        p
        for p in range(fewest or len(order), min(most, job.model.num_layers // virtual) + 1)
        if every or p <= 16 or p % 4 == 0
    ]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


MAX_VIRTUAL: Final = 8
"""Largest number of stages on a rank that is tried without a pin."""


def neighbours(job: Job, best: Candidate, everything: bool) -> Iterator[Candidate]:
    """Candidates of other shapes; with `everything` the sites in reverse, and other sizes of microbatches, degrees and
    methods of sharing a sequence too."""
    if everything and job.layout.sites is None and best.kind == "pipelines":
        reverse = placed(job, [job.cluster.site(name) for name in best.order[::-1]], best.layout, best.in_v)
        yield from [reverse] if reverse is not None else []
    order = [job.cluster.site(name) for name in best.order] if not best.layout.replica_sites else list(best.sites[:1])
    for virtual, in_v in shapes(job):
        same = replace(best.layout, virtual=virtual)
        for layout in _resized(job, same) if everything else [same]:
            candidate = placed(job, order, layout, in_v)
            if candidate is not None and (layout.pipeline > 1 or virtual == 1):
                yield candidate
    for layout in interleaved(job, best.layout) if everything else []:
        candidate = placed(job, order, layout, in_v=False)
        if candidate is not None:
            yield candidate
    for layout in _traded(job, best.layout) if everything else []:
        candidate = placed(job, order, layout, best.in_v) if allows(job, order, layout) else None
        if candidate is not None and (layout.pipeline > 1 or not best.in_v):
            yield candidate


def _resized(job: Job, layout: Layout) -> Iterator[Layout]:
    for exchange in context_exchanges(job, layout.tensor, layout.context):
        yield replace(layout, context_exchange=exchange)
    if job.training.microbatch_size is not None or job.layout.num_microbatches is not None:
        return
    size, count = layout.microbatch_size, layout.num_microbatches
    if count % 2 == 0:
        yield replace(layout, microbatch_size=2 * size, num_microbatches=count // 2)
    if size % 2 == 0:
        yield replace(layout, microbatch_size=size // 2, num_microbatches=2 * count)


def interleaved(job: Job, layout: Layout) -> Iterator[Layout]:
    """The same with more than two stages on every rank, as many layers in each, embedding and head aside or counted as
    one each."""
    pins, ranks, num_layers = job.layout, layout.pipeline, job.model.num_layers
    fixed = pins.virtual is not None or pins.layers is not None or layout.num_microbatches % ranks
    if fixed or ranks == 1 or not (job.schedule is None or job.schedule in (*SEARCHES, "interleaved")):
        return
    for virtual in range(3, MAX_VIRTUAL + 1):
        if 0 in (num_layers % (ranks * virtual), (num_layers + 2) % (ranks * virtual)):
            yield replace(layout, virtual=virtual)


def _traded(job: Job, layout: Layout) -> Iterator[Layout]:
    """Layouts of as many devices, with half of one degree and twice another one."""
    for less, more in permutations(("pipeline", "data", "tensor", "context"), 2):
        if getattr(layout, less) % 2:
            continue
        other = replace(layout, **{less: getattr(layout, less) // 2, more: 2 * getattr(layout, more)})
        share, size = job.training.global_batch // other.data, layout.microbatch_size
        for same in dict.fromkeys([size, size * layout.data // other.data]):
            if same and share % same == 0:
                yield replace(other, microbatch_size=same, num_microbatches=share // same)


MAX_PLANNED_SITES: Final = 16
"""Largest number of sites that a search looks at, unless the job pins them."""
ZERO_STAGES: Final[tuple[Zero, ...]] = (1, 3)
"""Stages of ZeRO that are tried where the job leaves it open; the next one only if no layout fits with those before."""


def stages_of_zero(job: Job) -> tuple[Zero, ...]:
    """The stages of ZeRO to try: one stands for what the job names."""
    return ZERO_STAGES if job.training.zero == "auto" else ZERO_STAGES[:1]


def decided(job: Job, zero: Zero = 1) -> Job:
    """The job with this stage of ZeRO and with sequence parallelism where the user leaves them open.

    Under this cost model ZeRO-1 and sequence parallelism only save: ZeRO-1 sends what an all-reduce sends, the other
    moves what tensor parallelism moves (Rajbhandari et al., arXiv 1910.02054; Korthikanti et al., arXiv 2205.05198).
    Where there are no replicas, or no tensor parallelism, they change nothing.
    """
    training = job.training.decided(zero)
    return job if training is job.training else job.model_copy(update={"training": training})


def largest_sites(job: Job) -> Job:
    """The job with the MAX_PLANNED_SITES sites that compute most; unchanged where sites are fewer, or pinned.

    Sets of sites grow exponentially with their number, and a pipeline is over MAX_SITES at most.
    """
    sites = job.cluster.sites
    if len(sites) <= MAX_PLANNED_SITES or job.layout.sites is not None:
        return job
    names = [site.name for site in strongest(sites, MAX_PLANNED_SITES)]
    return job.model_copy(update={"cluster": job.cluster.within(names)})


def strongest(sites: Sequence[Site], most: int) -> list[Site]:
    """The `most` sites that compute most; of equal ones the first."""
    return sorted(sites, key=lambda site: -power(site))[:most]


def power(site: Site) -> float:
    """FLOP/s of all devices of a site at their fastest rate."""
    return site.num_devices * max(site.device.peak_flops.values())


def figures(cluster: Cluster, order: Sequence[str]) -> tuple[object, ...]:
    """Equal for sites in an order that differ, as their links do, in their names alone."""
    sites = [cluster.site(name).model_dump_json(exclude={"name"}) for name in order]
    links = (cluster.link(*ends) for ends in permutations(order, 2))
    return *sites, *(link and link.model_dump_json(exclude={"source", "target"}) for link in links)


def left_out_note(num_sites: int) -> str:
    """Sentence on the sites that are not looked at and how to have others looked at; empty where all are."""
    if num_sites <= MAX_PLANNED_SITES:
        return ""
    return (
        f"Of {num_sites:,} sites the {MAX_PLANNED_SITES} that compute most were looked at; layout.sites pins others. A "
        "plan with others may be better."
    )


def expect_devices(job: Job, profiles: Sequence[Profile | ChunkProfile]) -> None:
    """InputError for a profile of a device that no site has."""
    names = {site.device.name for site in job.cluster.sites}
    for profile in profiles:
        if profile.device not in names:
            raise InputError(
                f"profile of {profile.device!r}: no site of the job has this device{nearest(profile.device, names)}; "
                f"devices: {', '.join(sorted(names))}"
            )


def with_training(job: Job, **update: object) -> Job:
    """The job with other keys of [training]."""
    return decided(job.model_copy(update={"training": job.training.model_copy(update=update)}))


def with_pins(job: Job, **update: object) -> Job:
    """The job with other keys of [layout]; None leaves one out."""
    return job.model_copy(update={"layout": job.layout.model_copy(update=update)})


NEAR_BATCH: Final = 0.1
"""Largest relative change of the batch that counts as a setting."""
MAX_NEAR_BATCHES: Final = 4
"""Largest number of batches near the job's that are tried."""


def near_batches(job: Job) -> list[int]:
    """Batches within NEAR_BATCH of the job's that more degrees divide, MAX_NEAR_BATCHES at most, the nearest first:
    multiples of its devices, of half as many, and so on."""
    batch, unit, near = job.training.global_batch, job.cluster.num_devices, list[int]()
    while unit > 1 and batch % unit:
        below = batch // unit * unit
        near += [n for n in (below, below + unit) if n > 0 and abs(n - batch) <= NEAR_BATCH * batch and n not in near]
        unit //= 2
    return sorted(near[:MAX_NEAR_BATCHES], key=lambda n: abs(n - batch))
