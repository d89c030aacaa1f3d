"""Uncertainty of a predicted step: the residual of the least known device in use."""

from collections.abc import Collection

from farpipe.cost import JobCosts
from farpipe.spec import Site


def trust(costs: JobCosts, sites: Collection[Site]) -> tuple[float, tuple[str, ...]]:
    """The largest residual of the sites' devices, and those whose times nobody has compared with a measurement.

    Devices with a profile are measured themselves, and left out; (0, ()) where all are.
    """
    modelled = {s.device.name: costs.calibration(s) for s in sites if s.device.name not in costs.profiles}
    unmeasured = tuple(sorted(name for name, calibration in modelled.items() if not calibration.measured))
    return max((calibration.residual for calibration in modelled.values()), default=0.0), unmeasured
