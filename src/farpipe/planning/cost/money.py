"""Money, energy and carbon of a step: rent, electricity and egress, three terms that are never mixed.

Rent is paid for devices and hours, electricity for energy: devices x power x PUE x hours; egress for bytes that leave a
site. Who rents devices does not pay their electricity as well, and who owns them pays no rent: each kind can be
left out. A price that nobody gave is named in `Money.unpriced` and counts as nothing, so that a sum is never taken for
whole when it is not.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from farpipe.core.spec import Cluster, Prices

Kind = Literal["rent", "electricity", "egress"]
KINDS: Final[tuple[Kind, ...]] = ("rent", "electricity", "egress")
SECONDS_PER_HOUR: Final = 3600.0
BYTES_PER_GB: Final = 1e9
"""Clouds sell GB; whether of 10^9 or 2^30 bytes (7 % more) is up to their fine print."""
MILLION: Final = 1e6


@dataclass(frozen=True)
class Tariff:
    """Tariff of one site: its prices, and the power of one device."""

    prices: Prices
    power_w: float | None
    """Board power; None where it is not known."""

    def energy_kwh(self, num_devices: float, seconds: float, load: float = 1.0) -> float | None:
        """Energy that the site draws for `num_devices` at `load` of their board power; None without a power."""
        if self.power_w is None:
            return None
        return num_devices * self.power_w * load * self.prices.pue * seconds / SECONDS_PER_HOUR / 1000


@dataclass(frozen=True)
class Money:
    """USD by kind, energy and carbon, of a step or of a million tokens."""

    rent_usd: float
    electricity_usd: float
    egress_usd: float
    energy_kwh: float
    carbon_g: float
    unpriced: tuple[str, ...] = ()
    """Prices missing in the figures, ``rent at zurich`` or ``egress zurich>lugano``; empty if they are whole."""

    @property
    def total_usd(self) -> float:
        """All kinds together; without what is unpriced."""
        return self.rent_usd + self.electricity_usd + self.egress_usd

    def times(self, factor: float) -> "Money":
        """Every figure multiplied by `factor`."""
        return Money(
            self.rent_usd * factor,
            self.electricity_usd * factor,
            self.egress_usd * factor,
            self.energy_kwh * factor,
            self.carbon_g * factor,
            self.unpriced,
        )

    def per_million_tokens(self, tokens_per_step: float) -> "Money":
        """The money of a step as that of a million tokens."""
        return self.times(MILLION / tokens_per_step)

    def to_data(self) -> dict[str, Any]:
        """Every figure, and the sum, for machines."""
        return {**vars(self), "total_usd": self.total_usd, "unpriced": list(self.unpriced)}


def tariffs_of(cluster: Cluster) -> dict[str, Tariff]:
    """The tariff of every site of `cluster`, by its name."""
    return {site.name: Tariff(site.prices, site.device.power_w) for site in cluster.sites}


def egress_of(cluster: Cluster) -> dict[str, float | None]:
    """USD for each GB over every directed link, ``a>b``: the link's own price, or else that of the site it leaves."""
    sites = {site.name: site.prices.egress_usd_per_gb for site in cluster.sites}
    return {
        link.name: sites[link.source] if link.egress_usd_per_gb is None else link.egress_usd_per_gb
        for link in cluster.links
    }


def money_of_step(
    cluster: Cluster,
    devices: Mapping[str, int],
    step_s: float,
    link_bytes: Mapping[str, float],
) -> Money:
    """Money of one step of `step_s` seconds on so many `devices` per site, with so many bytes per directed link.

    `link_bytes` is by names such as ``a>b``; traffic inside a site, whose names have a colon, is free.
    """
    between = {name: num_bytes for name, num_bytes in link_bytes.items() if ":" not in name}
    return money(tariffs_of(cluster), egress_of(cluster), devices, step_s, between)


def money(
    tariffs: Mapping[str, Tariff],
    egress_usd_per_gb: Mapping[str, float | None],
    devices: Mapping[str, int],
    seconds: float,
    link_bytes: Mapping[str, float],
    kinds: Collection[Kind] = KINDS,
    load: float = 1.0,
) -> Money:
    """Money for `seconds` on so many `devices` per site and so many bytes per directed link.

    `load` is the share of the board power that the devices draw. Energy and carbon are told whatever `kinds` has.
    """
    missing: list[str] = []
    used = {site: number for site, number in devices.items() if number}
    energies = {site: tariffs[site].energy_kwh(number, seconds, load) for site, number in used.items()}
    missing += [f"power at {site}" for site, energy in energies.items() if energy is None]
    known = {site: energy or 0.0 for site, energy in energies.items()}
    rent, electricity, carbon = (
        _sum_of_sites(tariffs, amounts, price, name, missing)
        for amounts, price, name in (
            (_device_hours(used, seconds, "rent" in kinds), "rent_usd_per_device_hour", "rent"),
            (known if "electricity" in kinds else {}, "electricity_usd_per_mwh", "electricity"),
            (known, "carbon_g_per_kwh", "carbon"),
        )
    )
    egress = _egress_usd(egress_usd_per_gb, link_bytes if "egress" in kinds else {}, missing)
    return Money(rent, electricity / 1000, egress, sum(known.values()), carbon, tuple(missing))


def _device_hours(devices: Mapping[str, int], seconds: float, wanted: bool) -> dict[str, float]:
    return {site: number * seconds / SECONDS_PER_HOUR for site, number in devices.items() if wanted}


def _sum_of_sites(
    tariffs: Mapping[str, Tariff], amounts: Mapping[str, float], price: str, name: str, missing: list[str]
) -> float:
    """The sum of amount x price over the sites; a site without that price is added to `missing`."""
    prices: dict[str, float | None] = {site: getattr(tariffs[site].prices, price) for site in amounts}
    missing += [f"{name} at {site}" for site, figure in prices.items() if figure is None]
    return sum(amounts[site] * figure for site, figure in prices.items() if figure is not None)


def _egress_usd(prices: Mapping[str, float | None], link_bytes: Mapping[str, float], missing: list[str]) -> float:
    sent = {name: num_bytes for name, num_bytes in link_bytes.items() if num_bytes}
    missing += [f"egress {name}" for name in sent if prices.get(name) is None]
    return sum((prices.get(name) or 0.0) * num_bytes / BYTES_PER_GB for name, num_bytes in sent.items())
