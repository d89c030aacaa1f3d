"""Uncertainty of a predicted step: the residual of the least known device in use."""

from collections.abc import Collection

from farpipe.cost import JobCosts
from farpipe.cost.compute import rate_name
from farpipe.spec import Site


def trust(costs: JobCosts, sites: Collection[Site]) -> tuple[float, tuple[str, ...]]:
    """The largest residual of the sites' devices, and those whose times nobody has compared with a measurement.

    A device that was compared for other matrix products alone is told with these: ``gh200 (bf16)``.
    Devices with a profile are measured themselves, and left out; (0, ()) where all are.
    """
    modelled = {s.device.name: costs.calibration(s) for s in sites if s.device.name not in costs.profiles}
    rate = rate_name(costs.training.precision, costs.training.matmul)
    unmeasured = [name for name, calibration in modelled.items() if not calibration.measured]
    partly = [f"{name} ({rate})" for name, at in modelled.items() if at.measured and rate not in at.compared]
    residual = max((calibration.residual_at(rate) for calibration in modelled.values()), default=0.0)
    return residual, tuple(sorted(unmeasured + partly))
