"""The whole of what a user asks for: model, training, cluster, data, and what is pinned."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from farpipe.spec.cluster import Cluster, Site
from farpipe.spec.groups import GroupPin, check_groups
from farpipe.spec.measured import Measured, check_measured
from farpipe.spec.model import Model
from farpipe.spec.part import Count, Name, Natural, Part, SiteName, fault
from farpipe.spec.recompute import operations_of, possible_operations
from farpipe.spec.training import ContextExchange, Data, Training
from farpipe.spec.uncertainty import Uncertainty
from farpipe.spec.write import as_toml
from farpipe.strict import nearest
from farpipe.units import format_bytes

NUM_BYTES: Final = 256


def _none_if_auto(method: Any) -> Any:
    return None if method == "auto" else method


class Pins(Part):
    """Decisions that the user takes out of the planner's hands; None leaves a decision to the planner."""

    pipeline: Count | None = None
    """Pipeline ranks."""
    data: Count | None = None
    """Data-parallel replicas."""
    tensor: Count | None = None
    """Devices that share each layer."""
    virtual: Count | None = None
    """Stages on each rank."""
    sites: Annotated[tuple[SiteName, ...], Field(min_length=1)] | None = None
    """The sites to use, in pipeline order."""
    layers: Annotated[tuple[Natural, ...], Field(min_length=1)] | None = None
    """Layers of each stage, in pipeline order; only the first and the last stage may have none."""
    context: Count | None = None
    """Devices that share each sequence."""
    context_exchange: ContextExchange | None = Field(default=None, exclude_if=lambda method: method is None)
    """Method by which they attend to all of it."""
    expert: Count | None = None
    """Devices that share the experts of each layer, out of a rank's replicas."""
    num_microbatches: Count | None = None
    """Microbatches of one step in each replica."""
    groups: tuple[GroupPin, ...] | None = Field(default=None, exclude_if=lambda groups: groups is None)
    """Groups of replicas, each over its own sites and with its own degrees on every rank; all else is None then."""
    replicas: Literal["inside", "across", "unlike"] | None = None
    """``inside``: replicas of a pipeline rank are on one site, a pipeline may be over several. ``across``: every site
    has whole pipelines, and gradients cross. ``unlike``: either, or groups of replicas whose ranks differ."""


class Request(Part):
    """The training to be planned: model, training, data and pins, without the cluster; `on` a cluster it is a Job."""

    model: Model
    training: Training
    data: Data = Data()
    layout: Pins = Pins()
    schedule: Annotated[Name | None, BeforeValidator(_none_if_auto)] = None
    measured: tuple[Measured, ...] = ()
    uncertainty: Uncertainty = Field(default=Uncertainty(), exclude_if=lambda ranges: not ranges)

    def on(self, cluster: Cluster) -> "Job":
        """The job of this request on `cluster`; pydantic's ValidationError where they do not fit together."""
        parts = {name: getattr(self, name) for name in type(self).model_fields}
        devices = {site.device.name for site in cluster.sites}
        measured = tuple(table for table in self.measured if table.device in devices)
        return Job(**parts | {"measured": measured}, cluster=cluster)


