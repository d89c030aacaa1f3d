"""Mark in the verdict of a plan that `train` can't run, with the fastest plan of the job that it can."""

from dataclasses import replace
from typing import Final

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Job
from farpipe.core.units import format_change, format_seconds
from farpipe.planning.cost import JobCosts
from farpipe.planning.planner.candidates import decided
from farpipe.planning.planner.engine import plan_obstacle, within_engine
from farpipe.planning.planner.find import MeasuredDevices, as_plan, find
from farpipe.planning.planner.lattice import Lattice
from farpipe.planning.planner.plan import ByTrain, Plan
from farpipe.planning.planner.refinement import refined
from farpipe.planning.planner.search import BEST_ONLY, search

FAR: Final = 1.75
"""Ratio to the plan's step beyond which a quick search tells the fastest that `train` runs."""
MAYBE_FAR: Final = 1.4
"""Ratio of the least estimate of all that `train` runs to the plan's step from which a quick search is worth trying:
estimates of long pipelines are a fifth too short."""
_BY_SITE: Final = "given the job, train finds each site a layout of its own"


def obstacles_of(plan: Plan) -> ByTrain | None:
    """What `train` can't run of `plan`; None where it runs the plan itself."""
    obstacle, change = plan_obstacle(plan)
    return ByTrain(obstacle=obstacle, change=change) if obstacle else None


def fastest_by_train(found: ByTrain, plan: Plan, costs: JobCosts, profiles: MeasuredDevices = ()) -> ByTrain:
    """`found` of `plan` with what `train` runs instead.

    It is searched for where only the layout is in the way, as `train` would; what the job says itself has to be changed
    first. `costs` are those that the plan was made with.
    """
    job, pins = within_engine(plan.job)
    plain = plan.model_copy(update={"job": job, "layout": replace(plan.layout, tensor=1, context=1, expert=1)})
    if job.data.packing is not None or not pins or plan_obstacle(plain)[0]:
        return found
    try:
        far = _from_afar(job, costs, plan)
        fastest = far or find(job, profiles, costs=costs)[0].plan
    except InfeasibleError:
        return found
    if plan_obstacle(fastest)[0]:
        return found
    update = {"step_s": fastest.prediction.step_s, "fastest": str(fastest.degrees), "quick": far is not None}
    return found.model_copy(update=update)


def _from_afar(job: Job, costs: JobCosts, plan: Plan) -> Plan | None:
    """The plan of a quick search where all that `train` runs is far slower than `plan`; else None."""
    # A search of all layouts with one device a layer takes longer than the plan's own (405B on 3 x 1024: 31 s after
    # 2.6), for pipelines are long; by how much more than three quarters the best of them is slower helps nobody.
    settled = decided(job)
    costs = costs.trained(settled.training)
    lattice = Lattice(settled, costs)
    least_s = min((of_set[0].step_s for of_set in lattice.estimates(lattice.whole, 1)), default=0.0)
    if least_s < plan.prediction.step_s * MAYBE_FAR:
        return None
    best = search(settled, costs, BEST_ONLY, lattice=lattice).best
    if best is None or best.step_s < plan.prediction.step_s * FAR:
        return None
    return as_plan(settled, refined(settled, best, costs)[1])


def engine_words(found: ByTrain, step_s: float) -> str:
    """What the engine can't run of a plan that takes `step_s`, what to change in the job, and what it runs then."""
    remedy = f"with {found.change} in the job it can" if found.change else _BY_SITE
    said = f"farpipe's engine can't run this plan yet ({found.obstacle}); {remedy}"
    words = "" if found.step_s is None else f": {'by a quick search ' * found.quick}{_fastest(found, step_s)}"
    return f"{said}{words}."


def _fastest(found: ByTrain, step_s: float) -> str:
    assert found.step_s is not None
    slower = format_change(found.step_s / step_s - 1)
    return f"{found.fastest}: {format_seconds(found.step_s)} a step ({slower})"


def marked(verdict: str, plan: Plan, found: ByTrain | None) -> str:
    """The verdict with the word on what `train` can't run, and what it runs instead."""
    if found is None:
        return verdict
    said = f"{verdict or f'Use {plan.where}.'} Only an export can run it"
    if found.step_s is None:
        return f"{said}; {f'train needs {found.change}' if found.change else _BY_SITE}."
    said = f"{said}, train can't ({found.obstacle})"
    name = "a quick search found for it" if found.quick else "its fastest is"
    return f"{said}; {name} {_fastest(found, plan.prediction.step_s)}."
