"""Costs of one stage: a slice of the layers, with or without the embedding and the head."""

from collections.abc import Mapping
from dataclasses import dataclass

from farpipe.core.spec import Model, Recompute, Site, Training
from farpipe.planning.cost import compute, memory, stash
from farpipe.planning.cost.adapters import trained_params
from farpipe.planning.cost.calibration import Calibration, calibration_of
from farpipe.planning.cost.exchange import Times
from farpipe.planning.cost.layout import Layout, settle
from farpipe.planning.cost.profile import Profile


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of one stage for one microbatch.

    Bytes are those of one device; `boundary_bytes` and `num_params` are of all devices of a replica together.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    activation_bytes: float
    weight_stash_bytes: float
    static_bytes: float
    """Parameters, gradients, optimizer state."""
    working_bytes: float
    """Needed for a while in every backward; the stages of a rank share it."""
    boundary_bytes: float
    """One message to the next stage or back."""
    num_params: int
    """Parameters that the optimizer updates."""
    device_params: float
    """Parameters on one device, before ZeRO divides them."""
    expert_params: float = 0.0
    """Parameters of them that are experts'."""
    num_buckets: int = 1
    """Parts in which its gradients are summed: layers."""

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    def held_bytes(self, in_flight: int) -> float:
        """Bytes that are there all the time, and the activations of so many microbatches."""
        return self.static_bytes + in_flight * self.activation_bytes


@dataclass(frozen=True)
class _Slice:
    """The share of the model that it holds: multiplies a figure of a layer, of the embedding and of the head."""

    num_layers: int
    embedding: bool
    head: bool

    def weigh(self, layer: float, embedding: float, head: float) -> float:
        return self.num_layers * layer + self.embedding * embedding + self.head * head


@dataclass(frozen=True)
class _Parts:
    """Figures of stages by their parts, in each tuple of a layer, of the embedding and of the head."""

    times: tuple[Times, Times, Times]
    overhead_s: float
    """Fixed time of an F and of an I; a W follows its I at once in most orders."""
    activation_bytes: tuple[float, float, float]
    stash_bytes: tuple[float, float, float]
    working_bytes: float
    boundary_bytes: float


