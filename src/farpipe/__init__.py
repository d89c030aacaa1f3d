"""farpipe: plan, simulate and run the training of one large model over several datacenters.

    plan = farpipe.plan(farpipe.load_job("job.toml"))
    run = farpipe.train(plan, "runs/1")
    print(farpipe.compare(plan.timeline, run.timeline))

Names are imported when they are asked for: ``import farpipe`` loads neither torch nor numpy.
"""

from typing import TYPE_CHECKING, Final

from farpipe.core.lazy import lazy

if TYPE_CHECKING:
    from farpipe import fleet, optical, testing, torch
    from farpipe.core.errors import FarpipeError
    from farpipe.core.simulate import Timeline, simulate
    from farpipe.core.spec import Job, load_job
    from farpipe.core.step import Problem, Schedule
    from farpipe.engine.launch.learned import learn
    from farpipe.engine.launch.runs import Run, train
    from farpipe.planning import Plan, plan, quote
    from farpipe.planning.planner.orders import find_order as order
    from farpipe.report.comparison import compare

__version__ = "0.1.0"

_HOMES: Final = {
    "FarpipeError": "core.errors:FarpipeError",
    "Job": "core.spec:Job",
    "Plan": "planning:Plan",
    "Problem": "core.step:Problem",
    "Run": "engine.launch.runs:Run",
    "Schedule": "core.step:Schedule",
    "Timeline": "core.simulate:Timeline",
    "compare": "report.comparison:compare",
    "learn": "engine.launch.learned:learn",
    "load_job": "core.spec:load_job",
    "order": "planning.planner.orders:find_order",
    "plan": "planning:plan",
    "quote": "planning:quote",
    "simulate": "core.simulate:simulate",
    "train": "engine.launch.runs:train",
}
"""Module and name of every public name; a test holds it to the imports above."""
_MODULES: Final = ("fleet", "optical", "testing", "torch")
__all__ = [
    "FarpipeError",
    "Job",
    "Plan",
    "Problem",
    "Run",
    "Schedule",
    "Timeline",
    "compare",
    "fleet",
    "learn",
    "load_job",
    "optical",
    "order",
    "plan",
    "quote",
    "simulate",
    "testing",
    "torch",
    "train",
]


__getattr__ = lazy(__name__, _HOMES | {name: name for name in _MODULES})


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
