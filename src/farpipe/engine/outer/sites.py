"""The sites of an elastic run, and what each of them runs by itself. Needs no torch."""

import itertools
from pathlib import Path

from farpipe.core.errors import InputError
from farpipe.core.spec import Training
from farpipe.core.step import Problem
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.checkpoint.folders import SITES_NAME, newest_of_run
from farpipe.engine.run_spec import RunSpec


def sites_of(run: RunSpec) -> tuple[str, ...]:
    """The sites of a run whose replicas are each at one of them, in the order of the replicas."""
    if run.site_plans:
        return tuple(plan.sites[0] for plan in run.site_plans)
    return tuple(dict.fromkeys(sites[0] for sites in run.places.replicas))


def replicas_at(run: RunSpec, site: str) -> tuple[int, ...]:
    """Numbers of the replicas at `site`, among those of the whole run."""
    return tuple(number for number, sites in enumerate(run.places.replicas) if sites[0] == site)


def run_at(run: RunSpec, site: str) -> RunSpec:
    """What `site` runs by itself: its replicas, with the order, the batch's share and the steps of the whole run.

    InputError for a site that the run does not have.
    """
    if site not in sites_of(run):
        raise InputError(f"the run has no site {site!r}, only {', '.join(sites_of(run))}")
    if run.site_plans:
        own = run.site_plans[sites_of(run).index(site)]
        return run.model_copy(update={"plan": own, "site_plans": ()} | _of_whole(run))
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
        training=_training_at(run, site),
        data=plan.data,
        partition=plan.partition,
        recompute=plan.recompute,
    )
    return run.model_copy(update={"plan": bare} | _of_whole(run))


def _of_whole(run: RunSpec) -> dict[str, object]:
    """What a site has of the whole run: the checkpoint to go on from, and with local steps the whole batch."""
    training = run.plan.training
    whole = None if training is None or run.local_steps is None else _batch_of(run)
    return {"resume": _resumed(run.resume), "whole_batch": whole}


def _batch_of(run: RunSpec) -> int:
    """Sequences of a step of all sites."""
    plans = run.site_plans or (run.plan,)
    return sum(plan.training.global_batch for plan in plans if plan.training is not None)


def _training_at(run: RunSpec, site: str) -> Training | None:
    """The training of `site`; with local steps its batch is its share. Each site has its own checkpoints anyway."""
    training = run.plan.training
    if training is None:
        return None
    changed: dict[str, object] = {"mirror": False}
    if run.local_steps is not None:
        changed["global_batch"] = training.global_batch * len(replicas_at(run, site)) // run.num_replicas
    return training.model_copy(update=changed)


def share_of(run: RunSpec, site: str) -> tuple[int, int]:
    """With local steps: sequences of a whole batch that sites before `site` train on, and those of the whole batch."""
    before = itertools.takewhile(lambda other: other != site, sites_of(run))
    sizes = [run_at(run, other).plan.training for other in before]
    return sum(one.global_batch for one in sizes if one is not None), _batch_of(run)


def _resumed(path: str | None) -> str | None:
    """The run that a site goes on from: of another elastic run, what the site furthest on has written."""
    if path is None or not (Path(path) / SITES_NAME).is_dir():
        return path
    newest = newest_of_run(Path(path))
    return path if newest is None else str(newest.parent.parent)
