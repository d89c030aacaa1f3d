"""The whole of what a user asks for: model, training, cluster, data, and what is pinned."""

import math
from collections.abc import Iterator
from itertools import permutations
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from farpipe.core.spec.cluster import Cluster, Site
from farpipe.core.spec.data import Data
from farpipe.core.spec.lora import possible_modules
from farpipe.core.spec.model import Model
from farpipe.core.spec.part import Count, Natural, Part, SiteName, Text, fault
from farpipe.core.spec.publish import PublishSettings
from farpipe.core.spec.recompute import operations_of, possible_operations
from farpipe.core.spec.run_keys import MetricsSettings, RunKeys
from farpipe.core.spec.training import ContextExchange, Matmul, Training, rate_name
from farpipe.core.spec.write import as_toml, link_table, site_table
from farpipe.core.strict import nearest
from farpipe.core.units import format_bytes

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
    """Devices that share each layer; divides `num_heads` and `ffn_hidden`. The engine runs more than `1` for some
    models of transformers."""
    virtual: Count | None = None
    """Stages on each pipeline rank."""
    sites: Annotated[tuple[SiteName, ...], Field(min_length=1)] | None = None
    """The sites to use, in pipeline order; the others are left out."""
    layers: Annotated[tuple[Natural, ...], Field(min_length=1)] | None = None
    """Layers of each stage, in pipeline order; only the first and the last stage may have none."""
    context: Count | None = None
    """Devices that share each sequence; divides `sequence_length`. Default: a power of two that leaves each device
    4,096 tokens, or 1,024 where a step has fewer sequences than the cluster has devices; `1` with `packing`. Pinned
    with `packing` it need not divide `sequence_length`; with `packing`, `pipeline = 1` and no `data` each document has
    its own. The engine runs more than `1` for some models of transformers."""
    context_exchange: ContextExchange | None = Field(default=None, exclude_if=lambda method: method is None)
    """How they share it: `"ring"` (keys and values go round beside attention) or `"ulysses"` (tokens are exchanged for
    heads; `tensor x context` must divide `num_heads` and `num_kv_heads`). The engine runs `"ulysses"`, the only one for
    attention over a window. Default: the faster."""
    expert: Count | None = None
    """Devices, out of a rank's replicas, that share the experts of each layer. Default: `1`."""
    num_microbatches: Count | None = None
    """Microbatches of one step in each replica."""
    replicas: Literal["inside", "across"] | None = None
    """`"inside"`: the replicas of a pipeline rank are on one site, and a pipeline may span several. `"across"`: every
    site has whole pipelines, and gradients cross. Default: the faster."""

    @property
    def stages_per_rank(self) -> int | None:
        """`virtual`, or the stages of `layers` on each of the pinned ranks; None where that is open."""
        if self.virtual is None and self.layers and self.pipeline:
            return len(self.layers) // self.pipeline
        return self.virtual


class Request(Part):
    """The training to be planned: model, training, data and pins, without the cluster; `on` a cluster it is a Job."""

    model: Model
    training: Training
    data: Data = Data()
    layout: Pins = Pins()
    schedule: Annotated[Text | None, BeforeValidator(_none_if_auto)] = None
    """Name of the order to use, or ``FILE.py:FUNCTION``; None, or "auto", lets the planner choose."""

    @model_validator(mode="before")
    @classmethod
    def _without_measured(cls, given: Any) -> Any:
        """Plans of earlier versions have a key `measured`, nearly always empty."""
        return (
            {key: value for key, value in given.items() if key != "measured" or value}
            if isinstance(given, dict)
            else given
        )

    def on(self, cluster: Cluster) -> "Job":
        """The job of this request on `cluster`; pydantic's ValidationError where they do not fit together."""
        return Job(**{name: getattr(self, name) for name in Request.model_fields}, cluster=cluster)


