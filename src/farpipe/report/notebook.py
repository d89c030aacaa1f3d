"""Pictures of plans and timelines in notebooks."""

from farpipe.plan import Plan
from farpipe.report.gantt import Panel, draw_gantt
from farpipe.simulate import Timeline, simulate


def svg_of(document: object) -> str | None:
    """Gantt chart of a timeline, or of the step that a plan predicts; None for anything else."""
    if isinstance(document, Plan):
        timeline = simulate(document.problem, document.schedule, checked=True)
        return draw_gantt([Panel(document.schedule.method, timeline, document.sites)]).svg()
    if isinstance(document, Timeline):
        return draw_gantt([Panel(document.source, document)]).svg()
    return None
