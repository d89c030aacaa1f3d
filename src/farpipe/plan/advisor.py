"""The advisor: what else could be done with a plan's sites and links, what limits the plan, and what would help."""

from collections.abc import Sequence

from farpipe.cost import JobCosts
from farpipe.plan.arms import LOCAL_STEPS, arms_of, limit_of
from farpipe.plan.evaluate import Evaluated
from farpipe.plan.improvements import improvements
from farpipe.plan.plan import Plan


def advised(plan: Plan, costs: JobCosts, evaluated: Sequence[Evaluated], local_steps: int = LOCAL_STEPS) -> Plan:
    """`plan` with its arms, what limits it and the cheapest changes; `evaluated[0]` is what it was made of."""
    best = evaluated[0]
    arms = arms_of(plan.job, costs, evaluated, local_steps)
    return plan.model_copy(
        update={
            "arms": tuple(arms),
            "limited_by": limit_of(best),
            "changes": tuple(improvements(plan.job, best, costs, plan.prediction.step_s)),
        }
    )
