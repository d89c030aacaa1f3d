"""Plan of a placement: what a job runs as on the devices and links that it was given."""

from dataclasses import dataclass
from typing import Final

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import Cluster, Request
from farpipe.core.units import format_change, format_seconds
from farpipe.fleet.requests import request_of
from farpipe.fleet.snapshot import Snapshot
from farpipe.planning.cost import Layout
from farpipe.planning.planner.find import MeasuredDevices, plan
from farpipe.planning.planner.plan import Plan
from farpipe.planning.planner.quotes import left_of

SAME: Final = 0.05
"""Relative difference of the planned step from the quoted one up to which nothing is said."""


@dataclass(frozen=True)
class PlacedPlan:
    """The plan of a job where the fleet has placed it."""

    plan: Plan
    quoted_s: float
    """The quote's step, on which the decision rests."""
    is_as_quoted: bool
    """True if the plan has the layout of the quote; False: with that it would be slower, or impossible."""

    @property
    def difference(self) -> float:
        """(quoted - planned) / planned step."""
        planned_s = self.plan.prediction.step_s
        return (self.quoted_s - planned_s) / planned_s

    @property
    def warning(self) -> str:
        """Sentence on a step that differs from the quote's by more than `SAME`; empty if it does not."""
        if abs(self.difference) <= SAME:
            return ""
        planned, quoted = format_seconds(self.plan.prediction.step_s), format_seconds(self.quoted_s)
        return f"planned {planned} a step, quoted {quoted} ({format_change(self.difference)})"


def plan_of(state: Snapshot, cluster: Cluster, name: str, profiles: MeasuredDevices = ()) -> PlacedPlan:
    """The plan of the job `name`, which has devices in `state`, on the fleet's `cluster`.

    Links have what others leave of them. It has the quoted layout, or, where its step is not the quoted one, the
    fastest. It takes seconds to minutes. InputError for a job without devices, or known by its duration alone;
    InfeasibleError if no plan works there.
    """
    job = state.job(name)
    here = job.placement
    if here is None:
        raise InputError(f"job {name!r} is {job.phase}: it has no devices to plan for")
    if job.job.kind.num_devices:
        raise InputError(f"job {name!r} is known by its duration alone: there is nothing to plan")
    return plan_as_quoted(request_of(job.job.kind), part_of(state, cluster, name), here.layout, here.step_s, profiles)


def plan_as_quoted(
    request: Request, part: Cluster, layout: Layout | None, quoted_s: float, profiles: MeasuredDevices = ()
) -> PlacedPlan:
    """The plan of `request` on `part` of a cluster, quoted there with a `layout` and a step of `quoted_s`."""
    quoted = _with_layout(request, part, layout, quoted_s, profiles)
    if quoted is not None and not quoted.warning:
        return quoted
    free = PlacedPlan(plan(request.on(part), profiles), quoted_s, False)
    return free if quoted is None else min(quoted, free, key=lambda one: one.plan.prediction.step_s)


def _with_layout(
    request: Request, part: Cluster, layout: Layout | None, quoted_s: float, profiles: MeasuredDevices
) -> PlacedPlan | None:
    """The plan with the quoted layout; None where there is none, or closed forms let pass what does not fit."""
    if layout is None or request.data.packing is not None:
        return None
    try:
        return PlacedPlan(plan(_pinned(request, layout).on(part), profiles), quoted_s, True)
    except InfeasibleError:
        return None


def part_of(state: Snapshot, cluster: Cluster, name: str) -> Cluster:
    """The devices of a job with a placement, and links with what nobody else has reserved."""
    job = state.job(name)
    here = job.placement
    assert here is not None
    free, mine = state.space().rates, here.links(job.phase)
    rates = {link: max(0.0, min(state.rates[link], rate + mine.get(link, 0.0))) for link, rate in free.items()}
    devices = dict(here.devices)
    return left_of(cluster, {site.name: devices.get(site.name, 0) for site in cluster.sites}, rates)


def _pinned(request: Request, layout: Layout) -> Request:
    """`request` with the quoted layout."""
    names = ("pipeline", "data", "tensor", "virtual", "context", "expert", "num_microbatches")
    pins = {name: getattr(layout, name) for name in names}
    pins["replicas"] = "across" if layout.replica_sites else "inside"
    return request.model_copy(update={"layout": request.layout.model_copy(update=pins)})
