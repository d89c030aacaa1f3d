"""Measured steps to compare with: the ones that farpipe carries, and those that a user has in a TOML or CSV file.

A TOML file (format ``farpipe/points/1``) has groups, each with its tolerance, its source, what its points have in
common and the points. A CSV file has one point per row and, in the column ``group``, the name of a carried group, from
which the row takes the tolerance and everything that it has no column for.
"""

import csv
import datetime
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from farpipe.core.catalog import device_row
from farpipe.core.errors import InputError
from farpipe.core.spec import (
    Cluster,
    Job,
    LocalLink,
    Lora,
    Matmul,
    Model,
    Pins,
    Recompute,
    Site,
    Training,
    Zero,
    preset_model,
)
from farpipe.core.spec.model import Experts, LatentAttention, RotaryScaling, WindowPattern
from farpipe.core.spec.part import (
    Bandwidth,
    Count,
    Flag,
    Latency,
    Name,
    Natural,
    NonNegative,
    Part,
    Positive,
    Text,
    fault,
)
from farpipe.core.spec.training import AttentionKernel, CudaGraphs, WrittenPrecision
from farpipe.core.spec.written import DevicePreset, WrittenDevice
from farpipe.core.strict import expect_format, nearest, parse_toml, read_text, validate
from farpipe.planning.cost import Layout, Placement, place_evenly

FORMAT: Final = "farpipe/points/1"


