"""What a run whose sites are runs of their own has to say of them."""

from collections.abc import Sequence

from farpipe.core.spec import Training
from farpipe.core.spec.part import fault
from farpipe.engine.run_settings import RunSettings


def check_local_steps(run: RunSettings, training: Training, replicas: Sequence[Sequence[str]]) -> None:
    """Fault unless each site has what it trains by itself: whole `replicas` of the plan, or a plan of its own."""
    sites = [{*plan.sites} for plan in run.site_plans] or [{*sites} for sites in replicas]
    names = [name for one in sites for name in one]
    if any(len(one) > 1 for one in sites) or len({*names}) < 2:
        raise fault("needs whole replicas at two sites or more; pin layout.data and layout.sites", "local_steps")
    if run.site_plans and (len({*names}) < len(names) or any(plan.training is None for plan in run.site_plans)):
        raise fault(f"each of the sites {', '.join(names)} needs one plan, with its share of the batch", "site_plans")
    if not run.site_plans and len({*names}) < len(names) and training.zero not in (2, 3):
        raise fault("needs training.zero = 2 or 3 with several replicas at each site", "local_steps")
    others = (run.replan, run.chunk_costs, run.light_paths, *run.link_changes)
    if run.device == "sleep" or training.elastic or any(other is not None for other in others):
        raise fault(
            "not with --device sleep, training.elastic, re-planning, data.packing, light paths or changing links",
            "local_steps",
        )


def check_elastic(run: RunSettings, training: Training, replicas: Sequence[Sequence[str]]) -> None:
    """Fault unless whole replicas are at each site, as many at all, and nothing is divided among the sites."""
    sites = [sites[0] for sites in replicas]
    counts = {sites.count(site) for site in sites}
    if any(len({*sites}) > 1 for sites in replicas) or len({*sites}) < 2:
        raise fault("needs whole replicas at two sites or more; pin layout.data and layout.sites", "elastic")
    if len(counts) > 1:
        raise fault("needs as many replicas at every site", "elastic")
    (count,) = counts
    if training.zero == 1 or (count > 1 and training.zero == 0):
        zeros = "2 or 3" if count > 1 else "0, or 2 or 3 with several replicas at each site"
        raise fault(f"state can't be divided among sites that may leave: set training.zero = {zeros}", "elastic")
    others = (run.replan, run.chunk_costs, run.light_paths, *run.link_changes)
    if run.device == "sleep" or any(other is not None for other in others):
        raise fault("not with --device sleep, re-planning, data.packing, light paths or changing links", "elastic")
