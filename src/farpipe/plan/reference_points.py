"""Measured steps to compare with: the ones that farpipe carries, and those that a user has in a TOML or CSV file.

A TOML file (format ``farpipe/points/1``) has groups, each with its tolerance, its source, what its points have in
common and the points. A CSV file has one point per row and, in the column ``group``, the name of a carried group, from
which the row takes the tolerance and everything that it has no column for.
"""

import csv
import datetime
import io
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from farpipe.catalog import device_row
from farpipe.cost import Layout, Placement, place_evenly
from farpipe.errors import InputError
from farpipe.spec import Cluster, LocalLink, Model, Precision, Recompute, Site, Training
from farpipe.spec.part import Count, Flag, Part, Positive, Text, fault
from farpipe.spec.written import Bandwidth, DevicePreset, Latency, WrittenDevice
from farpipe.strict import expect_format, nearest, parse_toml, read_text, validate

FORMAT: Final = "farpipe/points/1"


class ReferencePoint(Part):
    """One measured step of a GPT, and all that is needed to predict it."""

    model: Text = "GPT"
    num_layers: Count
    hidden: Count
    num_heads: Count
    num_kv_heads: Count | None = None
    ffn_hidden: Count | None = None
    """4 x hidden if not given."""
    gated_mlp: Flag = False
    tied_embeddings: Flag = True
    vocab_size: Count
    sequence_length: Count
    global_batch: Count
    microbatch_size: Count
    tensor: Count
    data: Count
    pipeline: Count
    virtual: Count = 1
    precision: Precision = "bf16"
    recompute: Recompute
    sequence_parallel: Flag = False
    flash_attention: Flag
    zero1: Flag = False
    device: DevicePreset
    devices_per_machine: Count = 8
    site_link_latency: Latency
    site_link_bandwidth: Bandwidth
    step_s: Positive

    def __str__(self) -> str:
        degrees = f"t{self.tensor} d{self.data} p{self.pipeline}" + (f" v{self.virtual}" if self.virtual > 1 else "")
        return f"{self.model} {degrees} b{self.microbatch_size} {self.recompute}"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        sequences = self.data * self.microbatch_size
        if self.global_batch % sequences:
            raise fault(f"{self.global_batch} is not a multiple of {sequences} sequences at a time", "global_batch")
        if self.pipeline * self.virtual > self.num_layers:
            raise fault(f"{self.pipeline * self.virtual} stages are more than {self.num_layers} layers", "pipeline")
        self.job()
        return self

    def job(self) -> "ReferenceJob":
        """The point as the parts of a job."""
        sequences = self.data * self.microbatch_size
        layout = Layout(
            pipeline=self.pipeline,
            data=self.data,
            tensor=self.tensor,
            virtual=self.virtual,
            microbatch_size=self.microbatch_size,
            num_microbatches=self.global_batch // sequences,
        )
        each, more = divmod(self.num_layers, layout.num_stages)
        layers = [each + (stage < more) for stage in range(layout.num_stages)]
        placements = place_evenly(["site"] * self.pipeline, layers, self.recompute)
        return ReferenceJob(self._model(), self._training(), layout, placements, self._cluster(layout))

    def _model(self) -> Model:
        return Model(
            name=self.model,
            num_layers=self.num_layers,
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            ffn_hidden=self.ffn_hidden or 4 * self.hidden,
            gated_mlp=self.gated_mlp,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            norm="layernorm",
            positions="learned",
            max_sequence_length=self.sequence_length,
            bias=True,
        )

    def _training(self) -> Training:
        same = ("sequence_length", "global_batch", "microbatch_size", "precision", "recompute")
        flags = ("sequence_parallel", "flash_attention", "zero1")
        return Training.model_validate({name: getattr(self, name) for name in same + flags})

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
    """What the cost model is asked about."""

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


class _WrittenGroup(Part):
    name: Text
    tolerance: Annotated[float, Field(gt=0, lt=1)]
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
    text = resources.files("farpipe.catalog").joinpath("reference_points.toml").read_text(encoding="utf-8")
    return _parse(text, "reference_points.toml")


def _parse(text: str, source: str) -> tuple[_WrittenGroup, ...]:
    return validate(_WrittenPoints, expect_format(parse_toml(text, source), FORMAT, source), source).group


def _resolve(group: _WrittenGroup, source: str, index: int) -> ReferenceGroup:
    points = [
        validate(ReferencePoint, {**group.common, **point}, source, f"group[{index}].points[{place}]")
        for place, point in enumerate(group.points)
    ]
    return ReferenceGroup(group.name, group.tolerance, group.source, tuple(points))


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
        cells = {key: _cell(cell) for key, cell in row.items() if cell.strip()}
        point = validate(ReferencePoint, {**carried[name].common, **cells}, source, place)
        points.setdefault(name, []).append(point)
    if not points:
        raise InputError(f"{source}: there is no point in it, only a header")
    return tuple(
        ReferenceGroup(name, carried[name].tolerance, f"{source}, like {carried[name].source}", tuple(found))
        for name, found in points.items()
    )


def _cell(text: str) -> Any:
    """What a cell means: true or false, a whole number, a number, or text."""
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
