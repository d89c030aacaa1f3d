"""Layout of a job: degrees of parallelism, and which site has which layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import Cluster, ContextExchange, Model, Recompute, Training
from farpipe.core.spec.training import Zero
from farpipe.core.step import MAX_MICROBATCHES


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism; one replica is `pipeline` ranks of `tensor` devices each."""

    pipeline: int
    """Pipeline ranks."""
    data: int
    """Replicas of the whole pipeline."""
    tensor: int
    """Devices that share each layer."""
    virtual: int
    """Stages on each rank."""
    microbatch_size: int
    """Sequences in one microbatch."""
    num_microbatches: int
    """Microbatches of one step in each replica."""
    replica_sites: tuple[str, ...] = ()
    """Sites that hold equally many whole replicas each, that of the placements first; () where the replicas of every
    rank are all on the rank's site."""
    context: int = 1
    """Devices that share each sequence (context parallelism)."""
    context_exchange: Annotated[ContextExchange, Field(exclude_if=lambda method: method == "ring")] = "ring"
    """Method by which these devices attend to all of a sequence."""
    expert: int = 1
    """Devices that share the experts of each layer: so many of the `data_inside` x `context` that a rank has of each
    slice, or, with whole experts on each device, of these times `tensor`."""
    zero: Zero | None = None
    """Stage of ZeRO that the planner chose; None: what the training says."""
    sequence_parallel: bool | None = None
    """True if norms are divided over the tensor-parallel devices; None: what the training says."""

    @property
    def data_inside(self) -> int:
        """Replicas of one rank that are on the same site."""
        return self.data // max(1, len(self.replica_sites))

    @property
    def devices_per_rank(self) -> int:
        """Devices that one pipeline rank takes on its site: `tensor` x `context` in each of the replicas there."""
        return self.tensor * self.context * self.data_inside

    @property
    def num_shares(self) -> int:
        """Devices of one site that hold the same slice of the model, over which ZeRO divides."""
        return self.data_inside * self.context

    @property
    def expert_tensor(self) -> int:
        """Devices that share each expert: the tensor-parallel ones, or one device alone where experts are folded over
        these too, because there are fewer shares than `expert`."""
        return self.tensor if self.num_shares % self.expert == 0 else 1

    @property
    def num_expert_shares(self) -> int:
        """Devices of one site that hold the same experts of a slice."""
        return self.num_shares * self.tensor // (self.expert * self.expert_tensor)

    @property
    def sharing(self) -> str:
        """``, each sequence over 4 devices (ulysses)``; empty where each device has whole sequences."""
        return f", each sequence over {self.context} devices ({self.context_exchange})" if self.context > 1 else ""

    @property
    def num_stages(self) -> int:
        """Stages of one replica."""
        return self.pipeline * self.virtual


@dataclass(frozen=True)
class Placement:
    """Site of one stage, and its slice of the model: layers `first_layer` up to, not including, `end_layer`."""

    rank: int
    site: str
    first_layer: int
    end_layer: int
    recompute: Recompute = "none"
    """Operations that its backward pass computes again."""

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self.end_layer - self.first_layer

    @property
    def layers(self) -> str:
        """``0 to 4``; ``none`` where there is only the embedding or the head."""
        return f"{self.first_layer} to {self.end_layer - 1}" if self.num_layers else "none"


def settle(training: Training, layout: Layout) -> Training:
    """`training` without ``auto`` in what a layout decides: pins of the training win, then the layout, then none."""
    zero, parallel = training.zero, training.sequence_parallel
    settled = {
        "zero": (layout.zero or 0) if zero == "auto" else zero,
        "sequence_parallel": bool(layout.sequence_parallel) if parallel == "auto" else parallel,
    }
    return training.model_copy(update=settled)


def round_robin(num_ranks: int, num_stages: int) -> list[int]:
    """The rank of every stage: stage s + p where stage s is."""
    return [stage % num_ranks for stage in range(num_stages)]


def v_shape(num_ranks: int) -> list[int]:
    """The rank of every stage, two on each: down the ranks and up again, stages s and 2p - 1 - s on one."""
    return [*range(num_ranks), *reversed(range(num_ranks))]


def place_stages(
    ranks: Sequence[int], sites: Sequence[str], layers: Sequence[int], recompute: Sequence[Recompute]
) -> tuple[Placement, ...]:
    """The stages by their ranks, layers and recomputation (one entry per stage); `sites`: the site of every rank."""
    ends = [sum(layers[: index + 1]) for index in range(len(layers))]
    return tuple(
        Placement(rank, sites[rank], end - count, end, again)
        for rank, count, end, again in zip(ranks, layers, ends, recompute, strict=True)
    )


def place_evenly(sites: Sequence[str], layers: Sequence[int], recompute: Recompute = "none") -> tuple[Placement, ...]:
    """Stages placed round robin that all recompute alike; `sites` and `layers` as for `place_stages`."""
    return place_stages(round_robin(len(sites), len(layers)), sites, layers, [recompute] * len(layers))


