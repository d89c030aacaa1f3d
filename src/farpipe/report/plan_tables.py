"""Tables of a plan: stages, links, strategies, changes, runners-up, what its step is made of; and of a Pareto front."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from farpipe.core.step import exceeds, occupied_s
from farpipe.core.units import (
    format_about,
    format_bytes,
    format_change,
    format_count,
    format_percent,
    format_rate,
    format_seconds,
)
from farpipe.planning import Plan
from farpipe.planning.cost import JobCosts
from farpipe.planning.explain.derivation import DerivedQuantity, stage_lines, step_lines
from farpipe.planning.explain.differences import Difference
from farpipe.planning.planner.objective import Objective, is_known
from farpipe.planning.planner.plan import Change, CostClass, PlanDocument, RunnerUp, Strategy
from farpipe.planning.planner.quote import Quote
from farpipe.report.tables import TableView, bar_lengths

COST_WORDS: Final[dict[CostClass, str]] = {
    "a setting": "a setting",
    "other numbers": "numerics",
    "a pin": "a pin of yours",
    "another batch": "another batch",
    "bandwidth": "bandwidth",
    "devices": "devices",
}
"""Costs of changes in words."""
SAME: Final = "same"
"""Name of training that does not differ from the job's."""


def plan_tables(document: PlanDocument) -> tuple[TableView, ...]:
    """Stages, links between sites, strategies, changes that would help, and runners-up."""
    plan, why = document.plan, document.explanation
    return (
        _stage_table(document),
        _link_table(plan),
        strategy_table(why.strategies, is_rough=why.is_rough, chosen=plan.where),
        change_table(why.changes, is_rough=plan.job.model.guess),
        _choice_table(why.runners_up, is_rough=plan.job.model.guess),
    )


def topic_tables(document: PlanDocument) -> dict[str, tuple[TableView, ...]]:
    """The tables of `plan_tables` by the topic that they explain."""
    stages, links, strategies, changes, runners_up = plan_tables(document)
    return {"why-not": (strategies, runners_up), "limits": (changes,), "memory": (stages,), "links": (links,)}


def side_by_side(first: PlanDocument, second: PlanDocument) -> TableView:
    """Two plans in a few figures."""
    rows = [
        (
            one.plan.job.model.name,
            _folded(f"{one.plan.where}: {one.plan.candidate.degrees}"),
            one.plan.schedule.method,
            format_about(one.plan.prediction.step_s, is_rough=one.explanation.is_rough),
            f"{format_count(one.plan.prediction.tokens_per_s)}",
            format_bytes(max(one.plan.prediction.peak_memory_bytes)),
            format_bytes(sum(one.plan.inter_site_bytes.values())),
        )
        for one in (first, second)
    ]
    columns = ("model", "layout", "schedule", "step", "tokens/s", "peak memory", "between sites")
    return TableView("Two plans", columns, tuple(rows), frozenset({3, 4, 5, 6}))


def difference_table(first: Plan, found: Sequence[Difference]) -> TableView:
    """What each difference changes of the step and of the peak memory, one after the other."""
    step_s, memory, rows = first.prediction.step_s, max(first.prediction.peak_memory_bytes), []
    for one in found:
        worth, more = ("with the next",) * 2
        if one.step_s is not None and one.memory_bytes is not None:
            worth = f"{one.step_s - step_s:+.3g} s ({format_change(one.step_s / step_s - 1)})"
            more = f"{(one.memory_bytes - memory) / 2**30:+.3g} GiB"
            step_s, memory = one.step_s, one.memory_bytes
        rows.append((one.what, one.before, one.after, worth, more))
    columns = ("what differs", "first", "second", "step", "peak memory")
    return TableView("Differences, each after those above it", columns, tuple(rows), frozenset({3, 4}))


