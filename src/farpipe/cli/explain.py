"""``farpipe explain PLAN [TOPIC]`` and ``farpipe diff A B``: the rest of a plan, and two plans side by side."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farpipe.cli.options import AsJson, with_groups
from farpipe.cli.output import console, print_json, progress_bar
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpipe.core.spec import Job
    from farpipe.planning import PlanDocument

TOPICS: Final = {
    "why-not": r"\b(tie|[Ff]aster than this|[Dd]ata parallelism|looked at|Strategies)\b",
    "memory": r"\b([Mm]emory|FlashAttention|recompute)",
    "links": r"\b([Ll]inks?|bandwidth|packets?|staggered|[Ll]ink-bound)\b",
    "limits": "",
}
"""Topics, and words of the advice that belongs to each; to the last what belongs to no other."""
PINS: Final = "a layout as pipeline=1,data=16 (keys of [layout]; sites=zurich>lugano)"


@dataclass(frozen=True)
class ExplainOptions:
    """A plan, and what of it is explained."""

    plan: Annotated[Path, typer.Argument(help="A plan, or a job (.toml), which is planned first.")]
    topic: Annotated[
        str | None, typer.Argument(help=f"why-not, limits, memory, links, or {PINS}; default: all of the plan.")
    ] = None
    as_json: AsJson = False


@with_groups
def explain(options: ExplainOptions) -> None:
    """Explain a plan: why not another, what limits it, memory, links; or what another layout would be.

    why-not: strategies, runners-up and ties. limits: the bottleneck, the changes that would help, what every predicted
    second is made of. memory: stages with their peaks and limits. links: bytes and use. A layout is planned with these
    pins and put beside the plan.
    """
    document, topic = _read(options.plan, searches=True), options.topic
    if topic is not None and topic not in TOPICS:
        if "=" not in topic:
            raise UsageError(
                f"TOPIC: {topic!r} is none{nearest(topic, TOPICS)}; expected {', '.join(TOPICS)}, or {PINS}"
            )
        other = _with_layout(document.plan.job, topic)
        _compare(document, other, options.as_json)
        return
    if options.as_json:
        print_json(_facts(document, topic))
        return
    _show(document, topic)


@with_groups
def diff(
    first: Annotated[Path, typer.Argument(help="A plan, or a job (.toml), such as an imported one.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Put two plans side by side: what differs, and what each difference is worth.

    Differences are made one by one, from the first plan to the second: model, sites and links, training, layout, order.
    Each job on the way is planned with its layout pinned, so that the worths add up; what one is worth depends on those
    before it. A job is planned first.
    """
    _compare(_read(first), _read(second), as_json)


def _read(path: Path, *, searches: bool = False) -> "PlanDocument":
    from farpipe.cli.planned import load_explained

    document = load_explained(path, searches=searches)[2]
    if document is None:
        raise InputError(f"{path}: a problem has no job; give a plan or a job")
    return document


def _with_layout(job: "Job", text: str) -> "PlanDocument":
    """The plan of a job with the pins in `text` alone."""
    from farpipe.core.spec import load_job, value_of
    from farpipe.planning import find
    from farpipe.planning.explain import explained

    pins: dict[str, Any] = {"layout": None}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        pins[f"layout.{name}"] = value.split(">") if name == "sites" else value_of(value)
    return explained(find(load_job(job, pins, option="TOPIC"))[0], searches=False)


def _compare(first: "PlanDocument", second: "PlanDocument", as_json: bool) -> None:
    from dataclasses import asdict

    from farpipe.planning.explain.differences import differences
    from farpipe.report.plan_tables import difference_table, side_by_side
    from farpipe.report.tables import to_rich

    with progress_bar("pricing differences", "difference") as advance:
        found = differences(first.plan, second.plan, advance)
    if as_json:
        plans = [{"where": one.plan.where, "step_s": one.plan.prediction.step_s} for one in (first, second)]
        print_json({"plans": plans, "differences": [asdict(one) for one in found]})
        return
    console().print(to_rich(side_by_side(first, second)))
    if found:
        console().print(to_rich(difference_table(first.plan, found)))
    else:
        typer.echo("The two plans are equal.")


def _show(document: "PlanDocument", topic: str | None) -> None:
    from farpipe.planning.explain.derivation import costs_of
    from farpipe.report.plan_tables import derivation_tables, topic_tables
    from farpipe.report.shown import engine_lines, gain_lines, verdict_lines
    from farpipe.report.tables import to_rich

    out, plan, why = console(), document.plan, document.explanation
    gains = gain_lines(document, 2) if why.strategies and topic in (None, "limits") else ()
    out.print(*verdict_lines(document)[: 1 if topic else None], *gains, sep="\n")
    if topic == "why-not":
        out.print(*filter(None, [why.decides]), sep="\n")
    out.print()
    for name in TOPICS if topic is None else (topic,):
        for view in topic_tables(document)[name]:
            if view.rows:
                out.print(to_rich(view))
        for line in _advice(document)[name]:
            out.print(f"* {line}")
    for line in engine_lines(document):
        out.print(f"* {line}")
    if topic in (None, "limits"):
        costs = costs_of(plan) if plan.job.data.packing is None else None
        for view in () if costs is None else derivation_tables(plan, costs):
            out.print(to_rich(view))
        if costs is None:
            out.print("What each second is made of: `farpipe plan --full` with the profile that gave the times.")


def _advice(document: "PlanDocument") -> "dict[str, list[str]]":
    """The advice of a plan by topic."""
    found: dict[str, list[str]] = {name: [] for name in TOPICS}
    for line in document.explanation.advice:
        found[next(name for name, words in TOPICS.items() if re.search(words, line))].append(line)
    return found


def _facts(document: "PlanDocument", topic: str | None) -> dict[str, Any]:
    """What `--json` prints of a topic, under the names of plan.json."""
    body = document.to_body()
    prediction = body["prediction"]
    by_topic = {
        "why-not": {name: body[name] for name in ("verdict", "strategies", "runners_up", "tied", "decides")},
        "limits": {name: body[name] for name in ("limited_by", "changes", "residual")},
        "memory": {"placements": body["placements"], "peak_memory_bytes": prediction["peak_memory_bytes"]},
        "links": {"link_bytes": prediction["link_bytes"]} | {n: body[n] for n in ("links_s", "links_range_s")},
    }
    chosen: Sequence[str] = tuple(TOPICS) if topic is None else (topic,)
    return {name: by_topic[name] | {"advice": _advice(document)[name]} for name in chosen}
