"""Lines, tables and pages about plans and runs, as the commands show them."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from farpipe.core.cpu_share import other_work
from farpipe.core.simulate import simulate
from farpipe.core.units import (
    counted,
    format_about,
    format_change,
    format_count,
    format_flops,
    format_hours,
    format_large,
    format_percent,
    format_seconds,
)
from farpipe.planning import Plan, PlanDocument
from farpipe.planning.cost import JobCosts, PartTimes, Profile
from farpipe.planning.cost.profile import hidden_by_noise
from farpipe.planning.explain.changes import WORTH_LISTING
from farpipe.planning.explain.derivation import costs_of
from farpipe.planning.explain.device_use import use_of
from farpipe.planning.explain.trained import engine_words, obstacles_of
from farpipe.planning.planner.plan import Change
from farpipe.planning.planner.quote import money_data
from farpipe.report.plan_tables import (
    bottleneck,
    derivation_tables,
    only_by_export,
    plan_tables,
    site_table,
    trust_note,
)
from farpipe.report.tables import FittedTable, TableView, to_rich
from farpipe.report.views import RunReport, RunView

NUM_VERDICT: Final = 4
"""Lines of a verdict at the top of a page."""


def of_a_device(plan: Plan, device: str | None = None) -> dict[str, Any]:
    """`device_flops`, `causal_share`, `device_peak` and `num_devices` of a RunView, `device` as in RunSpec; no
    FLOPs with `data.packing`, where they follow from the documents of each step, nor of a module of the user's own."""
    if device == "sleep":
        return {}
    use = use_of(plan)
    if plan.job.data.packing is not None or plan.job.model.module is not None:
        return {"num_devices": use.num_devices}
    names = {site.device.name for site in plan.job.cluster.sites}
    as_planned = device in (None, "cuda") or names == {device}
    flops = {"device_flops": use.step_flops / use.num_devices, "num_devices": use.num_devices}
    flops |= {"causal_share": use.causal_share}
    return flops | ({"device_peak": use.peak_flops_per_s / use.num_devices} if as_planned else {})


def use_line(plan: Plan) -> str:
    """Devices of a plan, the rate of each and MFU, in one line; with `data.packing` FLOPs follow from each batch."""
    use = use_of(plan)
    if plan.job.data.packing is not None:
        return counted(use.num_devices, "device")
    each = " each" if use.num_devices > 1 else ""
    about = "~" if plan.job.model.guess else ""
    return f"{counted(use.num_devices, 'device')}, {about}{format_flops(use.flops_per_device_s)}{each} ({use.mfu_text})"


def cost_line(document: PlanDocument, num_tokens: float | None) -> str:
    """Time, device-hours and money of `num_tokens`, by default the job's, in one line."""
    plan = document.plan
    use, training = use_of(plan), plan.job.training
    of_a_step = training.tokens_per_step if plan.job.data.packing is None else use.tokens_per_s * use.step_s
    tokens = num_tokens or training.num_steps * of_a_step
    what = f"{format_large(tokens)} tokens in steps" if num_tokens else f"{format_count(training.num_steps)} steps"
    took = f"{format_seconds(tokens / use.tokens_per_s)}, {format_hours(use.device_hours(tokens))} device-hours"
    step = format_about(use.step_s, is_rough=document.explanation.is_rough)
    return f"{what} of {step} take {took}, {_price(plan, tokens)}"


def _price(plan: Plan, num_tokens: float) -> str:
    """USD of `num_tokens`, at least that where a rent or an egress has no price."""
    per_million = money_data(plan)["per_million_tokens"]
    if not per_million["total_usd"]:
        return "no prices given"
    missing = {word.split()[0] for word in per_million["unpriced"]} & {"rent", "egress"}
    return f"{'at least ' if missing else ''}{format_hours(per_million['total_usd'] * num_tokens / 1e6)} USD"


