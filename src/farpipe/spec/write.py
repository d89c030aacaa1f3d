"""Writing a job as job.toml."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import BaseModel

from farpipe.spec.cluster import Cluster, Device, LocalLink, Site, SiteLink
from farpipe.spec.measured import Measured
from farpipe.spec.model import Model
from farpipe.spec.training import Data, Training
from farpipe.spec.uncertainty import Uncertainty


class JobParts(Protocol):
    """Parts of a Job that stand in its file."""

    @property
    def model(self) -> Model: ...

    @property
    def training(self) -> Training: ...

    @property
    def data(self) -> Data: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def layout(self) -> BaseModel: ...

    @property
    def schedule(self) -> str | None: ...

    @property
    def measured(self) -> tuple[Measured, ...]: ...

    @property
    def uncertainty(self) -> Uncertainty: ...


def as_toml(job: JobParts) -> str:
    """`job` in the format that `parse_job` reads, every figure explicit and exact."""
    sections = [
        _section("[model]", job.model.model_dump()),
        _section("[training]", job.training.model_dump() | {"clip_norm": job.training.clip_norm or "none"}),
        _section("[data]", job.data.model_dump()),
        *(_section("[[cluster.sites]]", _site(site)) for site in job.cluster.sites),
        *(_section("[[cluster.links]]", _link(link)) for link in job.cluster.links),
        _section("[layout]", job.layout.model_dump()),
        _section("[schedule]", {"method": job.schedule or "auto"}),
        *(_section("[[measured]]", _measured(table)) for table in job.measured),
        _section("[uncertainty]", job.uncertainty.model_dump() if job.uncertainty else {}),
    ]
    return "\n".join(section for section in sections if section)


def _site(site: Site) -> dict[str, Any]:
    links = {"machine_link": _speed(site.machine_link), "site_link": _speed(site.site_link)}
    table = site.model_dump(exclude={"memory_reserve_bytes", "prices"}) | {"device": _device(site.device)} | links
    prices = {"prices": site.prices.model_dump(exclude_none=True, exclude_defaults=True) or None}
    return table | {"memory_reserve": _quantity(site.memory_reserve_bytes, "B")} | prices


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "peak": {precision: _quantity(rate, "FLOP/s") for precision, rate in device.peak_flops.items()},
        "memory": _quantity(device.memory_bytes, "B"),
        "memory_bandwidth": _quantity(device.memory_bandwidth_bytes_per_s, "B/s"),
        "power": None if device.power_w is None else _quantity(device.power_w, "W"),
    }


def _link(link: SiteLink) -> dict[str, Any]:
    queue = {} if link.queue_bytes is None else {"queue": _quantity(link.queue_bytes, "B")}
    disturbed = {"loss": link.loss or None, "jitter": _quantity(link.jitter_s, "s") if link.jitter_s else None}
    if link.congestion_control != "bbr":
        disturbed["congestion_control"] = link.congestion_control
    price = {"egress_usd_per_gb": link.egress_usd_per_gb}
    return {"from": link.source, "to": link.target} | _speed(link) | queue | disturbed | price


def _measured(table: Measured) -> dict[str, Any]:
    given = table.model_dump(exclude_none=True)
    return {key.removesuffix("_s"): _quantity(v, "s") if key.endswith("_s") else v for key, v in given.items()}


def _speed(link: SiteLink | LocalLink) -> dict[str, Any]:
    return {"latency": _quantity(link.latency_s, "s"), "bandwidth": _quantity(link.bandwidth_bytes_per_s, "B/s")}


def _quantity(value: float, unit: str) -> str:
    return f"{repr(value).removesuffix('.0')} {unit}"


def _section(header: str, table: Mapping[str, Any]) -> str:
    pairs = _pairs(table)
    return "".join(f"{line}\n" for line in [header, *pairs]) if pairs else ""


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
