"""A run that goes on without a site that it has lost, and with it again when it is back.

Above `run`, which starts ranks and watches them. On one machine a site is lost when its processes have died and its
folder in the run directory, ``sites/NAME``, is gone; it is back when that folder is there again, empty or not. What is
left is planned anew with the same microbatches, so that losses stay the same to the last bit, and starts from the
newest checkpoint that the remaining disks hold in full.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from farpipe.core.errors import InfeasibleError, RunError, RunStoppedError, UsageError
from farpipe.core.spec import Job
from farpipe.core.units import format_seconds
from farpipe.engine.checkpoint.folders import newest_of_run
from farpipe.engine.figures.metrics import Summary
from farpipe.engine.launch.directory import missing_sites
from farpipe.engine.launch.run import LostSiteError, run
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan, PlanDocument, find
from farpipe.planning.explain import explained
from farpipe.planning.planner.engine import within_engine

OnLostSite = Literal["replan", "wait", "end"]
_POLL_S: Final = 0.2


class Start(NamedTuple):
    """A plan and the run of it."""

    document: PlanDocument
    spec: RunSpec


def run_over_sites(
    first: Start,
    run_dir: Path,
    on_lost_site: OnLostSite,
    spec_of: Callable[[PlanDocument, dict[str, Any]], RunSpec],
    *,
    resume: bool = False,
    **launching: Any,
) -> Summary:
    """Run `first` as `run` does, and without a site that is lost, or with it when it is back, as `on_lost_site` says.

    `spec_of(document, settings)`: the run of another plan; `settings` are those of a run on chunks. Raises what `run`
    raises: RunError also when no site is left, or a site that is waited for is not back in `run.site_wait_s`.
    """
    _expect_mirror(first.spec, on_lost_site)
    sites, now, notice = first.spec.places.sites, first, launching.get("on_notice", lambda text: None)
    while True:
        away = sorted(set(sites) - set(now.spec.places.sites))

        def is_back(away: Sequence[str] = away) -> bool:
            return len(missing_sites(away, run_dir)) < len(away)

        try:
            why = now.document.explanation
            return run(now.spec, run_dir, resume=resume, explanation=why, leave_when=is_back, **launching)
        except LostSiteError as error:
            lost = missing_sites(sites, run_dir)
            if on_lost_site == "end" or set(lost) == set(sites):
                raise
            notice(str(error).splitlines()[0])
            if on_lost_site == "wait":
                notice(f"waiting for {', '.join(lost)}")
                _wait_for(sites, run_dir, first.document.plan.job.run.site_wait_s)
        except RunStoppedError:
            if not is_back():
                raise
            notice(f"back: {', '.join(set(away) - set(missing_sites(away, run_dir)))}")
        lost, resume = missing_sites(sites, run_dir), True
        now = first if not lost else _without(lost, first, spec_of)
        at = newest_of_run(run_dir)
        notice(f"going on at {now.document.plan.where} from {at.name if at else 'the beginning'}")


def _expect_mirror(spec: RunSpec, on_lost_site: OnLostSite) -> None:
    """UsageError where the option could do nothing."""
    if on_lost_site == "end":
        return
    if spec.is_elastic:
        raise UsageError(
            f"--on-lost-site {on_lost_site}: with training.elastic the others go on without a lost site, and it "
            "returns by itself; leave it out"
        )
    if not spec.is_mirrored:
        raise UsageError(
            f"--on-lost-site {on_lost_site}: a lost site's part of the checkpoints would be lost with it; set "
            "training.mirror = true, and train (a rehearsal has no checkpoints)"
        )
    if len(spec.places.sites) == 1:
        raise UsageError(f"--on-lost-site {on_lost_site}: the plan uses one site, {spec.places.sites[0]}, alone")
    if spec.light_paths is not None and on_lost_site == "replan":
        raise UsageError("--on-lost-site replan: light paths are of one plan; leave out --light-paths, or say wait")


def _wait_for(sites: Sequence[str], run_dir: Path, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while lost := missing_sites(sites, run_dir):
        if time.monotonic() > deadline_s:
            raise RunError(
                f"waited {format_seconds(limit_s)} (run.site_wait_s) for {', '.join(lost)}; continue with --resume "
                f"{run_dir}"
            )
        time.sleep(_POLL_S)


def _without(lost: Sequence[str], first: Start, spec_of: Callable[[PlanDocument, dict[str, Any]], RunSpec]) -> Start:
    """A plan and a run on what is left, with the microbatches and replicas of the first plan if that can be."""
    plan = first.document.plan
    jobs = [job_without(plan, lost, data=plan.layout.data), job_without(plan, lost, data=None)]
    for number, job in enumerate(jobs):
        try:
            found = find(within_engine(job)[0])[0]
        except InfeasibleError:
            if number == len(jobs) - 1:
                raise
            continue
        chunks = found.chunk_costs
        settings = {"chunk_costs": chunks[-1]} if chunks else {}
        return Start(explained(found), spec_of(explained(found), settings))
    raise AssertionError("the last job is planned, or its error is raised")


def job_without(plan: Plan, lost: Sequence[str], data: int | None) -> Job:
    """The job of `plan` without some sites, pinned to the plan's microbatches and to `data` replicas.

    Pins that belong to the lost sites, as stages, their layers and their order, are open again.
    """
    job, at = plan.job, plan.layout
    left = [site.name for site in job.cluster.sites if site.name not in lost]
    pinned = None if job.layout.sites is None else tuple(name for name in job.layout.sites if name not in lost)
    pins = {"sites": pinned or None, "data": data, "tensor": at.tensor, "context": at.context}
    pins |= dict.fromkeys(("pipeline", "virtual", "layers", "num_microbatches", "replicas"))
    of_chunks = job.data.packing is not None
    training = job.training if of_chunks else job.training.model_copy(update={"microbatch_size": at.microbatch_size})
    return job.model_copy(
        update={
            "cluster": job.cluster.within(left),
            "layout": job.layout.model_copy(update=pins),
            "training": training,
            "schedule": None,
        }
    )
