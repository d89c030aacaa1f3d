"""The tables of a job.toml as people write them, with presets, unit strings and links in both directions.

Every table here has `resolve`, which gives the part of a Job that it stands for. It is called once while the table is
read, so that whatever is wrong with it is reported with the table's own key path.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from farpipe.core.catalog import DeviceRow, LinkRow, device_row, link_row, model_row, price_row
from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import (
    MAX_FIBRE_KM,
    RDMA_WINDOW_BYTES,
    SECONDS_PER_KM,
    SITE_RTT_S,
    TCP_WINDOW_BYTES,
    Cluster,
    CongestionControl,
    Device,
    LocalLink,
    Place,
    PlainTcp,
    Prices,
    Site,
    SiteLink,
    check_ends,
    windowed_rate,
)
from farpipe.core.spec.hugging_face import marked, read_model
from farpipe.core.spec.job import Job, Pins
from farpipe.core.spec.link_matrices import Window, WrittenMatrices
from farpipe.core.spec.model import Model
from farpipe.core.spec.part import (
    Count,
    Flag,
    Name,
    NonNegative,
    NumDevices,
    Part,
    Share,
    SiteName,
    Text,
    at_most_an_hour,
    fault,
    more_than_zero,
    possible_bandwidth,
)
from farpipe.core.spec.training import Data, MetricsSettings, Rate, Training
from farpipe.core.strict import nearest
from farpipe.core.units import BYTES, BYTES_PER_S, FLOPS, SECONDS, WATTS, parse

USUAL_SITE_LINK: Final = "infiniband-ndr"

Value = TypeVar("Value")


def _latency(text: Any) -> float:
    return at_most_an_hour(parse(text, SECONDS, "35 ms"), f"{text!r:.60}")


def _bandwidth(text: Any) -> float:
    value = parse(text, BYTES_PER_S, "400 Gbit/s")
    if value == 0:
        raise ValueError(f"must be more than zero, found {text!r:.60}")
    return possible_bandwidth(value, f"{text!r:.60}")


def _bandwidth_or_none(text: Any) -> float:
    return 0.0 if parse(text, BYTES_PER_S, "400 Gbit/s") == 0 else _bandwidth(text)


def _bytes_or_seconds(text: Any) -> tuple[float, str]:
    """A queue's length: bytes, or for how long the link has to work on it."""
    for units, kind in ((BYTES, "bytes"), (SECONDS, "seconds")):
        with contextlib.suppress(ValueError):
            if value := parse(text, units, ""):
                return value, kind
    raise ValueError(f'expected bytes or a time, more than zero, such as "1 MB" or "20 ms", found {text!r:.60}')


def _known(look_up: Callable[[str], object]) -> AfterValidator:
    """A name that `look_up` finds in the catalogue."""

    def read(name: str) -> str:
        look_up(name)
        return name

    return AfterValidator(read)


ModelPreset = Annotated[Text, _known(model_row)]
DevicePreset = Annotated[Text, _known(device_row)]
LinkPreset = Annotated[Text, _known(link_row)]
Region = Annotated[Text, _known(price_row)]
Latency = Annotated[float, BeforeValidator(_latency)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth)]
BandwidthOrNone = Annotated[float, BeforeValidator(_bandwidth_or_none)]
"""Bandwidth of a link that may be down: 0."""
Memory = Annotated[float, more_than_zero(BYTES, "80 GiB")]
MemoryReserve = Annotated[float, BeforeValidator(lambda text: parse(text, BYTES, "5 GiB"))]
MemoryBandwidth = Annotated[float, more_than_zero(BYTES_PER_S, "3350 GB/s")]
Flops = Annotated[float, more_than_zero(FLOPS, "989 TFLOP/s")]
Queue = Annotated[tuple[float, str], BeforeValidator(_bytes_or_seconds)]
Power = Annotated[float, more_than_zero(WATTS, "700 W")]


def _table(value: Any) -> Any:
    """A name alone is a table with that preset."""
    return {"preset": value} if isinstance(value, str) else value