def verdict_lines(document: PlanDocument, num_tokens: float | None = None, *, ties: bool = True) -> tuple[str, ...]:
    """The use of the sites and how much faster it is; the model's size, time and money it takes, and what limits it;
    the ranges of the step and of its links' share; and with `ties` layouts that are a tie. A guessed model has no
    range."""
    plan, why = document.plan, document.explanation
    use = why.verdict or f"Use {plan.where}."
    limit = f" Bottleneck: {bottleneck(why.limited_by)}." if why.limited_by else ""
    model = plan.job.model
    lines = [
        f"{model.name}: {use[0].lower()}{use[1:]}",
        f"{model.size_text}: {cost_line(document, num_tokens)}.{limit}",
    ]
    if model.guess:
        return tuple(lines)
    return (*lines, *range_lines(document), *filter(None, [why.decides if ties else ""]))


def range_lines(document: PlanDocument) -> Iterator[str]:
    """The range of a step, and that of what links between sites cost of it, a line each."""
    why = document.explanation
    if why.such_jobs:
        low, high = map(format_seconds, document.step_range_s)
        if why.is_rough:  # nothing like it was ever measured: the range is that of other predictions' errors
            yield (
                f"Expect {low} to {high} a step, a guess: so far off were 8 of 10 other predictions ({why.such_jobs})."
            )
        else:
            yield f"8 of 10 such jobs took {low} to {high} a step ({why.such_jobs})."
    if why.links_s > 0.001 * document.plan.prediction.step_s:
        low, high = map(format_seconds, why.links_range_s)
        yield f"Links between sites cost {format_seconds(why.links_s)} of it, {low} to {high} in 8 of 10."


def gain_lines(document: PlanDocument, most: int = 1) -> tuple[str, ...]:
    """The first of the changes that something can run, a line each; what pins cost is no gain that was looked for."""
    changes = document.explanation.changes
    able = [change for change in changes if change.costs != "a pin" and change.runs_on != ()]
    about = "~" if document.plan.job.model.guess else ""
    if not able:
        pins = [change for change in changes if change.costs == "a pin"]
        names = f"; your pins cost speed: {_gained(pins[0], about)}" if pins else ""
        return (f"No change that was tried gains {format_percent(WORTH_LISTING, 0)}{names}.",)
    named = zip(("Cheapest gain: ", *("Then: ",) * most), able[:most], strict=False)
    return tuple(f"{name}{_gained(change, about)}{_marks(change)}." for name, change in named)


def _marks(change: Change) -> str:
    marks = ["changes numerics"] * (change.costs == "other numbers") + ["by export only"] * bool(only_by_export(change))
    return f" ({'; '.join(marks)})" if marks else ""


def _gained(change: Change, about: str) -> str:
    return f"{change.what}: {about}{format_change(change.gain)} tokens/s"


def show_brief(document: PlanDocument, out: Console) -> None:
    """The plan in one table, the two changes that would help most, and whether the engine can run it."""
    spread = [str(document.plan.prediction.spread)] if document.plan.prediction.spread is not None else []
    out.print(Text(_headline(document), "bold"), *spread, sep="\n")
    out.print(to_rich(site_table(document)))
    gains = gain_lines(document, 2) if document.explanation.strategies else ()
    for line in (*filter(None, [trust_note(document)]), *gains, *engine_lines(document)):
        out.print(line)


def show_plan(document: PlanDocument, out: Console) -> None:
    """The plan, its stages and links, the runners-up and why they lost."""
    plan = document.plan
    spread = [str(plan.prediction.spread)] if plan.prediction.spread is not None else []
    out.print(Text(_headline(document), "bold"), *spread, use_line(plan), "", sep="\n")
    for view in filter(lambda view: view.rows, plan_tables(document)):
        out.print(to_rich(view))
    for line in (*document.explanation.advice, *engine_lines(document)):
        out.print(f"* {line}")


def show_derivation(plan: Plan, costs: JobCosts, out: Console) -> None:
    """Print the derivation of the predicted step."""
    for view in derivation_tables(plan, costs):
        out.print(to_rich(view))


def engine_lines(document: PlanDocument) -> tuple[str, ...]:
    """One line on why the engine can't run a plan, what to change in the job, and what it runs then; none where it
    can."""
    plan, found = document.plan, document.explanation.by_train
    found = found if found is not None else obstacles_of(plan)
    return () if found is None else (engine_words(found, plan.prediction.step_s),)