class Job(Request):
    """A training job as the user wants it; `load_job` reads it from a file."""

    cluster: Cluster
    metrics: MetricsSettings = Field(default=MetricsSettings(), exclude_if=lambda given: given == MetricsSettings())
    run: RunKeys = Field(default=RunKeys(), exclude_if=lambda given: given == RunKeys())
    publish: PublishSettings | None = Field(default=None, exclude_if=lambda given: given is None)
    text: Annotated[str, Field(strict=True, min_length=0)] = Field(default="", repr=False)
    """The file this was read from, word for word, for the run directory; empty for a job made in Python."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_lengths()
        self._check_recompute()
        self._check_lora()
        self._check_offloading()
        self._check_pinned_sites()
        for index, site in self.used_sites():
            self._check_site(index, site)
        self._check_pinned_layers()
        self._check_pinned_tensor()
        self._check_context()
        self._check_context_exchange()
        self._check_expert()
        self._check_batch()
        self._check_packing()
        self._check_local_steps()
        self._check_evaluation()
        self._check_publish()
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
        """The job as job.toml: the file it was read from, or one that reads back equal, every figure explicit."""
        return self.text or as_toml(
            ("[model]", self.model.model_dump()),
            ("[training]", self.training.model_dump()),
            ("[data]", self.data.model_dump()),
            *(("[[cluster.sites]]", site_table(site)) for site in self.cluster.sites),
            *(("[[cluster.links]]", link_table(link)) for link in self.cluster.links),
            ("[layout]", self.layout.model_dump()),
            ("[schedule]", {"method": self.schedule or "auto"}),
            ("[metrics]", self.metrics.model_dump(exclude_defaults=True)),
            ("[run]", self.run.model_dump(exclude_defaults=True)),
            *([("[publish]", self.publish.model_dump())] if self.publish else []),
        )

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
        model = self.model
        known = possible_operations(model) + (("op",) if not (model.experts or model.latent_attention) else ())
        for operation in operations_of(self.training.recompute):
            if operation not in known:
                raise fault(
                    f"the layers of {self.model.name} have no {operation}; they have {', '.join(known)}",
                    *("training", "recompute"),
                )

    def _check_offloading(self) -> None:
        count, pins = self.training.cpu_offloading_num_layers, self.layout
        place = ("training", "cpu_offloading_num_layers")
        if count > self.model.num_layers:
            raise fault(f"{self.model.name} has {self.model.num_layers} layers", *place)
        if count and (pins.pipeline or 1) * (pins.virtual or 1) > 1:
            raise fault("only in pipelines of one rank; set layout.pipeline = 1 or leave it out", *place)
        if count and self.data.packing is not None:
            raise fault("chunks of documents stay on their devices; leave it out", *place)

    def _check_lora(self) -> None:
        known = possible_modules(self.model)
        for module in (self.training.lora.target_modules or ()) if self.training.lora else ():
            if module not in known:
                raise fault(
                    f"the layers of {self.model.name} have no {module}; they have {', '.join(known)}",
                    *("training", "lora", "target_modules"),
                )

    def _check_site(self, index: int, site: Site) -> None:
        device, precision = site.device, self.training.precision
        if precision not in device.peak_flops:
            known = ", ".join(device.peak_flops)
            raise fault(
                f"{device.name} has no rate for {precision} (training.precision), only for {known}",
                *("cluster", "sites", index, "device"),
            )
        wanted = rate_name(precision, self.training.matmul)
        if wanted not in device.peak_flops:
            rates = {matmul: rate_name(precision, matmul) for matmul in get_args(Matmul) if matmul != "tf32"}
            possible = [matmul for matmul, rate in rates.items() if rate in device.peak_flops]
            able = " or ".join(map(repr, possible))
            raise fault(
                f"{device.name} has no rate for {wanted} (training.matmul); set training.matmul to {able}, or choose a "
                f"device that has {wanted}",
                *("cluster", "sites", index, "device"),
            )
        num_shares = self.layout.tensor or site.devices_per_machine
        share_bytes = self.model.num_layer_params * self.training.num_bytes_per_param / num_shares
        if share_bytes > device.memory_bytes:
            raise fault(
                f"{device.name} has {format_bytes(device.memory_bytes)}, which can't hold one layer: parameters, "
                f"gradients and optimizer state are {format_bytes(share_bytes)} on each of {num_shares} devices",
                *("cluster", "sites", index, "device"),
            )

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
                f"a list of {len(layers)} does not fit pipeline x virtual = {num_stages}",
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
                both = math.gcd(model.num_heads, model.ffn_hidden)
                able = ", ".join(str(t) for t in range(1, both + 1) if not both % t)
                raise fault(
                    f"{tensor} does not divide model.{name} {getattr(model, name)}; {able} would", "layout", "tensor"
                )

    def _check_context(self) -> None:
        degree, length = self.layout.context or 1, self.training.sequence_length
        if self.data.packing is None and length % degree:
            able = [c for c in range(1, length + 1) if not length % c]
            near = [str(c) for c in (max(c for c in able if c < degree), *(c for c in able if c > degree))][:2]
            raise fault(
                f"{degree} does not divide training.sequence_length {length}; {' and '.join(near)} would",
                *("layout", "context"),
            )

    def _check_context_exchange(self) -> None:
        method, size = self.layout.context_exchange, (self.layout.tensor or 1) * (self.layout.context or 1)
        if method is not None and self.layout.context == 1:
            raise fault("no devices share a sequence; leave it out", "layout", "context_exchange")
        is_local = (self.layout.context or 1) > 1 and self.model.has_windows(self.training.sequence_length)
        if is_local and method == "ring":
            told = f"no ring is known for attention over a window, model.sliding_window {self.model.sliding_window}"
            raise fault(f"{told}; leave it out or choose 'ulysses'", "layout", "context_exchange")
        if (method == "ulysses" or is_local) and not self.model.divides_heads(size):
            name, out = ("'ulysses', the only method for windows,", "") if is_local else ("'ulysses'", "'ring' or ")
            raise fault(
                f"{name} gives each of {size} devices (tensor x context) whole heads; the model has "
                f"{self.model.num_heads} heads and {self.model.num_kv_heads} key heads; choose {out}fewer devices",
                *("layout", "context_exchange"),
            )

    def _check_expert(self) -> None:
        """The pinned degree divides the experts and, where they are pinned too, the devices that may share them."""
        degree, pins, experts = self.layout.expert or 1, self.layout, self.model.experts
        if degree == 1:
            return
        if experts is None:
            raise fault(f"{self.model.name} has no experts; leave it out", "layout", "expert")
        shares = None if pins.data is None else pins.data * (pins.context or 1) * (pins.tensor or 1)
        able = [e for e in range(1, experts.num_experts + 1) if not experts.num_experts % e]
        shared = f"the {experts.num_experts} experts of {self.model.name}"
        if shares is not None and not experts.num_experts % degree:
            able = [e for e in able if not shares % e]
            shared = f"the {shares} devices (data x context x tensor) that have a rank's replicas"
        if degree not in able:
            raise fault(f"{degree} does not divide {shared}; {', '.join(map(str, able))} would", "layout", "expert")

    def _check_batch(self) -> None:
        sizes = {
            "training.microbatch_size": self.training.microbatch_size,
            "layout.data": self.layout.data,
            "layout.num_microbatches": self.layout.num_microbatches,
        }
        given = {key: size for key, size in sizes.items() if size is not None}
        product, batch = math.prod(given.values()), self.training.global_batch
        if len(given) == len(sizes) and product != batch:
            words = f"is not {' x '.join(given)} = {product}; set it to that or leave one of them out"
            raise fault(f"{batch} {words}", "training", "global_batch")
        if rest := batch % product:
            near = " and ".join(str(n) for n in (batch - rest, batch - rest + product) if n)
            words = f"is no multiple of {' x '.join(given)} = {product}; {near} would be"
            raise fault(f"{batch} {words}", "training", "global_batch")

    def _check_packing(self) -> None:
        if self.data.packing is not None:
            for place, why in self.not_of_chunks().items():
                raise fault(f"not with data.packing = {self.data.packing!r}: {why}", *place)
            if self.run.replan:
                raise fault("with data.packing every step is planned separately; leave it out", "run", "replan")

    def _check_local_steps(self) -> None:
        if self.training.local_steps is None:
            return
        place, sites = ("training", "local_steps"), [site.name for _, site in self.used_sites()]
        if len(sites) < 2:
            raise fault(f"{sites[0]} has no other site to exchange with; use two sites or leave it out", *place)
        if (quorum := self.training.local_steps.quorum) is not None and not 2 <= quorum <= len(sites):
            raise fault(
                f"a quorum of {quorum} among {len(sites)} sites; 2 to {len(sites)} can be one", *place, "quorum"
            )
        refused = {
            "data.packing": self.data.packing is not None,
            "run.replan": self.run.replan,
            "training.lora": self.training.lora is not None,
            "training.elastic": self.training.elastic,
            "training.mirror": self.training.mirror,
            'layout.replicas = "inside"': self.layout.replicas == "inside",
            "layout.layers": self.layout.layers is not None,
        }
        for key in (key for key, given in refused.items() if given):
            raise fault(f"every site has a layout and steps of its own, without {key}; leave one of them out", *place)
        for source, target in permutations(sites, 2):
            if self.cluster.link(source, target) is None:
                raise fault(
                    f"the sites exchange with each other, and there is no link from {source} to {target}", *place
                )

    def not_of_chunks(self) -> dict[tuple[str, str], str]:
        """Pinned keys that chunks of documents can't keep, each with the reason and what to do."""
        given = {
            ("training", "microbatch_size"): self.training.microbatch_size,
            ("layout", "num_microbatches"): self.layout.num_microbatches,
        }
        found = {place: "chunks have no such; leave it out" for place, value in given.items() if value is not None}
        if self.training.recompute != "auto":
            found["training", "recompute"] = "each chunk recomputes the layers that it has to; leave it out"
        if self.layout.context_exchange == "ring":
            found["layout", "context_exchange"] = "devices that share chunks exchange as Ulysses does; leave it out"
        return found

    def _check_evaluation(self) -> None:
        if self.training.evaluate_every_steps and not self.data.held_out:
            raise fault(
                "no text is held out for it; set data.held_out, for example to 0.01",
                *("training", "evaluate_every_steps"),
            )

    def _check_publish(self) -> None:
        if self.publish is not None and self.training.elastic:
            raise fault(
                "sites that may leave do not publish yet; leave it out, or set training.elastic = false", "publish"
            )