class Job(Part):
    """A training job as the user wants it; `load_job` reads it from a file."""

    model: Model
    training: Training
    cluster: Cluster
    data: Data = Data()
    layout: Pins = Pins()
    schedule: Annotated[Name | None, BeforeValidator(_none_if_auto)] = None
    """Name of the order to use; None, or "auto", lets the planner choose."""
    measured: tuple[Measured, ...] = ()
    """Times that take the place of modelled ones."""
    uncertainty: Uncertainty = Field(default=Uncertainty(), exclude_if=lambda ranges: not ranges)
    """Uncertainty of links and devices; the plan is chosen with it in mind."""
    text: Annotated[str, Field(strict=True, min_length=0)] = Field(default="", repr=False)
    """The file this was read from, word for word, for the run directory; empty for a job made in Python."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_lengths()
        self._check_recompute()
        self._check_groups()
        self._check_pinned_sites()
        for index, site in self.used_sites():
            self._check_site(index, site)
        self._check_pinned_layers()
        self._check_pinned_tensor()
        self._check_context_exchange()
        self._check_batch()
        self._check_packing()
        self._check_evaluation()
        check_measured(self.measured, [site.device.name for site in self.cluster.sites], self.layout.tensor or 1)
        return self

    @property
    def request(self) -> Request:
        """The job without its cluster."""
        return Request.model_construct(**{name: getattr(self, name) for name in Request.model_fields})

    def used_sites(self) -> Iterator[tuple[int, Site]]:
        """The sites that may be used, each with its place in the cluster: the pinned ones, or all."""
        for index, site in enumerate(self.cluster.sites):
            if self.layout.sites is None or site.name in self.layout.sites:
                yield index, site

    def to_toml(self) -> str:
        """The job as job.toml: the file it was read from, or one that reads back equal."""
        return self.text or as_toml(self)

    def _check_lengths(self) -> None:
        model, training = self.model, self.training
        if self.data.is_bytes and model.vocab_size < NUM_BYTES:
            raise fault(f"{model.vocab_size} is less than the {NUM_BYTES} values of a byte", "model", "vocab_size")
        rows = model.max_sequence_length or 0
        if model.positions == "learned" and training.sequence_length > rows:
            raise fault(
                f"{training.sequence_length} is more than the {rows} learned positions (model.max_sequence_length)",
                *("training", "sequence_length"),
            )

    def _check_recompute(self) -> None:
        known = possible_operations(self.model)
        for operation in operations_of(self.training.recompute):
            if operation not in known:
                raise fault(
                    f"the layers of {self.model.name} have no {operation}; they have {', '.join(known)}",
                    *("training", "recompute"),
                )

    def _check_site(self, index: int, site: Site) -> None:
        device, precision = site.device, self.training.precision
        if precision not in device.peak_flops:
            known = ", ".join(device.peak_flops)
            raise fault(
                f"{device.name} has no rate for {precision} (training.precision), only for {known}",
                *("cluster", "sites", index, "device"),
            )
        wanted = precision if self.training.matmul == "same" else self.training.matmul
        if wanted not in device.peak_flops:
            raise fault(
                f"{device.name} has no rate for {wanted} (training.matmul)", *("cluster", "sites", index, "device")
            )
        num_shares = self.layout.tensor or site.devices_per_machine
        share_bytes = self.model.num_layer_params * self.training.num_bytes_per_param / num_shares
        if share_bytes > device.memory_bytes:
            raise fault(
                f"{device.name} has {format_bytes(device.memory_bytes)}, which can't hold one layer: parameters, "
                f"gradients and optimizer state are {format_bytes(share_bytes)} on each of {num_shares} devices",
                *("cluster", "sites", index, "device"),
            )

    def _check_groups(self) -> None:
        if self.layout.groups is None:
            return
        others = {key: getattr(self.layout, key) for key in Pins.model_fields if key != "groups"}
        check_groups(self.layout.groups, others, [site.name for site in self.cluster.sites], self.model)
        if self.data.packing is not None:
            raise fault("chunks are planned for pipelines that are alike; leave it out", "data", "packing")

    def _check_pinned_sites(self) -> None:
        names = [site.name for site in self.cluster.sites]
        pinned = self.layout.sites or ()
        for index, name in enumerate(pinned):
            if name not in names:
                raise fault(f"there is no site {name!r}{nearest(name, names)}", "layout", "sites", index)
            if name in pinned[:index]:
                raise fault(f"{name!r} is given twice", "layout", "sites", index)
        across = self.layout.replicas == "across"
        if self.layout.pipeline is not None and len(pinned) > self.layout.pipeline and not across:
            raise fault(
                f"{len(pinned)} sites can't share {self.layout.pipeline} pipeline ranks (layout.pipeline)",
                *("layout", "sites"),
            )

    def _check_pinned_layers(self) -> None:
        layers, num_layers = self.layout.layers, self.model.num_layers
        if layers is None:
            self._check_num_stages()
            return
        if sum(layers) != num_layers:
            raise fault(f"they sum to {sum(layers)}, the model has {num_layers} layers", "layout", "layers")
        if 0 in layers[1:-1]:
            raise fault("only the first and the last stage may have no layer", "layout", "layers")
        num_stages = (self.layout.pipeline or 1) * (self.layout.virtual or 1)
        all_known = None not in (self.layout.pipeline, self.layout.virtual)
        if len(layers) % num_stages or (all_known and len(layers) != num_stages):
            raise fault(
                f"{len(layers)} stages do not fit pipeline x virtual = {num_stages}",
                *("layout", "layers"),
            )

    def _check_num_stages(self) -> None:
        num_stages = (self.layout.pipeline or 1) * (self.layout.virtual or 1)
        if num_stages > self.model.num_layers + 2:
            key = "pipeline" if self.layout.pipeline else "virtual"
            raise fault(
                f"{num_stages} stages (pipeline x virtual) are too many for {self.model.num_layers} layers",
                *("layout", key),
            )

    def _check_pinned_tensor(self) -> None:
        model, tensor = self.model, self.layout.tensor or 1
        for name in ("num_heads", "ffn_hidden"):
            if getattr(model, name) % tensor:
                raise fault(f"{tensor} does not divide model.{name} {getattr(model, name)}", "layout", "tensor")

    def _check_context_exchange(self) -> None:
        method, size = self.layout.context_exchange, (self.layout.tensor or 1) * (self.layout.context or 1)
        if method is not None and (self.layout.context or 1) == 1:
            raise fault("no devices share a sequence; give layout.context as well", "layout", "context_exchange")
        if method == "ulysses" and not self.model.divides_heads(size):
            raise fault(
                f"'ulysses' gives each of {size} devices (tensor x context) whole heads; the model has "
                f"{self.model.num_heads} heads and {self.model.num_kv_heads} key heads; choose 'ring' or fewer devices",
                *("layout", "context_exchange"),
            )

    def _check_batch(self) -> None:
        sizes = {
            "training.microbatch_size": self.training.microbatch_size,
            "layout.data": self.layout.data,
            "layout.num_microbatches": self.layout.num_microbatches,
        }
        given = {key: size for key, size in sizes.items() if size is not None}
        product, batch = math.prod(given.values()), self.training.global_batch
        if batch % product or (len(given) == len(sizes) and product != batch):
            raise fault(f"{batch} does not match {' x '.join(given)} = {product}", "training", "global_batch")

    def _check_packing(self) -> None:
        """Chunks take the place of microbatches: nothing that counts those."""
        if self.data.packing is None:
            return
        given = {
            ("training", "microbatch_size"): self.training.microbatch_size,
            ("layout", "num_microbatches"): self.layout.num_microbatches,
        }
        for place, value in given.items():
            if value is not None:
                raise fault(
                    f"not with data.packing = {self.data.packing!r}, whose chunks have no such; leave it out", *place
                )

    def _check_evaluation(self) -> None:
        if self.training.evaluate_every_steps and not self.data.held_out:
            raise fault(
                "no text is held out for it; set data.held_out, for example to 0.01",
                *("training", "evaluate_every_steps"),
            )