def _choices(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


Choices = Annotated[tuple[Count, ...], Field(min_length=1), BeforeValidator(_choices)]
"""A number, or several of which it is not known which one was used."""


_SHAPE: Final = (
    *("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden", "gated_mlp", "vocab_size"),
    *("tied_embeddings", "experts", "latent_attention", "mtp_num_layers", "rotary_scaling"),
    *("sliding_window", "window_attn_skip_freq", "attention_sinks"),
)
"""Keys of a model that a point has too."""


class ReferencePoint(Part):
    """One measured step, and all that is needed to predict it.

    Where a microbatch size or a number of virtual stages was not published, several stand for it, and the fastest that
    fits in memory is taken.
    """

    preset: Name | None = None
    """Model of the catalogue whose shape a point has in what it does not give itself."""
    model: Text = Field(default_factory=lambda known: known.get("preset") or "GPT")
    num_layers: Count
    hidden: Count
    num_heads: Count
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    """hidden / num_heads if not given."""
    ffn_hidden: Count | None = None
    """4 x hidden if not given."""
    gated_mlp: Flag = False
    """A gated MLP with Llama's norms and rotary positions and without biases; else GPT's."""
    tied_embeddings: Flag = True
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    mtp_num_layers: Natural = 0
    rotary_scaling: RotaryScaling | None = None
    sliding_window: Count | None = None
    window_attn_skip_freq: WindowPattern = None
    attention_sinks: Flag = False
    vocab_size: Count
    sequence_length: Count
    global_batch: Count
    microbatch_size: Choices
    tensor: Count
    data: Count
    pipeline: Count
    virtual: Choices = (1,)
    context: Count = 1
    expert: Count = 1
    layers: tuple[Natural, ...] | None = None
    """Layers of every stage; None: as even as can be, the first ones having one more."""
    schedule: Name | None = None
    """None: 1F1B, interleaved where a rank has several stages."""
    precision: WrittenPrecision = "bf16"
    matmul: Matmul = "same"
    fp8_param_gather: Flag = False
    grad_reduce_in_fp32: Flag | None = None
    tp_comm_overlap: Flag = False
    fp8_dot_product_attention: Flag = False
    fp8_output_proj: Flag = False
    cross_entropy_loss_fusion: Flag | None = None
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    overlap_moe_expert_parallel_comm: Flag = False
    lora: Lora | None = None
    activation_func_fp8_input_store: Flag = False
    cuda_graphs: CudaGraphs = False
    cpu_offloading_num_layers: Natural = 0
    kernels: Literal["fused", "eager"] = "fused"
    framework: Literal["megatron", "pytorch"] | None = None
    recompute: Recompute
    sequence_parallel: Flag = False
    flash_attention: Flag
    attention_kernel: AttentionKernel | None = None
    dropout: Flag = False
    overlap: Flag = True
    overlap_param_gather: Flag | None = None
    zero: Zero = 0
    zero_group_size: Count | None = None
    device: DevicePreset
    devices_per_machine: Count = 8
    site_link_latency: Latency
    site_link_bandwidth: Bandwidth
    rank_s: tuple[Positive, Positive, Positive] | None = None
    """Published seconds of a rank's F, I and W of one microbatch, in place of modelled ones."""
    step_s: Positive
    memory_bytes: Positive | None = None
    """The most that a device had allocated."""
    memory_rank: Natural | None = None
    """Rank that `memory_bytes` was logged on; None: the fullest."""
    context_bytes: NonNegative = 0.0
    """Bytes of it that no model accounts for: the driver's context and buffers of libraries."""

    def __str__(self) -> str:
        degrees = f"t{self.tensor} d{self.data} p{self.pipeline}"
        more = {"c": self.context, "e": self.expert, "v": self.virtual[0] if len(self.virtual) == 1 else 1}
        degrees += "".join(f" {letter}{number}" for letter, number in more.items() if number > 1)
        size = f"b{self.microbatch_size[0]}" if len(self.microbatch_size) == 1 else "b?"
        order = f" {self.schedule}" if self.schedule else ""
        return f"{self.model} {degrees} {size} B{self.global_batch} {self.recompute}{order}"

    @model_validator(mode="before")
    @classmethod
    def _read_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("preset"), str):
            return given
        try:
            model = preset_model(given["preset"])
        except ValueError as error:
            raise fault(str(error), "preset") from None
        return {name: getattr(model, name) for name in _SHAPE} | dict(given)

    @model_validator(mode="before")
    @classmethod
    def _read_zero1(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("zero1"), bool) and "zero" not in given:
            return {key: value for key, value in given.items() if key != "zero1"} | {"zero": int(given["zero1"])}
        return given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not any(self._fits(size, virtual) for size, virtual in self._choices()):
            size, virtual = next(self._choices())
            if self.global_batch % (self.data * size):
                message = f"{self.global_batch} is not a multiple of {self.data * size} sequences at a time"
                raise fault(message, "global_batch")
            raise fault(f"{self.pipeline * virtual} stages are more than {self.num_layers} layers", "pipeline")
        if (self.memory_rank or 0) >= self.pipeline:
            raise fault(f"the last of {self.pipeline} ranks is {self.pipeline - 1}", "memory_rank")
        self._expect_job(self.job())
        return self

    def _expect_job(self, at: "ReferenceJob") -> None:
        """The checks of a job whose degrees are pinned: what divides what, what the model and the device have."""
        pinned = ("pipeline", "virtual", "data", "tensor", "context", "expert")
        pins = {name: getattr(at.layout, name) for name in pinned}
        try:
            Job(model=at.model, training=at.training, cluster=at.cluster, layout=Pins(**pins, layers=self.layers))
        except ValidationError as error:
            first = error.errors()[0]
            raise fault(first["msg"], *(key for key in first["loc"] if key in type(self).model_fields)) from None

    def _choices(self) -> Iterator[tuple[int, int]]:
        yield from product(self.microbatch_size, self.virtual)

    def _fits(self, size: int, virtual: int) -> bool:
        """True if the batch and the layers can be divided so; interleaving needs whole rounds of microbatches."""
        count, rest = divmod(self.global_batch, self.data * size)
        rounds = virtual == 1 or not count % self.pipeline
        enough = self.layers is not None or self.pipeline * virtual <= self.num_layers
        return not rest and enough and (rounds or len(self.virtual) == 1)

    def jobs(self) -> list["ReferenceJob"]:
        """The point as the parts of a job, one for each choice that is possible."""
        return [self._job(size, virtual) for size, virtual in self._choices() if self._fits(size, virtual)]

    def job(self) -> "ReferenceJob":
        """The first of `jobs`."""
        return self.jobs()[0]

    def _job(self, size: int, virtual: int) -> "ReferenceJob":
        model = self._model()
        layout = Layout(
            pipeline=self.pipeline,
            data=self.data,
            tensor=self.tensor,
            virtual=virtual,
            microbatch_size=size,
            num_microbatches=self.global_batch // (self.data * size),
            context=self.context,
            context_exchange="ulysses" if self.context > 1 and model.has_windows(self.sequence_length) else "ring",
            expert=self.expert,
        )
        each, more = divmod(self.num_layers, layout.num_stages)
        layers = self.layers or [each + (stage < more) for stage in range(layout.num_stages)]
        placements = place_evenly(["site"] * self.pipeline, layers, self.recompute)
        return ReferenceJob(model, self._training(size), layout, placements, self._cluster(layout))

    def _model(self) -> Model:
        shape = {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}
        return Model(
            **{"ffn_hidden": 4 * self.hidden} | shape,
            name=self.model[:60],
            norm="rmsnorm" if self.gated_mlp else "layernorm",
            positions="rotary" if self.gated_mlp else "learned",
            max_sequence_length=self.sequence_length,
            bias=not self.gated_mlp,
        )

    def _training(self, size: int) -> Training:
        same = Training.model_fields.keys() & type(self).model_fields.keys()
        return Training.model_validate({name: getattr(self, name) for name in same} | {"microbatch_size": size})

    def _cluster(self, layout: Layout) -> Cluster:
        num_machines = -(-layout.pipeline * layout.devices_per_rank // self.devices_per_machine)
        inside = device_row(self.device).machine_link
        site = Site(
            name="site",
            device=WrittenDevice(preset=self.device).resolve(),
            num_devices=num_machines * self.devices_per_machine,
            devices_per_machine=self.devices_per_machine,
            machine_link=LocalLink(latency_s=inside.latency_s, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s),
            site_link=LocalLink(latency_s=self.site_link_latency, bandwidth_bytes_per_s=self.site_link_bandwidth),
        )
        return Cluster(sites=(site,))


@dataclass(frozen=True)
class ReferenceJob:
    """Job that the cost model is asked about."""

    model: Model
    training: Training
    layout: Layout
    placements: tuple[Placement, ...]
    cluster: Cluster


@dataclass(frozen=True)
class ReferenceGroup:
    """Points of one source, judged together."""

    name: str
    tolerance: float
    """Bound of the mean relative error without sign."""
    source: str
    points: tuple[ReferencePoint, ...]
    memory_tolerance: float | None = None
    """The same for memory, where the points have any."""
    left_out: float | None = None
    """Mean error without sign when the constants were fitted to other sources alone; None: nobody tried."""


class _WrittenGroup(Part):
    name: Text
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    memory_tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    left_out: Annotated[float, Field(gt=0)] | None = None
    source: Text
    date: datetime.date | None = None
    common: dict[str, Any] = Field(default_factory=dict)
    points: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]


