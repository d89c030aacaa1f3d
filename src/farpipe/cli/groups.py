"""Groups of replicas that are not alike, as `farpipe simulate` shows them: beside the first, and the whole step."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpipe.plan import Plan
    from farpipe.report import RunView
    from farpipe.step import Schedule


def group_views(plan: "Plan", schedule: "Schedule") -> "list[RunView]":
    """A view of every group but the first, whose order is `schedule`."""
    from farpipe.plan.grouped_plan import replay
    from farpipe.report import RunView

    return [
        RunView(f"{played.schedule.method}, {group}", played.step.problem, played.timeline, None, (), 0.0, ())
        for group, played in zip(plan.groups, replay(plan, schedule).groups[1:], strict=True)
    ]


def group_data(plan: "Plan | None", schedule: "Schedule", views: "Sequence[RunView]") -> dict[str, Any]:
    """As ``--json`` has them: the other groups' timelines, seconds of the whole step; nothing where there are none."""
    from farpipe.plan.grouped_plan import replay

    if plan is None or not views:
        return {}
    whole = replay(plan, schedule)
    return {"groups": [played.timeline.to_data() for played in whole.groups[1:]], "step_s": whole.step_s}


def tell_groups(plan: "Plan", schedule: "Schedule") -> str:
    """The whole step in a line."""
    from farpipe.plan.grouped_plan import replay
    from farpipe.units import format_seconds

    whole = replay(plan, schedule)
    return (
        f"all {len(whole.groups)} groups of replicas: step {format_seconds(whole.step_s)}, of which "
        f"{format_seconds(whole.makespan_s)} until the last sum of gradients over the groups"
    )
