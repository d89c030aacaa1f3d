"""Lessons of a run for the next plan: times of the devices' layers and figures of the links, out of its Timeline.

A stage's time is that of its layers, of the embedding and the head where it has them, and a fixed time per action. Of
every device these parts are fitted to its stages by least squares. Stages that are too alike to tell parts apart leave
the parts in the proportion that the cost model gives them, all scaled by one factor (ridge regression towards it).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.arguments import expect_kind
from farpipe.core.errors import InputError
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.spec import Cluster, Job, Recompute, Site, SiteLink, operations_of
from farpipe.core.step import KINDS, Link, stagger
from farpipe.core.units import format_change, format_rate, format_seconds
from farpipe.engine.control.measured import as_measured
from farpipe.engine.figures.metrics import METRICS_NAME, NUM_SKIPPED_STEPS, PLAN_NAME, TIMELINE_NAME
from farpipe.engine.launch.runs import Run
from farpipe.planning import Plan
from farpipe.planning.cost import JobCosts, PartTimes, Profile, calibration_of, model_shape, settle, step_cost
from farpipe.planning.cost.compute import again_share

Floats = NDArray[np.float64]

PARTS: Final = ("layer", "embedding", "head", "overhead")
FIGURES: Final = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}
PULL: Final = 0.01
"""Weight of the cost model's proportions against a stage's time."""
LEAST: Final = 0.01
"""Smallest share of what is expected to which a part is fitted: no part takes less than nothing."""
_STEP_S: Final = 1e-9
"""Seconds per parameter of the optimizer, to see how the time outside the pipeline depends on it."""


@dataclass(frozen=True)
class Measured:
    """A plan, and what was measured when it ran."""

    plan: Plan
    timeline: Timeline
    overhead_s: float
    """Time of the measured step that is not in the Timeline."""
    cpu_share: float = 1.0
    """Share of their time for which the measured actions had the CPU."""

    def site(self, stage: int) -> Site:
        """The site of a stage."""
        return self.plan.job.cluster.site(self.plan.placements[stage].site)


@dataclass(frozen=True)
class Learned:
    """Measured times and links that take the place of modelled times and of the job's links."""

    profiles: tuple[Profile, ...]
    """One for every device of the run."""
    links: Mapping[str, Link]
    """Latency and bandwidth by ``a>b``; links that carried no message of a microbatch are missing."""
    told: tuple[str, ...] = field(default=(), compare=False)
    """How well they explain the run, in sentences."""

    def corrected(self, job: Job) -> Job:
        """The job with the learned figures on the links of the same names."""
        return job.model_copy(update={"cluster": with_figures(job.cluster, self.links), "text": ""})


def learn(run: Run | Path | str) -> Learned:
    """What a run, or the one in a directory, teaches: plan again with ``learned.corrected(job)`` and its profiles.

    InputError where the run is not whole or was not measured, or layers were divided over devices.
    """
    expect_kind(
        "learn: run", run, (Run, str, Path), "a Run, such as farpipe.train returns, or the path of its directory"
    )
    run = run if isinstance(run, Run) else _whole(Path(run))
    settled = run.metrics[NUM_SKIPPED_STEPS:] or run.metrics
    if run.timeline is None or run.timeline.source != "measured" or not settled:
        raise InputError(f"{run.run_dir}: its {TIMELINE_NAME} is not measured")
    measured = Measured(
        run.plan,
        run.timeline,
        overhead_s=median(step["step_s"] - step["makespan_s"] for step in settled if step["makespan_s"] is not None),
        cpu_share=median(step.get("cpu_share") or 1.0 for step in settled),
    )
    try:
        learned = lessons(measured)
    except InputError as error:
        raise InputError(f"{run.run_dir}: {error}") from None
    step_s = median(step["step_s"] for step in settled)
    return replace(learned, told=tuple(_sentences(run.run_dir, run.plan, learned, step_s)))


def _whole(run_dir: Path) -> Run:
    for name in (PLAN_NAME, TIMELINE_NAME, METRICS_NAME):
        if not (run_dir / name).is_file():
            raise InputError(f"{run_dir}: no complete run of a plan: there is no {name}")
    return Run.load(run_dir)


def lessons(run: Measured) -> Learned:
    """The profiles and links that explain the run.

    InputError where layers were divided over devices (times are of one), or recomputation can't be separated.
    """
    at = run.plan.layout
    if at.tensor * at.context > 1:
        raise InputError(f"layers were divided over {at.tensor * at.context} devices; times are of one")
    names = dict.fromkeys(run.site(stage).device.name for stage in range(run.plan.problem.num_stages))
    profiles, links = [_profile(run, name) for name in names], _links(run)
    return Learned(tuple(_with_optimizer(run, profiles, with_figures(run.plan.job.cluster, links))), links)