class _WrittenPoints(Part):
    group: Annotated[tuple[_WrittenGroup, ...], Field(min_length=1)]


def load_points(path: Path | str | None = None) -> tuple[ReferenceGroup, ...]:
    """The groups in the file at `path`, by default those that farpipe carries; InputError names what is wrong."""
    if path is None:
        return tuple(_resolve(group, "reference_points.toml", i) for i, group in enumerate(_carried()))
    if str(path).lower().endswith(".csv"):
        return _from_csv(read_text(path), str(path))
    return tuple(_resolve(group, str(path), i) for i, group in enumerate(_parse(read_text(path), str(path))))


def _carried() -> tuple[_WrittenGroup, ...]:
    text = resources.files("farpipe.core.catalog").joinpath("reference_points.toml").read_text(encoding="utf-8")
    return _parse(text, "reference_points.toml")


def _parse(text: str, source: str) -> tuple[_WrittenGroup, ...]:
    return validate(_WrittenPoints, expect_format(parse_toml(text, source), FORMAT, source), source, toml=text).group


def _resolve(group: _WrittenGroup, source: str, index: int) -> ReferenceGroup:
    points = [
        validate(ReferencePoint, {**group.common, **point}, source, f"group[{index}].points[{place}]")
        for place, point in enumerate(group.points)
    ]
    tolerances = {"memory_tolerance": group.memory_tolerance, "left_out": group.left_out}
    return ReferenceGroup(group.name, group.tolerance, group.source, tuple(points), **tolerances)


def _from_csv(text: str, source: str) -> tuple[ReferenceGroup, ...]:
    carried = {group.name: group for group in _carried()}
    points: dict[str, list[ReferencePoint]] = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        place = f"line {number}"
        if None in row or None in row.values():
            raise InputError(f"{source}: {place}: not as many cells as the header has")
        name = row.pop("group", "")
        if name not in carried:
            hint = nearest(name, carried) or f"; known: {', '.join(carried)}"
            raise InputError(f"{source}: {place}: group: there is no carried group {name!r}{hint}")
        cells = {key: _cell(cell, f"{source}: {place}.{key}") for key, cell in row.items() if cell.strip()}
        point = validate(ReferencePoint, {**carried[name].common, **cells}, source, place)
        points.setdefault(name, []).append(point)
    if not points:
        raise InputError(f"{source}: there is no point in it, only a header")
    return tuple(
        ReferenceGroup(name, carried[name].tolerance, f"{source}, like {carried[name].source}", tuple(found))
        for name, found in points.items()
    )


def _cell(text: str, place: str) -> Any:
    """Value of a cell: true or false, a whole number, a number, a list or table as in TOML, or text."""
    text = text.strip()
    if text.startswith(("[", "{")):
        return parse_toml(f"value = {text}", place)["value"]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
