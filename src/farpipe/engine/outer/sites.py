"""The sites of an elastic run, and what each of them runs by itself. Needs no torch."""

from pathlib import Path

from farpipe.core.errors import InputError
from farpipe.core.step import Problem
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.checkpoint.folders import site_folder
from farpipe.engine.run_spec import RunSpec


def sites_of(run: RunSpec) -> tuple[str, ...]:
    """The sites of a run whose replicas are each at one of them, in the order of the replicas."""
    return tuple(dict.fromkeys(sites[0] for sites in run.places.replicas))


def replicas_at(run: RunSpec, site: str) -> tuple[int, ...]:
    """Numbers of the replicas at `site`, among those of the whole run."""
    return tuple(number for number, sites in enumerate(run.places.replicas) if sites[0] == site)


def folder_of_site(run_dir: Path, site: str) -> Path:
    """Run directory of what `site` runs: its figures, checkpoints and logs."""
    return site_folder(run_dir, site)


def run_at(run: RunSpec, site: str) -> RunSpec:
    """What `site` runs by itself: its replicas, with the order, the batch's share and the steps of the whole run.

    InputError for a site that the run does not have.
    """
    if site not in sites_of(run):
        raise InputError(f"the run has no site {site!r}, only {', '.join(sites_of(run))}")
    plan = run.plan
    here = tuple(run.places.replicas[number] for number in replicas_at(run, site))
    bare = BarePlan(
        problem=Problem.from_data({**plan.problem.to_data(), "sync": None}, "the problem of a site"),
        schedule=plan.schedule,
        sites=here[0],
        replicas=here if len(here) > 1 else (),
        tensor=plan.tensor,
        context=plan.context,
        model=plan.model,
        training=plan.training,
        data=plan.data,
        partition=plan.partition,
        recompute=plan.recompute,
    )
    return run.model_copy(update={"plan": bare})