def with_figures(cluster: Cluster, links: Mapping[str, Link]) -> Cluster:
    """`cluster` with the latency and bandwidth of `links`, by ``a>b``; other links stay."""

    def change(link: SiteLink) -> SiteLink:
        found = links.get(link.name)
        figures = ("latency_s", "bandwidth_bytes_per_s")
        return link if found is None else link.model_copy(update={name: getattr(found, name) for name in figures})

    return cluster.model_copy(update={"links": tuple(map(change, cluster.links))})


def _links(run: Measured) -> dict[str, Link]:
    """Figures of the links that carry one replica's messages only, for the Timeline has those of one replica."""
    if run.plan.layout.data_inside > 1:
        return {}
    seen = {run.timeline.links[m["link"]] for m in run.timeline.messages if m["microbatch"] >= 0 and m["link"] >= 0}
    found = as_measured(run.plan.problem, [run.timeline]).links
    return {name: link for name, link in found.items() if run.plan.problem.between_sites[name] and name in seen}


def _profile(run: Measured, device: str) -> Profile:
    stages = [s for s in range(run.plan.problem.num_stages) if run.site(s).device.name == device]
    times = _times(run, stages, _modelled(run, run.site(stages[0])))
    return Profile(
        device=device,
        shape=model_shape(run.plan.model),
        precision=run.plan.job.training.precision,
        recompute=_recompute_of(run),
        microbatch_size=run.plan.layout.microbatch_size,
        sequence_length=run.plan.job.training.sequence_length,
        optimizer_s_per_param=0.0,
        action_overhead_s=(times["F"]["overhead"] + times["I"]["overhead"]) / 2,
        cpu_share=run.cpu_share,
        embedding=_part_times(times, "embedding"),
        layer=_part_times(times, "layer"),
        head=_part_times(times, "head"),
    )


def _part_times(times: Mapping[str, Mapping[str, float]], part: str) -> PartTimes:
    return PartTimes(**{figure: times[kind][part] for kind, figure in FIGURES.items()})