class JobCosts:
    """Costs of the stages of one job, under any layout; a planner asks often, so equal ones are computed once.

    `profiles` and `calibrations` are by device name; what is missing comes from the model and from the catalogue.
    """

    def __init__(
        self,
        model: Model,
        training: Training,
        profiles: Mapping[str, Profile] | None = None,
        calibrations: Mapping[str, Calibration] | None = None,
    ) -> None:
        self.model, self.training = model, training
        self.profiles, self._calibrations = profiles or {}, dict(calibrations or {})
        self._settled: dict[tuple[object, ...], Training] = {}
        self._known: dict[tuple[object, ...], StageCost] = {}
        self._parts: dict[tuple[object, ...], _Parts] = {}
        self._apart: dict[tuple[object, ...], tuple[StageCost, StageCost]] = {}
        self._kinds: list[Site] = []
        self._kind_of: dict[str, int] = {}

    def trained(self, training: Training) -> "JobCosts":
        """Costs of the same model under another training; stages that cost the same in both are computed once."""
        other = JobCosts(self.model, training, self.profiles, self._calibrations)
        if _of_stages(training) == _of_stages(self.training):
            other._known, other._parts, other._apart = self._known, self._parts, self._apart
            other._kinds, other._kind_of = self._kinds, self._kind_of
        return other

    def _kind(self, site: Site) -> int:
        """Equal for sites that differ in name, number of devices and prices alone: stages cost the same there."""
        if site.name not in self._kind_of:
            bare = site.model_copy(update={"name": "", "num_devices": 0, "prices": None})
            if bare not in self._kinds:
                self._kinds.append(bare)
            self._kind_of[site.name] = self._kinds.index(bare)
        return self._kind_of[site.name]

    def calibration(self, site: Site) -> Calibration:
        """The constants of a site's devices."""
        name = site.device.name
        if name not in self._calibrations:
            self._calibrations[name] = calibration_of(site.device)
        return self._calibrations[name]

    def settled(self, layout: Layout) -> Training:
        """The training with ``auto`` replaced by what `layout` decides."""
        key = (layout.zero, layout.sequence_parallel)
        if key not in self._settled:
            self._settled[key] = settle(self.training, layout)
        return self._settled[key]

    def _shape(self, layout: Layout) -> tuple[object, ...]:
        """All of a layout that the cost of a stage depends on."""
        shares = (layout.data, layout.data_inside) if self.settled(layout).zero1 else ()
        degrees = (
            layout.tensor,
            layout.context,
            layout.context_exchange,
            layout.expert,
            layout.expert_tensor,
            layout.microbatch_size,
        )
        changes = changes_stages(self.training, layout)
        return (*degrees, layout.zero, layout.sequence_parallel, changes, *shares)

    def stage(
        self,
        layout: Layout,
        site: Site,
        num_layers: int,
        recompute: Recompute,
        *,
        embedding: bool,
        head: bool,
        dense_share: float | None = None,
    ) -> StageCost:
        """Costs of one stage at `site` that recomputes so; `dense_share` of its layers have no experts, None: as many
        as in the mean of the model.

        InputError when the profile was measured for something else, InfeasibleError without the precision.
        """
        key = (self._kind(site), num_layers, recompute, embedding, head, dense_share, *self._shape(layout))
        if key not in self._known:
            training = self.settled(layout).model_copy(update={"recompute": recompute})
            part = _Slice(num_layers, embedding, head)
            model = self.model.with_dense_share(dense_share)
            parts = self._parts_of(model, training, layout, site, dense_share)
            self._known[key] = _summed(part, parts, model, training, layout, site)
        return self._known[key]

    def _parts_of(
        self, model: Model, training: Training, layout: Layout, site: Site, dense_share: float | None
    ) -> "_Parts":
        key = (self._kind(site), training.recompute, dense_share, *self._shape(layout))
        if key not in self._parts:
            profile, calibration = self.profiles.get(site.device.name), self.calibration(site)
            self._parts[key] = _parts(model, training, layout, site, profile, calibration)
        return self._parts[key]

    def apart(
        self, layout: Layout, site: Site, recompute: Recompute, *, embedding: bool, head: bool
    ) -> tuple[StageCost, StageCost]:
        """The same stage with no layer, and with one: what it costs is linear in their number."""
        key = (self._kind(site), recompute, embedding, head, *self._shape(layout))
        if key not in self._apart:
            none, one = (self.stage(layout, site, n, recompute, embedding=embedding, head=head) for n in (0, 1))
            self._apart[key] = none, one
        return self._apart[key]


def _parts(
    model: Model, training: Training, layout: Layout, site: Site, profile: Profile | None, calibration: Calibration
) -> _Parts:
    """Figures that depend on no stage's number of layers; errors as for `JobCosts.stage`."""
    job = (model, training, layout)
    times, overhead_s = _times(*job, site, profile, calibration)
    kinds = model.kinds()
    return _Parts(
        times=times,
        overhead_s=overhead_s,
        activation_bytes=(
            sum(share * memory.layer_activation_bytes(kind, training, layout) for share, kind in kinds),
            memory.embedding_activation_bytes(*job),
            memory.head_activation_bytes(*job),
        ),
        stash_bytes=(
            sum(share * stash.layer_stash_bytes(kind, training, layout) for share, kind in kinds),
            stash.embedding_stash_bytes(*job),
            stash.head_stash_bytes(*job),
        ),
        working_bytes=memory.working_bytes(*job)
        + memory.gathered_bytes(compute.device_layer_params(model, layout), training),
        boundary_bytes=memory.boundary_bytes(*job),
    )