def check_layout(
    model: Model, training: Training, layout: Layout, placements: Sequence[Placement], cluster: Cluster
) -> None:
    """InputError when the parts do not fit together, InfeasibleError when a site has too few devices."""
    _check_batch(training, layout)
    _check_shares(model, training, layout)
    _check_slices(model, layout, placements)
    _check_recompute(training, placements)
    sites: dict[int, str] = {}
    for placement in placements:
        sites.setdefault(placement.rank, placement.site)
    if sorted(sites) != list(range(layout.pipeline)):
        raise InputError(f"placements: expected ranks 0 to {layout.pipeline - 1}, found {sorted(sites)}")
    for index, placement in enumerate(placements):
        if placement.site != sites[placement.rank]:
            raise InputError(f"placements[{index}].site: rank {placement.rank} is on {sites[placement.rank]!r} already")
    _check_replica_sites(layout, set(sites.values()))
    for site in cluster.sites:
        ranks = sum(name == site.name for name in sites.values())
        if site.name in layout.replica_sites:
            ranks = layout.pipeline
        if ranks * layout.devices_per_rank > site.num_devices:
            raise InfeasibleError(
                f"site {site.name!r} has {site.num_devices} devices; {ranks} ranks x tensor {layout.tensor} x "
                f"data {layout.data_inside} need {ranks * layout.devices_per_rank}"
            )


def _check_replica_sites(layout: Layout, used: set[str]) -> None:
    homes = layout.replica_sites
    if not homes:
        return
    if used != {homes[0]} or len(set(homes)) != len(homes) or layout.data % len(homes):
        raise InputError(
            f"layout: {layout.data} replicas at {', '.join(homes)}: they must be different sites with equally many "
            f"replicas each, and all stages placed at the first of them, found {', '.join(sorted(used))}"
        )


def _check_shares(model: Model, training: Training, layout: Layout) -> None:
    if training.sequence_length % layout.context:
        raise InputError(
            f"layout.context: {layout.context} does not divide training.sequence_length {training.sequence_length}"
        )
    if layout.context > 1 and layout.context_exchange == "ring" and model.has_windows(training.sequence_length):
        raise InputError(
            f"layout.context_exchange: no ring is known for attention over a window, model.sliding_window "
            f"{model.sliding_window}; 'ulysses' would do"
        )
    if layout.context_exchange == "ulysses" and not model.divides_heads(layout.tensor * layout.context):
        raise InputError(
            f"layout.context_exchange: 'ulysses' needs key heads for each of tensor {layout.tensor} x context "
            f"{layout.context} devices; the model has {model.num_heads} heads and {model.num_kv_heads} key heads"
        )
    if layout.expert == 1:
        return
    if model.experts is None or model.experts.num_experts % layout.expert:
        have = f"{model.experts.num_experts} experts" if model.experts else "no experts"
        raise InputError(f"layout.expert: the model has {have}, which {layout.expert} devices can't share evenly")
    shares = layout.num_shares * layout.tensor
    if shares % layout.expert:
        able = [str(e) for e in range(1, shares + 1) if shares % e == 0 and model.experts.num_experts % e == 0]
        raise InputError(
            f"layout.expert: {layout.expert} does not divide the {layout.num_shares} devices (data x context) at a "
            f"site, nor these times tensor {layout.tensor}; {', '.join(able)} would do"
        )


def _check_batch(training: Training, layout: Layout) -> None:
    batch = layout.data * layout.num_microbatches * layout.microbatch_size
    if batch != training.global_batch:
        raise InputError(
            f"layout: data {layout.data} x num_microbatches {layout.num_microbatches} x microbatch_size "
            f"{layout.microbatch_size} is {batch} sequences; training.global_batch is {training.global_batch}"
        )
    if layout.num_microbatches > MAX_MICROBATCHES:
        raise InputError(
            f"layout: {layout.num_microbatches} microbatches in one step are more than {MAX_MICROBATCHES}; "
            "choose a larger microbatch_size or a smaller global_batch"
        )


def _check_recompute(training: Training, placements: Sequence[Placement]) -> None:
    wanted = training.recompute
    for index, placement in enumerate(placements):
        if wanted not in ("auto", placement.recompute):
            raise InputError(
                f"placements[{index}].recompute: {placement.recompute!r}, but training.recompute pins {wanted!r}"
            )


def _check_slices(model: Model, layout: Layout, placements: Sequence[Placement]) -> None:
    if len(placements) != layout.num_stages:
        raise InputError(f"placements: expected one per stage, {layout.num_stages}, found {len(placements)}")
    reached = 0
    for index, placement in enumerate(placements):
        if placement.first_layer != reached or placement.end_layer < reached:
            raise InputError(
                f"placements[{index}]: layers {placement.first_layer} to {placement.end_layer} do not continue "
                f"at layer {reached}"
            )
        reached = placement.end_layer
    if reached != model.num_layers:
        raise InputError(f"placements: they hold {reached} layers, the model has {model.num_layers}")