def _times(run: Measured, stages: Sequence[int], model: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
    """Seconds of PARTS by kind; where backwards are joined, I and W share a part as the cost model has it."""
    fitted = {"F": _fit_kind(run, stages, "F", model["F"])}
    layer_s = float(fitted["F"][0])
    if all(_mean_s(run.timeline, stage, "B") is None for stage in stages):
        fitted |= {kind: _fit_kind(run, stages, kind, model[kind], layer_s) for kind in ("I", "W")}
    else:
        whole = model["I"] + model["W"]
        joined = _fit_kind(run, stages, "B", whole, layer_s)
        fitted |= {kind: joined * np.divide(model[kind], whole, where=whole > 0, out=0 * whole) for kind in ("I", "W")}
    return {kind: dict(zip(PARTS, fitted[kind].tolist(), strict=True)) for kind in FIGURES}


def _fit_kind(run: Measured, stages: Sequence[int], kind: str, model: Floats, layer_s: float = 0.0) -> Floats:
    """Seconds of PARTS; `layer_s`: of a layer's forward, which I and B of stages that recompute contain as well."""
    counts = np.array([_counts(run, stage, kind) for stage in stages])
    seconds = np.array([_seconds(run, stage, kind) for stage in stages])
    if kind in "IB":
        seconds = seconds - [_recomputed(run, stage) * layer_s for stage in stages]
    return _fit(counts, seconds, model)


def _recompute_of(run: Measured) -> str:
    """Recomputation that a layer's times contain: attention's core, if every stage selects that, else none."""
    return "selective" if {placement.recompute for placement in run.plan.placements} == {"selective"} else "none"


def _recomputed(run: Measured, stage: int) -> float:
    """Forwards of a layer that a stage's input gradient contains; of operations the part that the cost model has."""
    placement = run.plan.placements[stage]
    if not operations_of(placement.recompute) or _recompute_of(run) == "selective":
        return placement.num_layers if placement.recompute == "full" else 0
    training = settle(run.plan.job.training, run.plan.layout).model_copy(update={"recompute": placement.recompute})
    site = run.site(stage)
    return placement.num_layers * again_share(
        run.plan.model, training, run.plan.layout, site, calibration_of(site.device)
    )


def _counts(run: Measured, stage: int, kind: str) -> list[float]:
    """Number of times that each of PARTS is in the time of a stage."""
    is_first, is_last = stage == 0, stage == run.plan.problem.num_stages - 1
    return [run.plan.placements[stage].num_layers, float(is_first), float(is_last), float(kind != "W")]


def _seconds(run: Measured, stage: int, kind: str) -> float:
    """Mean over the microbatches; I and W together are a B."""
    found = _mean_s(run.timeline, stage, kind)
    halves = [_mean_s(run.timeline, stage, half) for half in "IW"] if kind == "B" and found is None else []
    if found is None and (not halves or None in halves):
        raise InputError(f"the Timeline has no {kind} of stage {stage}")
    return found if found is not None else sum(filter(None, halves))


def _mean_s(timeline: Timeline, stage: int, kind: str) -> float | None:
    actions = timeline.actions
    such = actions[(actions["stage"] == stage) & (actions["kind"] == KINDS.index(kind))]
    return float((such["end_s"] - such["start_s"]).mean()) if len(such) else None


def _modelled(run: Measured, site: Site) -> dict[str, Floats]:
    """Seconds of PARTS by kind, as the cost model has them without recomputation (or all of it, if all select)."""
    mode: Recompute = "selective" if _recompute_of(run) == "selective" else "none"
    costs = JobCosts(run.plan.model, run.plan.job.training)

    def whole(embedding: bool, head: bool) -> tuple[Floats, Floats]:
        pair = costs.apart(run.plan.layout, site, mode, embedding=embedding, head=head)
        none, one = (np.array([getattr(cost, figure) for figure in FIGURES.values()]) for cost in pair)
        return none, one

    none, one = whole(False, False)
    parts = np.stack([one - none, whole(True, False)[0] - none, whole(False, True)[0] - none, none])
    return {kind: parts[:, index] for index, kind in enumerate(FIGURES)}


def _fit(counts: Floats, seconds: Floats, modelled: Floats) -> Floats:
    """Seconds of the parts: `counts` [stages, parts] times them are nearest to `seconds`, relative to these.

    Parts are multiples of `modelled`, pulled towards one common multiple by what they are of the longest stage.
    """
    expected = counts * modelled
    common = float(seconds.sum() / expected.sum()) if expected.sum() else 1.0
    scale = np.where(seconds > 0, seconds, 1.0)[:, None]
    weight = PULL * expected.max(axis=0) / (seconds.max() or 1.0)
    rows = np.concatenate([expected / scale, np.diag(weight)])
    wanted = np.concatenate([np.where(seconds > 0, 1.0, 0.0), weight * common])
    multiples = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return np.asarray(np.maximum(multiples, LEAST * common) * modelled)


def _with_optimizer(run: Measured, profiles: Sequence[Profile], cluster: Cluster) -> list[Profile]:
    """The profiles with the optimizer's time per parameter, out of what the step took besides its pipeline."""
    base_s, more_s = (_overhead_s(run, profiles, cluster, rate) for rate in (0.0, _STEP_S))
    rate = max(0.0, run.overhead_s - base_s) * _STEP_S / (more_s - base_s) if more_s > base_s else 0.0
    return [profile.model_copy(update={"optimizer_s_per_param": rate}) for profile in profiles]


def _overhead_s(run: Measured, profiles: Sequence[Profile], cluster: Cluster, rate: float) -> float:
    known = {profile.device: profile.model_copy(update={"optimizer_s_per_param": rate}) for profile in profiles}
    costs = JobCosts(run.plan.model, run.plan.job.training, known)
    return step_cost(costs, run.plan.layout, run.plan.placements, cluster).overhead_s


def _sentences(run_dir: Path, plan: Plan, learned: Learned, measured_s: float) -> Iterator[str]:
    """The run's step as it was predicted, measured, and predicted again with what was learned; then the figures."""
    again_s = _predicted_again_s(plan, learned)
    before = format_change(plan.prediction.step_s / measured_s - 1)
    yield (
        f"Learned from {run_dir}: its step was predicted as {format_seconds(plan.prediction.step_s)} and took "
        f"{format_seconds(measured_s)} ({before}); with what was learned it is predicted as {format_seconds(again_s)} "
        f"({format_change(again_s / measured_s - 1)})."
    )
    for profile in learned.profiles:
        part = profile.layer
        times = ", ".join(format_seconds(s) for s in (part.forward_s, part.input_grad_s, part.weight_grad_s))
        yield f"Learned of {profile.device}: a layer takes {times} (F, I, W) for {profile.microbatch_size} sequences."
    for name, link in learned.links.items():
        rate = format_rate(link.bandwidth_bytes_per_s)
        yield f"Learned of {name}: {format_seconds(link.latency_s)} and {rate}."


def _predicted_again_s(plan: Plan, learned: Learned) -> float:
    """The run's own order, with what was learned."""
    costs = JobCosts(plan.job.model, plan.job.training, {profile.device: profile for profile in learned.profiles})
    step = step_cost(costs, plan.layout, plan.placements, with_figures(plan.job.cluster, learned.links))
    staggered = plan.problem.traffic.num_staggered > 1
    problem = stagger(step.problem, plan.layout.data) if staggered else step.problem
    return simulate(problem, plan.schedule).makespan_s + step.overhead_s
