"""Cost of resources over time: integrals of prices, so that a job's bill is two readings and a difference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from farpipe.fleet.events import Price
from farpipe.fleet.job import JobPlacement, Phase, Spent
from farpipe.fleet.replacing import replace
from farpipe.planning.cost.money import BYTES_PER_GB, SECONDS_PER_HOUR

JOULES_PER_KWH: Final = 3.6e6


class Reading(NamedTuple):
    """The integrals of one site's price and carbon up to a moment."""

    usd_s_per_mwh: float
    g_s_per_kwh: float


ZERO: Final = Reading(0.0, 0.0)


@dataclass(frozen=True)
class SiteTariff:
    """Prices of one site's devices and energy, now and up to now."""

    rent_usd_per_device_hour: float
    pue: float
    price: Price
    since_s: float
    """`price` holds from then on, and `reading` is of then."""
    reading: Reading = ZERO

    def read(self, now_s: float) -> Reading:
        """The integrals up to `now_s`."""
        seconds = now_s - self.since_s
        return Reading(
            self.reading.usd_s_per_mwh + seconds * self.price.usd_per_mwh,
            self.reading.g_s_per_kwh + seconds * self.price.carbon_g_per_kwh,
        )

    def changed(self, price: Price, now_s: float) -> "SiteTariff":
        """Return the tariff with another price from `now_s` on."""
        return replace(self, price=price, since_s=now_s, reading=self.read(now_s))


Readings = Mapping[str, Reading]


def bill(
    tariffs: Mapping[str, SiteTariff],
    egress_usd_per_gb: Mapping[str, float],
    placement: JobPlacement,
    phase: Phase,
    begin: Readings,
    begin_s: float,
    now_s: float,
) -> Spent:
    """Resources used by holding `placement` from `begin_s`, when meters stood at `begin`, until `now_s`."""
    seconds = now_s - begin_s
    devices = dict(placement.devices)
    energy = {s: w * tariffs[s].pue * seconds / JOULES_PER_KWH for s, w in placement.power_w.items()}
    passed = {site: _less(tariffs[site].read(now_s), begin[site]) for site in devices}
    drawn_kw = {site: placement.power_w.get(site, 0.0) * tariffs[site].pue / 1e3 for site in devices}
    sent = {link: rate * seconds for link, rate in placement.sent(phase).items()}
    return Spent(
        device_s={site: number * seconds for site, number in devices.items()},
        energy_kwh=energy,
        electricity_usd={s: drawn_kw[s] / 1e3 * passed[s].usd_s_per_mwh / SECONDS_PER_HOUR for s in devices},
        carbon_g={site: drawn_kw[site] * passed[site].g_s_per_kwh / SECONDS_PER_HOUR for site in devices},
        rent_usd={
            site: number * seconds / SECONDS_PER_HOUR * tariffs[site].rent_usd_per_device_hour
            for site, number in devices.items()
        },
        sent_bytes=sent,
        egress_usd={link: num_bytes / BYTES_PER_GB * egress_usd_per_gb[link] for link, num_bytes in sent.items()},
    )


def _less(one: Reading, other: Reading) -> Reading:
    return Reading(one.usd_s_per_mwh - other.usd_s_per_mwh, one.g_s_per_kwh - other.g_s_per_kwh)