def site_table(document: PlanDocument) -> TableView:
    """The plan in one table: for each site its devices, ranks, layers, and the rank that comes nearest to its limit."""
    plan, marked, total = document.plan, _marked_sites(document), document.plan.model.num_layers
    rows = []
    for name, num_devices in plan.devices.items():
        ranks = sorted({rank for replica in plan.replicas for rank, site in enumerate(replica) if site == name})
        stages = [one for one in plan.placements if one.rank in ranks]
        peaks = {rank: plan.prediction.peak_memory_bytes[rank] for rank in ranks}
        limits = {rank: plan.problem.ranks[rank].memory_bytes for rank in ranks}
        tight = max(ranks, key=lambda rank: peaks[rank] / (limits[rank] or float("inf")))
        limit = limits[tight]
        rows.append(
            (
                f"{name}{' ~' if name in marked else ''}",
                str(num_devices),
                f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
                f"{sum(one.num_layers for one in stages)} of {total}",
                ", ".join(dict.fromkeys(one.recompute for one in stages)),
                _peak(peaks[tight], limit),
                "unlimited" if limit is None else format_bytes(limit),
            )
        )
    columns = ("site", "devices", "ranks", "layers", "recompute", "peak memory", "limit")
    return TableView("", columns, tuple(rows), frozenset({1, 5, 6}))


def _stage_table(document: PlanDocument) -> TableView:
    plan, marked = document.plan, _marked_sites(document)
    recomputes = any(one.recompute != "none" for one in plan.placements)
    rows = []
    for index, (placement, stage) in enumerate(zip(plan.placements, plan.problem.stages, strict=True)):
        times = (stage.forward_s, stage.input_grad_s, stage.weight_grad_s)
        limit = plan.problem.ranks[placement.rank].memory_bytes
        rows.append(
            (
                str(index),
                f"{placement.rank} at {placement.site}{' ~' if placement.site in marked else ''}",
                placement.layers,
                *(format_seconds(float(plan.problem.row(t).mean())) for t in times),
                _peak(plan.prediction.peak_memory_bytes[placement.rank], limit),
                "unlimited" if limit is None else format_bytes(limit),
                *((placement.recompute,) if recomputes else ()),
            )
        )
    columns = ("stage", "rank", "layers", "F", "I", "W", "peak memory", "limit", *(["recompute"] if recomputes else []))
    numbers, note = frozenset({3, 4, 5, 6, 7}), trust_note(document)
    return TableView("Stages", columns, tuple(rows), numbers, note=note, expendable=(5, 4, 3))


def _peak(peak: float, limit: float | None) -> str:
    over = limit is not None and exceeds(peak, limit)
    return f"{format_bytes(peak)}{' (too much)' if over else ''}"


def _marked_sites(document: PlanDocument) -> set[str]:
    """Sites with devices that were never measured or compared."""
    why = document.explanation
    devices = {name.partition(" (")[0] for name in why.unmeasured}
    return {
        site.name
        for site in document.plan.job.cluster.sites
        if why.uncompared or {site.device.name, site.device.name.partition(" (")[0]} & devices
    }


def trust_note(document: PlanDocument) -> str:
    """Meaning of `~`, or why there is no range."""
    plan, why = document.plan, document.explanation
    if plan.job.model.guess:
        return plan.job.model.guess_note
    if not why.residual:
        return "All times were measured (profiles): no range of errors of the cost model applies to the step."
    if not why.is_rough:
        return ""
    names = ", ".join((*why.unmeasured, *why.uncompared))
    return (
        f"~ predictions for {names} were never compared with measurements. "
        "`farpipe profile` or --learned-from gives times of your own."
    )


def _link_table(plan: Plan) -> TableView:
    rows = [
        (
            name,
            format_seconds(link.latency_s),
            format_rate(link.bandwidth_bytes_per_s),
            format_bytes(plan.prediction.link_bytes.get(name, 0.0)),
            format_percent(occupied_s(link, plan.prediction.link_bytes.get(name, 0.0)) / plan.prediction.step_s),
        )
        for name, link in plan.problem.links.items()
        if plan.problem.between_sites[name]
    ]
    return TableView(
        "Links between sites",
        ("link", "latency", "bandwidth", "bytes per step", "busy"),
        tuple(rows),
        frozenset({1, 2, 3, 4}),
    )


