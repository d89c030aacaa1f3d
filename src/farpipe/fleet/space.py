"""Free devices of every site and free rates of every link; taken and given back as jobs come and go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from farpipe.fleet.job import Phase, Placement

ROUNDING: Final = 1e-6
"""Bytes/s that a sum of reservations may be off."""


@dataclass
class Space:
    """Free devices by site and free bytes/s by directed link; `copy` it to try something."""

    devices: dict[str, int]
    rates: dict[str, float]

    @property
    def num_devices(self) -> int:
        """Free devices at all sites; a site that has fewer than it gave away counts as empty."""
        return sum(max(0, number) for number in self.devices.values())

    def copy(self) -> "Space":
        """Another one, the same."""
        return Space(dict(self.devices), dict(self.rates))

    def take(self, placement: Placement, phase: Phase) -> None:
        """Less what `placement` holds in `phase`."""
        self._add(placement, phase, -1)

    def give(self, placement: Placement, phase: Phase) -> None:
        """More by what `placement` holds in `phase`."""
        self._add(placement, phase, 1)

    def _add(self, placement: Placement, phase: Phase, sign: int) -> None:
        for site, number in placement.devices:
            self.devices[site] += sign * number
        for link, rate in placement.links(phase).items():
            self.rates[link] += sign * rate

    def has(self, devices: Mapping[str, int] | tuple[tuple[str, int], ...]) -> bool:
        """True if so many devices are free at every site."""
        pairs = devices.items() if isinstance(devices, Mapping) else devices
        return all(0 < number <= self.devices.get(site, 0) for site, number in pairs)

    def overdrawn(self) -> str:
        """The site or link that has given away more than it has; empty if there is none."""
        for site, number in self.devices.items():
            if number < 0:
                return f"site {site}: {-number} devices too many"
        for link, rate in self.rates.items():
            if rate < -ROUNDING * max(1.0, -rate) - 1.0:
                return f"link {link}: {-rate:.6g} bytes/s too many"
        return ""
