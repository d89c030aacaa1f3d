"""Mark in the verdict of a plan that `train` can't run, with the fastest plan of the job that it can."""

from dataclasses import replace

from farpipe.core.errors import InfeasibleError
from farpipe.core.units import format_change, format_seconds
from farpipe.planning.planner.engine import plan_obstacle, within_engine
from farpipe.planning.planner.find import MeasuredDevices, find
from farpipe.planning.planner.plan import ByTrain, Plan


def by_train(plan: Plan, profiles: MeasuredDevices = ()) -> ByTrain | None:
    """What `train` runs instead of `plan`; None where it runs the plan itself.

    It is searched for where only the layout is in the way, as `train` would; what the job says itself has to be changed
    first.
    """
    obstacle, change = plan_obstacle(plan)
    if not obstacle:
        return None
    job, pins = within_engine(plan.job)
    found = ByTrain(obstacle=obstacle, change=change)
    plain = plan.model_copy(update={"job": job, "layout": replace(plan.layout, tensor=1, context=1, expert=1)})
    if job.data.packing is not None or not pins or plan_obstacle(plain)[0]:
        return found
    try:
        fastest = find(job, profiles)[0].plan
    except InfeasibleError:
        return found
    if plan_obstacle(fastest)[0]:
        return found
    return found.model_copy(update={"step_s": fastest.prediction.step_s, "fastest": str(fastest.degrees)})


def marked(verdict: str, plan: Plan, found: ByTrain | None) -> str:
    """The verdict with the word on what `train` can't run, and what it runs instead."""
    if found is None:
        return verdict
    said = f"{verdict or f'Use {plan.where}.'} Only an export can run it, train can't ({found.obstacle})"
    if found.step_s is None:
        return f"{said}; with {found.change} in the job it can."
    slower = format_change(found.step_s / plan.prediction.step_s - 1)
    return f"{said}; its fastest is {found.fastest}: {format_seconds(found.step_s)} a step ({slower})."