def _headline(document: PlanDocument) -> str:
    plan, is_rough = document.plan, document.explanation.is_rough
    expected = plan.prediction
    return (
        f"{plan.job.model.name}{_sites(plan)}: step {format_about(expected.step_s, is_rough=is_rough)}, "
        f"{format_count(expected.tokens_per_s)} tokens/s, bubble {format_percent(expected.bubble_ratio)}\n"
        f"{plan.degrees}, schedule {plan.schedule.method}"
    )


def _sites(plan: Plan) -> str:
    """``, pipeline over zurich > lugano``, ``, replicas at zurich + lugano`` or `` at zurich``."""
    if plan.layout.replica_sites:
        return f", replicas at {plan.where}"
    return f"{', pipeline over' if len(set(plan.sites)) > 1 else ' at'} {plan.where}"


def step_table(views: list[RunView]) -> FittedTable:
    """Predicted and measured step time of runs."""
    from farpipe.report.summary import step_row, step_time_view  # with charts, which no verdict has

    return to_rich(step_time_view([step_row(view) for view in views]))


def link_event_tables(views: list[RunView]) -> list[FittedTable]:
    """Outages, reconnections and retransmission bursts, a table for every run that had any."""
    from farpipe.report.summary import link_event_view

    named = [(view, view.name if len(views) > 1 else "") for view in views]
    return [to_rich(table) for view, name in named if (table := link_event_view(view.metrics, name)) is not None]


def _derivation_of(plan: Plan) -> tuple[TableView, ...]:
    """Tables of the derivation of the step; none where a profile that the plan does not hold gave its times."""
    costs = costs_of(plan)
    return () if costs is None else derivation_tables(plan, costs)


def planned_view(plan: Plan, **measured: Any) -> RunView:
    """The plan's step as predicted, for a page; `measured` are fields of what was measured of it."""
    return RunView(
        name=plan.schedule.method,
        problem=plan.problem,
        predicted=simulate(plan.problem, plan.schedule, checked=True),
        step_overhead_s=plan.prediction.overhead_s,
        sites=plan.sites,
        **of_a_device(plan),
        **measured,
    )


def plan_report(
    document: PlanDocument,
    runs: list[RunView],
    notices: tuple[str, ...] = (),
    costs: JobCosts | None = None,
    what_if: Mapping[str, Any] | None = None,
) -> RunReport:
    """The page about a plan and its runs; `notices` stand at its top, `costs` are those that it was made with,
    `what_if` are its dials.

    The step of chunks has no derivation: it follows microbatches of one length.
    """
    plan, said = document.plan, document.explanation
    given = costs if plan.job.data.packing is None else None
    why = _derivation_of(plan) if given is None else derivation_tables(plan, given)
    gain = gain_lines(document, 2) if said.strategies else ()
    stages, links, strategies, changes, runners_up = plan_tables(document)
    lines = verdict_lines(document)
    verdict, rest = lines[:NUM_VERDICT], lines[NUM_VERDICT:]
    return RunReport(
        title=f"{plan.job.model.name} over {plan.where}",
        runs=tuple(runs),
        summary=_headline(document).splitlines()[1],
        plan_tables=tuple(view for view in (strategies, runners_up, changes, stages, links) if view.rows),
        plan_text="\n".join((*rest, *gain, *said.advice, *engine_lines(document))),
        notices=notices,
        verdict=tuple(verdict),
        folded=why,
        what_if=what_if,
    )


def profile_table(profile: Profile) -> FittedTable:
    """Table of measured times of one microbatch."""

    def row(name: str, part: PartTimes) -> tuple[str, ...]:
        return name, *(format_seconds(s) for s in (part.forward_s, part.input_grad_s, part.weight_grad_s))

    rows = tuple(row(name, getattr(profile, name)) for name in ("embedding", "layer", "head"))
    doubts = (other_work(profile.cpu_share), hidden_by_noise(profile))
    title = f"{profile.device}, {profile.precision}, microbatch {profile.microbatch_size} x {profile.sequence_length}"
    return to_rich(
        TableView(title, ("part", "F", "I", "W"), rows, frozenset({1, 2, 3}), note=" ".join(filter(None, doubts)))
    )
