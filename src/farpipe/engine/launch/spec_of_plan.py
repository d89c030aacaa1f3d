"""The RunSpec that the ranks of a plan read."""

from typing import TYPE_CHECKING, Any

from farpipe.core.errors import InputError
from farpipe.planning.planner.engine import plan_obstacle

if TYPE_CHECKING:
    from farpipe.core.spec import Job
    from farpipe.engine.run_spec import DeviceKind, RunSpec
    from farpipe.planning import Plan


def run_spec_of(plan: "Plan", **settings: Any) -> "RunSpec":
    """Return the RunSpec with which the ranks run `plan`; `settings` are further fields of it. The device is that of
    the sites unless it is among them.

    InputError for what the engine can't run yet: mixtures of experts of its own, expert parallelism, dropout.
    """
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning.cost import settle
    from farpipe.planning.planner.chunked import SEARCHED

    layout, settings = plan.layout, {"device": None} | settings
    settings["device"] = settings["device"] or device_of(plan.job)
    obstacle, change = plan_obstacle(plan)
    if obstacle:
        raise InputError(f"the engine can't run this yet, only plan it: {obstacle}; plan again with {change}")
    if settings.get("device") == "sleep" and settings.get("group_costs"):
        raise InputError("--device sleep: a rehearsal has one process for all of a stage; pin layout.context and data")
    training = settle(plan.job.training, layout)
    return RunSpec(
        problem=plan.problem,
        schedule=plan.schedule,
        sites=plan.sites,
        model=plan.job.model,
        training=training.model_copy(update={"microbatch_size": layout.microbatch_size}),
        data=plan.job.data,
        partition=tuple((p.first_layer, p.end_layer) for p in plan.placements),
        recompute=plan.recompute,
        replicas=plan.replicas,
        tensor=layout.tensor,
        context=layout.context,
        seeks_orders=plan.job.schedule == SEARCHED,
        peak_flops_per_s=_peak_flops_per_s(plan, settings.get("device")),
        **settings,
    )


def device_of(job: "Job") -> "DeviceKind":
    """The kind of device that a run computes on where nobody says it: that of the sites it may use. InputError where
    they have both kinds."""
    by_kind = {site.device.is_cpu: f"{site.name} has {site.device.name}" for _, site in job.used_sites()}
    if len(by_kind) > 1:
        raise InputError(
            f"a run computes on one kind of device, and {', '.join(by_kind.values())}: say --device cuda or --device "
            "cpu, or leave one of them out with layout.sites"
        )
    return "cpu" if True in by_kind else "cuda"


def _peak_flops_per_s(plan: "Plan", device: str | None) -> float | None:
    """Peak FLOP/s of all devices of the plan together; None if the run computes on others than planned."""
    from farpipe.planning.cost.speed import peak_flops_per_s

    by_name = {site.name: site.device for site in plan.job.cluster.sites}
    devices = [by_name[site] for site in plan.sites]
    if device != "cuda" and any(planned.name != device for planned in devices):
        return None
    of_ranks = sum(peak_flops_per_s(planned, plan.job.training) for planned in devices)
    return of_ranks * plan.layout.data * plan.layout.tensor * plan.layout.context