def _summed(part: _Slice, parts: _Parts, model: Model, training: Training, layout: Layout, site: Site) -> StageCost:
    """Costs of the slice, of whose parts the figures are known."""
    num_layers, ends = part.num_layers, {"embedding": part.embedding, "head": part.head}
    num_params = stage_params(model, num_layers, **ends)
    num_expert_params = sum(share * kind.num_expert_params for share, kind in model.kinds()) * num_layers
    num_expert_params += part.head * model.mtp_num_layers * model.num_expert_params
    device_params, expert_params = trained = _on_device(num_params, num_expert_params, layout)
    if training.lora is not None:
        of_kinds = [(share, trained_params(kind, training, num_layers)) for share, kind in model.kinds()]
        adapters, of_experts = (sum(share * each[i] for share, each in of_kinds) for i in (0, 1))
        num_params, trained = round(adapters), _on_device(adapters, of_experts, layout)
    static_bytes = memory.state_bytes(
        device_params,
        training,
        layout,
        expert_params=expert_params,
        end_params=_end_params(model, **ends) / layout.tensor,
        transposed=memory.needs_transposes(site.device),
        adapters=trained,
    )
    return StageCost(
        forward_s=part.weigh(*(times.forward_s for times in parts.times)) + parts.overhead_s,
        input_grad_s=part.weigh(*(times.input_grad_s for times in parts.times)) + parts.overhead_s,
        weight_grad_s=part.weigh(*(times.weight_grad_s for times in parts.times)),
        activation_bytes=part.weigh(*parts.activation_bytes),
        weight_stash_bytes=part.weigh(*parts.stash_bytes),
        static_bytes=static_bytes,
        working_bytes=parts.working_bytes if num_layers else 0.0,
        boundary_bytes=parts.boundary_bytes,
        num_params=num_params,
        device_params=trained[0],
        expert_params=trained[1],
        num_buckets=max(1, num_layers),
    )


def _on_device(num_params: float, num_expert_params: float, layout: Layout) -> tuple[float, float]:
    """Parameters of a stage on one device: all, and those of them that experts have."""
    expert_params = num_expert_params / (layout.expert_tensor * layout.expert)
    return (num_params - num_expert_params) / layout.tensor + expert_params, expert_params


def stage_params(model: Model, num_layers: int, *, embedding: bool, head: bool) -> int:
    """Parameters of a slice; a head that needs the matrix of an embedding on another stage has a copy of its own."""
    copy = model.vocab_size * model.hidden if head and model.repeats_embedding and not embedding else 0
    part = _Slice(num_layers, embedding, head)
    layer = sum(share * kind.num_layer_params for share, kind in model.kinds())
    return round(part.weigh(layer, model.num_embedding_params, model.num_head_params)) + copy


def _end_params(model: Model, *, embedding: bool, head: bool) -> int:
    """Parameters of a slice that belong to no layer, not to one that predicts further tokens either."""
    return stage_params(model, 0, embedding=embedding, head=head) - head * model.mtp_num_layers * model.num_mtp_params


def _times(
    model: Model, training: Training, layout: Layout, site: Site, profile: Profile | None, calibration: Calibration
) -> tuple[tuple[Times, Times, Times], float]:
    """Times of a layer, of the embedding and of the head, and the fixed time of an F and of an I."""
    job = (training, layout, site, calibration)
    change_s = calibration.stage_change_s * changes_stages(training, layout)
    if profile is not None:
        profile.expect(model, training, layout, site.device)
        scale = layout.microbatch_size / profile.microbatch_size
        layer = profile.layer_times(training.recompute, compute.again_share(model, *job)).times(scale)
        return (layer, profile.embedding.times(scale), profile.head.times(scale)), profile.action_overhead_s + change_s
    each = (compute.layer_times(kind, *job).times(share) for share, kind in model.kinds())
    ends = compute.embedding_times(model, *job), compute.head_times(model, *job)
    return (sum(each, Times(0.0, 0.0, 0.0)), *ends), calibration.action_overhead_s + change_s


def changes_stages(training: Training, layout: Layout) -> bool:
    """True if ranks go from stage to stage and wait for each message that they send (no ``overlap_p2p_comm``)."""
    return layout.virtual > 1 and not training.overlap


def _of_stages(training: Training) -> Training:
    """The training without what no stage's cost depends on."""
    return training.model_copy(update={"global_batch": 1, "num_steps": 1, "wire_type": "none"})