def _choice_table(runners_up: Sequence[RunnerUp], *, is_rough: bool) -> TableView:
    peaks = [choice.peak_memory_bytes for choice in runners_up]
    bars = ((2, bar_lengths([choice.step_s for choice in runners_up])), (3, bar_lengths(peaks)))
    rows = [
        (
            _folded(choice.what),
            choice.method or "-",
            format_about(choice.step_s, is_rough=is_rough) if choice.step_s else "-",
            format_bytes(choice.peak_memory_bytes) if choice.peak_memory_bytes else "-",
            choice.reason,
        )
        for choice in runners_up
    ]
    columns = ("layout", "schedule", "step", "peak memory", "reason")
    numbers = frozenset({2, 3})
    return TableView("Why the others lost", columns, tuple(rows), numbers, expendable=(1, 3), bars=bars)


def _folded(what: str) -> str:
    """A layout on three lines: sites, degrees, the rest."""
    where, _, layout = what.partition(": ")
    degrees, comma, rest = layout.partition(", ")
    return f"{where}:\n{degrees}{comma}\n{rest}" if rest else what


def strategy_table(strategies: Sequence[Strategy], *, is_rough: bool = False, chosen: str | None = None) -> TableView:
    """One row for each, the fastest first; the first that trains as the job says, at the sites `chosen` if any, is the
    chosen one.

    `is_rough`: mark the steps, for such predictions were never measured. Prices are the first to go where it is narrow
    and nothing has one; training stays, for it distinguishes strategies.
    """
    rows = [
        (
            f"{one.kind}: {one.where}",
            format_about(one.step_s, is_rough=is_rough),
            format_count(one.tokens_per_s),
            str(one.num_devices),
            format_bytes(one.inter_site_bytes) if one.inter_site_bytes else "-",
            price(one),
            bottleneck(one.limited_by),
            one.training or SAME,
            *_under_failures(one),
        )
        for one in strategies
    ]
    columns: tuple[str, ...] = (
        *("strategy", "step", "tokens/s", "devices", "between sites", "USD/M tokens", "bottleneck", "training"),
        *(("after a failure", "steps lost", "goodput") if any(map(_under_failures, strategies)) else ()),
    )
    places = [one.where if one.same_training else None for one in strategies]
    own = next((index for index, where in enumerate(places) if where and chosen in (None, where)), None)
    note = "Rows not marked 'same' change the training: compare losses before speed."
    shares = "In brackets: sequences of a step, where sites have different numbers." * any(
        "(" in s.where for s in strategies
    )
    differs = any(not one.same_training for one in strategies)
    local = next((one for one in strategies if one.alone_at), None)
    alone = "" if local is None else _beside_local_steps(local)
    numbers = frozenset({1, 2, 3, 4, 5, 9, 10} if len(columns) > 8 else {1, 2, 3, 4, 5})
    expendable = (4, 3, 2, 6) if any(row[5] != "-" for row in rows) else (5, 4, 3, 2, 6)
    return TableView(
        "Strategies",
        columns,
        tuple(rows),
        numbers,
        own,
        " ".join(filter(None, [note * differs, alone, shares])),
        expendable,
        bars=((1, bar_lengths([one.step_s for one in strategies])),),
    )


def _under_failures(one: Strategy) -> tuple[str, ...]:
    """Cells on failures of sites; none where the job states none."""
    if one.goodput is None or one.steps_lost_per_failure is None:
        return ()
    return one.recovery or "-", f"{one.steps_lost_per_failure:.3g}", format_percent(one.goodput)


def _beside_local_steps(one: Strategy) -> str:
    """Sentence on what one site alone does in the same time."""
    return f"In the time of 100 local steps {one.alone_at} alone does {100 * one.alone_steps:.0f} of the whole batch."


def price(one: Strategy) -> str:
    """USD of a million tokens; with >= where a part has no price, and a dash where nothing has."""
    if not one.usd_per_million_tokens:
        return "-"
    missing = {word.split()[0] for word in one.unpriced} & {"rent", "egress"}
    return f"{'>= ' if missing else ''}{one.usd_per_million_tokens:.3g}"


def change_table(changes: Sequence[Change], *, is_rough: bool = False) -> TableView:
    """One row for each, the cheapest first; `is_rough` as in `strategy_table`."""
    rows = tuple(
        (
            one.what,
            format_change(one.gain),
            format_about(one.step_s, is_rough=is_rough),
            COST_WORDS[one.costs],
            one.training or SAME,
        )
        for one in changes
    )
    columns = ("change", "tokens/s", "step", "costs", "training")
    note = "\n".join(["Each change is planned from scratch: layout, placement and order may differ.", *_marks(changes)])
    return TableView(
        "The cheapest changes that would help", columns, rows, frozenset({1, 2}), note=note, expendable=(2,)
    )