def _first(place: Place, *values: Value | None) -> Value:
    """The first value that there is; an error at `place` if there is none."""
    found = next((value for value in values if value is not None), None)
    if found is None:
        raise fault("missing; give it, or a preset that has it", *place)
    return found


class Written(Part):
    """A table of the file."""

    @abstractmethod
    def resolve(self) -> Any:
        """The part of a Job that the table stands for."""

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        self.resolve()
        return self


def _config(folder: str, *, guess: bool) -> dict[str, Any]:
    """The shape of the model in `folder`."""
    try:
        return read_model(folder, guess=guess).model_dump()
    except InputError as error:
        raise fault(str(error), "hugging_face") from None


class WrittenModel(Written):
    """[model]: a preset, a shape, a model of Hugging Face, or one of these with some of its shape replaced."""

    model_config = ConfigDict(extra="allow")

    preset: ModelPreset | None = None

    def resolve(self) -> Model:
        """The model; explicit keys override the preset's or those of Hugging Face's config."""
        shape = self.model_extra or {}
        known = ["preset", *Model.model_fields]
        for key in shape:
            if key not in known:
                raise fault(f"unknown key{nearest(key, known)}", key)
        row = model_row(self.preset) if self.preset else None
        if isinstance(folder := shape.get("hugging_face"), str):
            if row:
                raise fault("give either a preset or hugging_face", "hugging_face")
            return marked(Model.model_validate(_config(folder, guess=shape.get("guess") is True) | shape))
        return Model.model_validate(({"name": row.name, **row.shape} if row else {}) | shape)


class WrittenDevice(Written):
    """`device` of a site: a preset, figures, or a preset with some figures replaced."""

    preset: DevicePreset | None = None
    name: Name | None = None
    peak: dict[Rate, Flops] = Field(default_factory=dict)
    memory: Memory | None = None
    memory_bandwidth: MemoryBandwidth | None = None
    power: Power | None = None

    def row(self) -> DeviceRow | None:
        """The preset's row of the catalogue, if there is a preset."""
        return device_row(self.preset) if self.preset else None

    def resolve(self) -> Device:
        """The device; explicit figures override the preset's."""
        row = self.row()
        bandwidth = getattr(row, "memory_bandwidth_bytes_per_s", None)
        return Device(
            name=_first(("name",), self.name, getattr(row, "name", None)),
            peak_flops=_first(("peak",), {**getattr(row, "peak_flops", {}), **self.peak} or None),
            memory_bytes=_first(("memory",), self.memory, getattr(row, "memory_bytes", None)),
            memory_bandwidth_bytes_per_s=_first(("memory_bandwidth",), self.memory_bandwidth, bandwidth),
            power_w=self.power or getattr(row, "power_w", None),
        )


class WrittenSpeed(Part):
    """`machine_link` and `site_link` of a site: a preset, figures, or both."""

    preset: LinkPreset | None = None
    latency: Latency | None = None
    bandwidth: Bandwidth | None = None

    def speed(self, *place: str, default: LinkRow | None = None) -> LocalLink:
        """Latency and bandwidth of the table at `place`; what is not given is the preset's, or else the default's."""
        row = link_row(self.preset) if self.preset else default
        bandwidth = getattr(row, "bandwidth_bytes_per_s", None)
        return LocalLink(
            latency_s=_first((*place, "latency"), self.latency, getattr(row, "latency_s", None)),
            bandwidth_bytes_per_s=_first((*place, "bandwidth"), self.bandwidth, bandwidth),
        )


