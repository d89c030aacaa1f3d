"""Costs of one stage: a slice of the layers, with or without the embedding and the head."""

from collections.abc import Mapping
from dataclasses import dataclass

from farpipe.cost import compute, memory
from farpipe.cost.calibration import Calibration, calibration_of
from farpipe.cost.compute import Times
from farpipe.cost.layout import Layout, settle
from farpipe.cost.profile import Profile, profile_key
from farpipe.spec import Device, Model, Recompute, Site, Training


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
    device_params: float
    """Parameters on one device, before ZeRO divides them."""
    expert_params: float = 0.0
    """Those of them that are experts."""
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


class JobCosts:
    """Costs of the stages of one job, under any layout; a planner asks often, so equal ones are computed once.

    `profiles` and `calibrations` are by device name, profiles of several devices that share a layer by `Profile.key`;
    what is missing comes from the model and from the catalogue.
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
        self._apart: dict[tuple[object, ...], tuple[StageCost, StageCost]] = {}
        self._kinds: list[Site] = []
        self._kind_of: dict[str, int] = {}

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

    def with_training(self, training: Training) -> "JobCosts":
        """The same constants and profiles for another training; nothing computed before is kept."""
        return JobCosts(self.model, training, self.profiles, self._calibrations)

    def profile(self, device: Device, layout: Layout) -> Profile | None:
        """Profile of `device` with the tensor degree of `layout`, else of one such device; None: there is none."""
        return self.profiles.get(profile_key(device.name, layout.tensor)) or self.profiles.get(device.name)

    def settled(self, layout: Layout) -> Training:
        """The training with ``auto`` replaced by what `layout` decides."""
        key = (layout.zero, layout.sequence_parallel)
        if key not in self._settled:
            self._settled[key] = settle(self.training, layout)
        return self._settled[key]

    def _shape(self, layout: Layout) -> tuple[object, ...]:
        """All of a layout that the cost of a stage depends on."""
        shares = (layout.data, layout.data_inside) if self.settled(layout).zero1 else ()
        degrees = (layout.tensor, layout.context, layout.context_exchange, layout.expert, layout.microbatch_size)
        return (*degrees, layout.zero, layout.sequence_parallel, *shares)

    def stage(
        self, layout: Layout, site: Site, num_layers: int, recompute: Recompute, *, embedding: bool, head: bool
    ) -> StageCost:
        """Costs of one stage at `site` that recomputes so; errors as for `stage_cost`."""
        key = (self._kind(site), num_layers, recompute, embedding, head, *self._shape(layout))
        if key not in self._known:
            self._known[key] = stage_cost(
                self.model,
                self.settled(layout).model_copy(update={"recompute": recompute}),
                *(layout, site, num_layers),
                embedding=embedding,
                head=head,
                profile=self.profile(site.device, layout),
                calibration=self.calibration(site),
            )
        return self._known[key]

    def apart(
        self, layout: Layout, site: Site, recompute: Recompute, *, embedding: bool, head: bool
    ) -> tuple[StageCost, StageCost]:
        """The same stage with no layer, and with one: what it costs is linear in their number."""
        key = (self._kind(site), recompute, embedding, head, *self._shape(layout))
        if key not in self._apart:
            none, one = (self.stage(layout, site, n, recompute, embedding=embedding, head=head) for n in (0, 1))
            self._apart[key] = none, one
        return self._apart[key]


def stage_cost(
    model: Model,
    training: Training,
    layout: Layout,
    site: Site,
    num_layers: int,
    *,
    embedding: bool = False,
    head: bool = False,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> StageCost:
    """Costs of `num_layers` layers at `site`, with the embedding and the head where asked for.

    What they recompute is `training.recompute`, for which ``auto`` counts as none. `profile` gives measured times in
    place of modelled ones; `calibration` is that of the catalogue if not given.
    Raises InputError when the profile was measured for something else, InfeasibleError when the device lacks the
    precision.
    """
    training = settle(training, layout)
    if training.recompute == "auto":
        training = training.model_copy(update={"recompute": "none"})
    part = _Slice(num_layers, embedding, head)
    job = (model, training, layout)
    times = _times(part, *job, site, profile, calibration or calibration_of(site.device))
    num_params = stage_params(model, num_layers, embedding=embedding, head=head)
    expert_params = num_layers * model.num_expert_params / (layout.tensor * layout.expert)
    device_params = (num_params - num_layers * model.num_expert_params) / layout.tensor + expert_params
    working = memory.working_bytes(*job) + memory.gathered_bytes(compute.device_layer_params(model, layout), training)
    return StageCost(
        forward_s=times.forward_s,
        input_grad_s=times.input_grad_s,
        weight_grad_s=times.weight_grad_s,
        activation_bytes=part.weigh(
            memory.layer_activation_bytes(*job),
            memory.embedding_activation_bytes(*job),
            memory.head_activation_bytes(*job),
        ),
        weight_stash_bytes=part.weigh(
            memory.layer_stash_bytes(*job), memory.embedding_stash_bytes(*job), memory.head_stash_bytes(*job)
        ),
        static_bytes=memory.state_bytes(device_params, training, layout),
        working_bytes=working if num_layers else 0.0,
        boundary_bytes=memory.boundary_bytes(*job),
        num_params=num_params,
        device_params=device_params,
        expert_params=expert_params,
        num_buckets=max(1, num_layers),
    )


def stage_params(model: Model, num_layers: int, *, embedding: bool, head: bool) -> int:
    """Parameters of a slice; a head that is tied to an embedding on another stage has a copy of its own."""
    copy = model.vocab_size * model.hidden if head and model.tied_embeddings and not embedding else 0
    part = _Slice(num_layers, embedding, head)
    return int(part.weigh(model.num_layer_params, model.num_embedding_params, model.num_head_params)) + copy


def _times(
    part: _Slice,
    model: Model,
    training: Training,
    layout: Layout,
    site: Site,
    profile: Profile | None,
    calibration: Calibration,
) -> Times:
    """The times of the slice, and the fixed time of an F and of an I; a W follows its I at once in most orders."""
    if profile is not None:
        profile.expect(model, training, layout, site.device)
        scale = layout.microbatch_size / profile.microbatch_size
        share = compute.again_share(model, training, layout, site, calibration)
        layer = profile.layer_times(training.recompute, share).times(scale)
        embedding, head = (p.times(scale) for p in (profile.embedding, profile.head))
        overhead = profile.action_overhead_s
    else:
        job = (model, training, layout, site, calibration)
        layer, embedding, head = compute.layer_times(*job), compute.embedding_times(*job), compute.head_times(*job)
        overhead = calibration.action_overhead_s
    return Times(
        part.weigh(layer.forward_s, embedding.forward_s, head.forward_s) + overhead,
        part.weigh(layer.input_grad_s, embedding.input_grad_s, head.input_grad_s) + overhead,
        part.weigh(layer.weight_grad_s, embedding.weight_grad_s, head.weight_grad_s),
    )
