"""Plans of sites that train by themselves, each its share of the batch in a layout of its own, as `train` runs them."""

from dataclasses import dataclass

from farpipe.core.errors import InputError
from farpipe.core.spec import Job
from farpipe.planning.cost import JobCosts
from farpipe.planning.cost.profile import Profile
from farpipe.planning.explain.separate_sites import fastest_exchange, pins_one_layout, separate_sites, share_of
from farpipe.planning.planner.engine import plan_obstacle, within_engine
from farpipe.planning.planner.find import MeasuredDevices, find
from farpipe.planning.planner.plan import Explanation, Plan, PlanDocument


@dataclass(frozen=True)
class PlansBySite:
    """Plans of unlike sites that exchange after `training.local_steps`."""

    plans: tuple[Plan, ...]
    """Of each site for its share of the batch; their clusters have the links to the other sites."""
    verdict: str

    @property
    def document(self) -> PlanDocument:
        """The plan of the slowest site, which the others wait for, and what all of them do."""
        slowest = max(self.plans, key=lambda plan: plan.prediction.step_s)
        return PlanDocument(plan=slowest, explanation=Explanation(verdict=self.verdict))


def plans_by_site(job: Job, profiles: MeasuredDevices = ()) -> PlansBySite | None:
    """The plans of a job with `training.local_steps` whose sites are unlike; None where one plan stands for all sites.

    Sites and shares are those of the fastest exchange. InputError names what the engine can't run at a site.
    """
    local, pins = job.training.local_steps, job.layout
    if local is None or pins.replicas is not None or job.data.packing is not None or pins_one_layout(job):
        return None
    training = job.training.model_copy(update={"local_steps": None})
    alone, note = within_engine(_one_each(job.model_copy(update={"training": training})))
    by_device = {profile.device: profile for profile in profiles if isinstance(profile, Profile)}
    every = separate_sites(alone, JobCosts(job.model, training, by_device))
    best = fastest_exchange(every, local, job.cluster)
    if best is None or best.identical:
        return None
    plans = tuple(_at(alone, job, *pair, profiles) for pair in zip(best.sites, best.shares, strict=True))
    verdict = f"{best.where} train by themselves and exchange after every {local.every} steps"
    return PlansBySite(plans, f"{verdict}, with {note}." if note else f"{verdict}.")


def _one_each(job: Job) -> Job:
    """The job with one replica at each site, unless FSDP2 divides its state among several: else all would exchange."""
    if job.training.zero in (2, 3):
        return job
    return job.model_copy(update={"layout": job.layout.model_copy(update={"data": 1})})


def _at(alone: Job, job: Job, site: str, share: int, profiles: MeasuredDevices) -> Plan:
    """The plan of one site for `share` sequences of a step, in which the job's other sites and local steps remain."""
    part = share_of(alone, site, share)
    found = find(part, [one for one in profiles if one.device == part.cluster.site(site).device.name])[0].plan
    obstacle, change = plan_obstacle(found)
    if obstacle:
        raise InputError(f"the engine can't run this at {site}: {obstacle}; plan again with {change}")
    training = found.job.training.model_copy(update={"local_steps": job.training.local_steps})
    whole = {"training": training, "layout": job.layout, "cluster": job.cluster}
    return found.model_copy(update={"job": found.job.model_copy(update=whole)})