def _marks(changes: Sequence[Change]) -> Iterator[str]:
    """A sentence for each limit on what can run changed plans, with the changes that it is of."""
    for why in filter(None, dict.fromkeys(map(only_by_export, changes))):
        names = "; ".join(one.what for one in changes if only_by_export(one) == why)
        yield f"{names}: {why}."


def only_by_export(change: Change) -> str:
    """Programs left to run the changed plan where farpipe's engine no longer can, in words; else empty."""
    if change.runs_on is None or "farpipe" in change.runs_on:
        return ""
    if not change.runs_on:
        return "neither farpipe nor any export of it can train this yet"
    *others, last = change.runs_on
    return f"farpipe can't train this yet; export to {' or '.join(filter(None, [', '.join(others), last]))}"


def bottleneck(limited_by: str) -> str:
    """Limit of a step in the field's words."""
    return limited_by.replace("computing", "compute")


_NESTED = "   "


def derivation_tables(plan: Plan, costs: JobCosts) -> tuple[TableView, TableView]:
    """The step, and F, I and W of its stages and layers, followed down to products, bytes and constants."""
    step = ("part", "seconds", "from")
    stages = ("one microbatch", "F", "I", "W", "from")
    return (
        TableView("What the step is made of", step, _derived_rows(step_lines(plan, costs)), frozenset({1})),
        TableView("What F, I and W are made of", stages, _derived_rows(stage_lines(plan, costs)), frozenset({1, 2, 3})),
    )


def _derived_rows(lines: Iterable[DerivedQuantity]) -> tuple[tuple[str, ...], ...]:
    return tuple((_NESTED * line.depth + line.what, *map(format_seconds, line.seconds), line.how) for line in lines)


def front_table(front: Sequence[Quote], num_choices: int, left_out: str = "") -> TableView:
    """One row for every choice of the front, the fastest first; `left_out` says what was not looked at."""
    columns = ("sites", "layout", "devices", "step", "tokens/s", "$/Mtok", "kWh/Mtok", "gCO2/Mtok")
    note = (
        f"{len(front)} of {num_choices:,} choices. Estimates by closed forms: pin one ([layout]) for `farpipe plan` to "
        f"simulate it.{left_out and ' '}{left_out}"
    )
    return TableView(
        "Pareto front", columns, tuple(map(_front_row, front)), frozenset(range(2, 8)), note=note, expendable=(7, 6, 4)
    )


def _front_row(quote: Quote) -> tuple[str, ...]:
    at = quote.layout
    more = f"{f' c{at.context}' if at.context > 1 else ''}{f' e{at.expert}' if at.expert > 1 else ''}"
    layout = f"p{at.pipeline} d{at.data} t{at.tensor}{more}{' V' if quote.in_v else ''}"
    figures: tuple[Objective, ...] = ("money", "energy", "carbon")
    return (
        quote.where,
        layout,
        str(quote.num_devices),
        format_seconds(quote.step_s),
        format_count(quote.tokens_per_s),
        *(f"{quote.figure(name):.3g}" if is_known(quote, name) else "-" for name in figures),
    )


def front_data(choices: Sequence[Quote], front: Sequence[Quote]) -> list[dict[str, Any]]:
    """Every choice with its figures, and whether it is on the front."""
    return [_front_data(quote) | {"on_front": any(quote is one for one in front)} for quote in choices]


def _front_data(quote: Quote) -> dict[str, Any]:
    at = quote.layout
    return {
        "where": quote.where,
        "sites": list(quote.sites),
        "pipeline": at.pipeline,
        "data": at.data,
        "tensor": at.tensor,
        "virtual": at.virtual,
        "in_v": quote.in_v,
        "microbatch_size": at.microbatch_size,
        "num_microbatches": at.num_microbatches,
        "num_devices": quote.num_devices,
        "step_s": quote.step_s,
        "tokens_per_s": quote.tokens_per_s,
        "per_million_tokens": quote.per_million_tokens.to_data(),
    }