class WrittenSite(Written):
    """[[cluster.sites]]"""

    name: SiteName
    device: Annotated[WrittenDevice, BeforeValidator(_table)]
    num_devices: NumDevices
    devices_per_machine: Count | None = None
    machine_link: Annotated[WrittenSpeed, BeforeValidator(_table)] = WrittenSpeed()
    site_link: Annotated[WrittenSpeed, BeforeValidator(_table)] = WrittenSpeed()
    memory_reserve: MemoryReserve | None = None
    region: Region | None = None
    prices: Prices = Prices()

    def resolve(self) -> Site:
        """The site; a machine's links are the device preset's unless they are given."""
        row = self.device.row()
        given: dict[str, Any] = {
            "devices_per_machine": self.devices_per_machine,
            "memory_reserve_bytes": self.memory_reserve,
        }
        return Site(
            name=self.name,
            device=self.device.resolve(),
            num_devices=self.num_devices,
            machine_link=self.machine_link.speed("machine_link", default=row.machine_link if row else None),
            site_link=self.site_link.speed("site_link", default=link_row(USUAL_SITE_LINK)),
            prices=self._prices(),
            **{key: value for key, value in given.items() if value is not None},
        )

    def _prices(self) -> Prices:
        """Region prices, overridden by the job's `prices`."""
        if self.region is None:
            return self.prices
        row, device = price_row(self.region), self.device.row()
        known = {key: getattr(row, key) for key in Prices.model_fields}
        rents = known["rent_usd_per_device_hour"]
        known["rent_usd_per_device_hour"] = rents.get(device.name) if device else None
        return Prices.model_validate(known | self.prices.model_dump(exclude_unset=True))


class WrittenLink(WrittenSpeed, Written):
    """[[cluster.links]]: `between` two sites in both directions, or `from` one `to` another."""

    between: tuple[SiteName, SiteName] | None = None
    source: SiteName | None = Field(default=None, alias="from")
    target: SiteName | None = Field(default=None, alias="to")
    queue: Queue | None = None
    loss: Share = 0.0
    jitter: Latency = 0.0
    congestion_control: CongestionControl = "bbr"
    slow_start: Flag = False
    mtu: Annotated[int, Field(ge=576)] = 1500
    egress_usd_per_gb: NonNegative | None = None
    kind: Literal["tcp", "rdma", "lossless-otn"] = "tcp"
    fibre_km: NonNegative | None = None
    streams: Count | None = None
    window: Window | None = None
    acknowledged: Literal["target", "source"] = "target"
    budget: Annotated[float, BeforeValidator(_bandwidth)] | None = None
    buffer: Window | None = None

    def ends(self) -> list[tuple[str, str]]:
        """Source and target of each direction."""
        if self.between and not (self.source or self.target):
            return [self.between, self.between[::-1]]
        if self.source and self.target and not self.between:
            return [(self.source, self.target)]
        raise fault('give either between = ["a", "b"] (both directions) or from = "a" and to = "b" (one)')

    def resolve(self) -> list[SiteLink]:
        """One directed link, or two."""
        speed = self._carried(self._over_fibre()).model_dump()
        disturbed = {"loss": self.loss, "jitter_s": self.jitter, "congestion_control": self.congestion_control}
        figures = speed | disturbed | {"egress_usd_per_gb": self.egress_usd_per_gb}
        if self.slow_start:
            window = self.window or TCP_WINDOW_BYTES
            figures["plain_tcp"] = PlainTcp(num_streams=self.streams or 1, window_bytes=window, mtu_bytes=self.mtu)
        if self.queue is not None:
            length, kind = self.queue
            figures["queue_bytes"] = length * (speed["bandwidth_bytes_per_s"] if kind == "seconds" else 1.0)
        return [SiteLink(source=source, target=target, **figures) for source, target in self.ends()]

    def _over_fibre(self) -> LocalLink:
        """Latency and bandwidth as they are written; the latency may be that of light in `fibre_km` of fibre."""
        if self.fibre_km is None:
            return self.speed()
        if self.latency is not None:
            raise fault("the latency follows from fibre_km: give one of the two", "latency")
        if self.fibre_km > MAX_FIBRE_KM:
            raise fault(
                f"{self.fibre_km:,g} km are more than half of the Earth's circumference ({MAX_FIBRE_KM:,g}); metres?",
                "fibre_km",
            )
        latency_s = at_most_an_hour(self.fibre_km * SECONDS_PER_KM, f"{self.fibre_km:g} km")
        return self.model_copy(update={"latency": latency_s}).speed()

    def _carried(self, speed: LocalLink) -> LocalLink:
        """The link with the rate that its kind leaves of the bandwidth."""
        self._expect_keys_of_kind()
        rate, rtt_s = speed.bandwidth_bytes_per_s, 2 * speed.latency_s
        if self.kind == "lossless-otn":
            rate = rate if self.buffer is None else windowed_rate(rate, self.buffer, rtt_s)
        elif not self.slow_start and (self.kind == "rdma" or self.window is not None or self.streams is not None):
            usual = RDMA_WINDOW_BYTES if self.kind == "rdma" else TCP_WINDOW_BYTES
            window = usual if self.window is None else self.window
            acknowledged_s = SITE_RTT_S if self.acknowledged == "source" else rtt_s
            rate = windowed_rate(rate, window, acknowledged_s, self.streams or 1)
        return speed.model_copy(update={"bandwidth_bytes_per_s": min(rate, self.budget or rate)})

    def _expect_keys_of_kind(self) -> None:
        otn, at_source = self.kind == "lossless-otn", self.acknowledged == "source"
        if at_source and self.kind == "tcp" and self.window is None:
            raise fault("acknowledgements at the source need a window", "acknowledged")
        if self.budget is not None and not at_source:
            raise fault('a destination grants rates only with acknowledged = "source"', "budget")
        if self.buffer is not None and not otn:
            raise fault('a buffer for pause frames belongs to kind = "lossless-otn"', "buffer")
        if otn and (self.window is not None or at_source):
            key = "window" if self.window is not None else "acknowledged"
            raise fault('the equipment of a lossless OTN paces RDMA: leave this out, or take kind = "rdma"', key)
        if self.kind != "tcp":
            for key in ("streams", "loss", "jitter", "slow_start"):
                if getattr(self, key):
                    raise fault(f'"{self.kind}" has no {key}: leave it out, or take kind = "tcp"', key)


