"""Prices of a site's devices, electricity and outgoing traffic; a price that is not known is None, never zero."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from farpipe.spec.part import NonNegative, Part


def _finite_number(value: Any) -> float:
    """Prices of electricity may be negative, and were in Victoria in 22 % of the hours of early 2024."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise ValueError(f"expected a price in USD, found {value!r:.40}")
    return float(value)


def _pue(value: Any) -> float:
    number = _finite_number(value)
    if not 1 <= number <= 10:
        raise ValueError(f"a site draws at least what its devices draw: from 1 to 10, found {value!r:.40}")
    return number


class Prices(Part):
    """Prices of one site, and the carbon of its electricity."""

    rent_usd_per_device_hour: NonNegative | None = None
    electricity_usd_per_mwh: Annotated[float, BeforeValidator(_finite_number)] | None = None
    """May be negative."""
    pue: Annotated[float, BeforeValidator(_pue)] = 1.0
    """Power usage effectiveness: what the site draws for each watt of its devices."""
    carbon_g_per_kwh: NonNegative | None = None
    egress_usd_per_gb: NonNegative | None = None
    """Of 10^9 bytes that leave for another site, unless the link has a price of its own."""
