"""Groups of replicas that are not alike, as `farpipe simulate` shows them: beside the first, and the whole step."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farpipe.plan import Plan
    from farpipe.plan.groups import PlayedGroups
    from farpipe.report import RunView


def group_views(plan: "Plan", whole: "PlayedGroups") -> "list[RunView]":
    """A view of every group of `plan` but the first, as played in `whole`."""
    from farpipe.report import RunView

    return [
        RunView(f"{played.schedule.method}, {group}", played.step.problem, played.timeline, None, (), 0.0, ())
        for group, played in zip(plan.groups, whole.groups[1:], strict=True)
    ]


def group_data(whole: "PlayedGroups") -> dict[str, Any]:
    """As ``--json`` has them: the timelines of all groups but the first, and seconds of the whole step."""
    return {"groups": [played.timeline.to_data() for played in whole.groups[1:]], "step_s": whole.step_s}


def tell_groups(whole: "PlayedGroups") -> str:
    """The whole step in a line."""
    from farpipe.units import format_seconds

    return (
        f"all {len(whole.groups)} groups of replicas: step {format_seconds(whole.step_s)}, of which "
        f"{format_seconds(whole.makespan_s)} until the last sum of gradients over the groups"
    )