class WrittenCluster(Written):
    """[cluster]"""

    sites: Annotated[tuple[WrittenSite, ...], Field(min_length=1)]
    links: tuple[WrittenLink, ...] = ()
    matrices: WrittenMatrices | None = None

    def resolve(self) -> Cluster:
        """The cluster; links are checked here first, where they still have the file's numbers."""
        names = [site.name for site in self.sites]
        check_ends(names, [(("links", i), *ends) for i, link in enumerate(self.links) for ends in link.ends()])
        links = [directed for link in self.links for directed in link.resolve()]
        sites = tuple(site.resolve() for site in self.sites)
        return Cluster(sites=sites, links=(*links, *self._measured(sites, {link.name for link in links})))

    def _measured(self, sites: Sequence[Site], written: Collection[str]) -> list[SiteLink]:
        """Links from the matrices, where none is written."""
        if self.matrices is None:
            return []
        regions = [site.region for site in self.sites]
        found = self.matrices.links(zip(sites, regions, strict=True))
        return [link for link in found if link.name not in written]


class WrittenClusterFile(Written):
    """A file with nothing but a cluster, for `farpipe wan`."""

    cluster: WrittenCluster

    def resolve(self) -> Cluster:
        """The cluster."""
        return self.cluster.resolve()


class WrittenSchedule(Part):
    """[schedule]"""

    method: Text = "auto"


class WrittenJob(Written):
    """The whole file."""

    model: WrittenModel
    training: Training
    cluster: WrittenCluster
    data: Data = Data()
    layout: Pins = Pins()
    schedule: WrittenSchedule = WrittenSchedule()
    metrics: MetricsSettings = MetricsSettings()

    def resolve(self) -> Job:
        """The job."""
        return Job(
            model=self.model.resolve(),
            training=self.training,
            cluster=self.cluster.resolve(),
            data=self.data,
            layout=self.layout,
            schedule=self.schedule.method,
            metrics=self.metrics,
        )
