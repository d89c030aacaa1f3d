"""The tables of a job.toml as people write them, with presets, unit strings and links in both directions.

Every table here has `resolve`, which gives the part of a Job that it describes. It is called once while the table is
read, so that whatever is wrong with it is reported with the table's own key path.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field

from farpipe.core.catalog import DeviceRow, device_row, link_row, model_row, price_row
from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import (
    Cluster,
    Device,
    Prices,
    Site,
    SiteLink,
    check_ends,
)
from farpipe.core.spec.data import Data
from farpipe.core.spec.hugging_face import marked, read_model
from farpipe.core.spec.job import Job, Pins
from farpipe.core.spec.links import WrittenLink, WrittenMatrices, WrittenSpeed
from farpipe.core.spec.model import Model
from farpipe.core.spec.part import (
    Count,
    Duration,
    Flops,
    Memory,
    MemoryBandwidth,
    MemoryReserve,
    Name,
    NumDevices,
    Part,
    Power,
    SiteName,
    Text,
    Written,
    fault,
    first,
    known,
)
from farpipe.core.spec.publish import PublishSettings
from farpipe.core.spec.run_keys import MetricsSettings, RunKeys
from farpipe.core.spec.training import Rate, Training
from farpipe.core.strict import nearest

USUAL_SITE_LINK: Final = "infiniband-ndr"

ModelPreset = Annotated[Text, known(model_row)]
DevicePreset = Annotated[Text, known(device_row)]
Region = Annotated[Text, known(price_row)]


def _table(value: Any) -> Any:
    """A name alone is a table with that preset."""
    return {"preset": value} if isinstance(value, str) else value


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
    """A model of the catalogue."""

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
    """A device of the catalogue."""
    name: Name | None = None
    """Name in reports."""
    peak: dict[Rate, Flops] = Field(default_factory=dict)
    """Dense rates, without sparsity: `{ bf16 = "989 TFLOP/s", fp16 = ..., fp32 = ... }`; a precision that is left out
    can't be trained in."""
    memory: Memory | None = None
    """Memory of one device that a process can fill."""
    memory_bandwidth: MemoryBandwidth | None = None
    """Bandwidth between that memory and the device."""
    power: Power | None = None
    """Board power."""

    def row(self) -> DeviceRow | None:
        """The preset's row of the catalogue, if there is a preset."""
        return device_row(self.preset) if self.preset else None

    def resolve(self) -> Device:
        """The device; explicit figures override the preset's."""
        row = self.row()
        bandwidth = getattr(row, "memory_bandwidth_bytes_per_s", None)
        return Device(
            name=first(("name",), self.name, getattr(row, "name", None)),
            peak_flops=first(("peak",), {**getattr(row, "peak_flops", {}), **self.peak} or None),
            memory_bytes=first(("memory",), self.memory, getattr(row, "memory_bytes", None)),
            memory_bandwidth_bytes_per_s=first(("memory_bandwidth",), self.memory_bandwidth, bandwidth),
            power_w=self.power or getattr(row, "power_w", None),
        )


class WrittenSite(Written):
    """[[cluster.sites]]"""

    name: SiteName
    """Letters, digits, `_`, `-`, `.`; different for every site."""
    device: Annotated[WrittenDevice, BeforeValidator(_table, json_schema_input_type=str | WrittenDevice)]
    """A device of the catalogue, or a table (below)."""
    num_devices: NumDevices
    """Devices at the site, all equal; at most 1,048,576."""
    devices_per_machine: Count | None = None
    """Devices that `machine_link` joins; divides `num_devices`. Default: for `gb200` and `gb300` the largest divisor up
    to the 72 of a rack; for others 8, and the last machine may have fewer."""
    machine_link: Annotated[WrittenSpeed, BeforeValidator(_table, json_schema_input_type=str | WrittenSpeed)] = (
        WrittenSpeed()
    )
    """Link over which one device sends to the others of its machine, in one direction: a preset or `{ latency,
    bandwidth }`. Default: the device preset's."""
    site_link: Annotated[WrittenSpeed, BeforeValidator(_table, json_schema_input_type=str | WrittenSpeed)] = (
        WrittenSpeed()
    )
    """The same between the machines of the site. Default: `"infiniband-ndr"` (14 us, 400 Gbit/s)."""
    memory_reserve: MemoryReserve | None = None
    """Memory that plans leave free on every device for the driver's context, buffers of libraries and fragmentation;
    `"0 B"` for none. Default: 2.5 GiB, or a sixteenth of
    the device's memory where that is less; a plan warns where less than a sixteenth is free."""
    region: Region | None = None
    """Region of the site's prices, `"aws:us-east-1"`: a region of the catalogue."""
    prices: Prices = Prices()
    """A table (below); each key replaces the region's figure. Default: no prices."""
    mtbf: Duration | None = None
    """Mean time between failures of the site, as `"24 h"`: strategies then show the steps that a failure costs and
    their goodput."""
    mttr: Duration | None = None
    """Mean time to repair: how long a site is away after a failure. Default: `"2 min"`, a guess."""

    def resolve(self) -> Site:
        """The site; a machine's links are the device preset's unless they are given."""
        row = self.device.row()
        given: dict[str, Any] = {
            "devices_per_machine": self.devices_per_machine,
            "memory_reserve_bytes": self.memory_reserve,
            "mtbf_s": self.mtbf,
            "mttr_s": self.mttr,
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
    """Order in which each rank works, for example `"1f1b"`; `"auto"` takes the best; `"FILE.py:FUNCTION"` is one of
    your own. `"interleaved"` with one stage per rank is 1F1B, as in Megatron-LM."""


class WrittenJob(Written):
    """The whole file."""

    model: WrittenModel
    training: Training
    cluster: WrittenCluster
    data: Data = Data()
    layout: Pins = Pins()
    schedule: WrittenSchedule = WrittenSchedule()
    metrics: MetricsSettings = MetricsSettings()
    run: RunKeys = RunKeys()
    publish: PublishSettings | None = None

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
            run=self.run,
            publish=self.publish,
        )
