"""Lessons of a run for the next plan: times of the devices' layers and figures of the links, out of its Timeline.

A stage's time is that of its layers, of the embedding and the head where it has them, and a fixed time per action. Of
every device these parts are fitted to its stages by least squares. Stages that are too alike to tell parts apart leave
the parts in the proportion that the cost model gives them, all scaled by one factor (ridge regression towards it).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.simulate import Timeline
from farpipe.core.spec import Cluster, Model, Recompute, Site, SiteLink, Training, operations_of
from farpipe.core.step import KINDS, Link, Problem
from farpipe.engine.control.measured import as_measured
from farpipe.planning.cost import (
    JobCosts,
    Layout,
    PartTimes,
    Placement,
    Profile,
    calibration_of,
    model_shape,
    settle,
    step_cost,
)
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
class RunOfPlan:
    """A plan that was run, in its parts, and what was measured."""

    model: Model
    training: Training
    cluster: Cluster
    layout: Layout
    placements: tuple[Placement, ...]
    problem: Problem
    timeline: Timeline
    overhead_s: float
    """Time of the measured step that is not in the Timeline."""
    cpu_share: float = 1.0
    """Share of their time for which the measured actions had the CPU."""

    def site(self, stage: int) -> Site:
        """The site of a stage."""
        return self.cluster.site(self.placements[stage].site)


@dataclass(frozen=True)
class Learned:
    """Measured times and links that take the place of modelled times and of the job's links."""

    profiles: tuple[Profile, ...]
    """One for every device of the run."""
    links: Mapping[str, Link]
    """Latency and bandwidth by ``a>b``; links that carried no message of a microbatch are missing."""


def learn(run: RunOfPlan) -> Learned:
    """The profiles and links that explain the run.

    InputError where layers were divided over devices (times are of one), or recomputation can't be separated.
    """
    if run.layout.tensor * run.layout.context > 1:
        raise InputError(f"layers were divided over {run.layout.tensor * run.layout.context} devices; times are of one")
    names = dict.fromkeys(run.site(stage).device.name for stage in range(run.problem.num_stages))
    profiles, links = [_profile(run, name) for name in names], _links(run)
    return Learned(tuple(_with_optimizer(run, profiles, with_figures(run.cluster, links))), links)


def with_figures(cluster: Cluster, links: Mapping[str, Link]) -> Cluster:
    """`cluster` with the latency and bandwidth of `links`, by ``a>b``; other links stay."""

    def change(link: SiteLink) -> SiteLink:
        found = links.get(link.name)
        figures = ("latency_s", "bandwidth_bytes_per_s")
        return link if found is None else link.model_copy(update={name: getattr(found, name) for name in figures})

    return cluster.model_copy(update={"links": tuple(map(change, cluster.links))})


def _links(run: RunOfPlan) -> dict[str, Link]:
    """Figures of the links that carry one replica's messages only, for the Timeline has those of one replica."""
    if run.layout.data_inside > 1:
        return {}
    seen = {run.timeline.links[m["link"]] for m in run.timeline.messages if m["microbatch"] >= 0 and m["link"] >= 0}
    found = as_measured(run.problem, [run.timeline]).links
    return {name: link for name, link in found.items() if run.problem.between_sites[name] and name in seen}


def _profile(run: RunOfPlan, device: str) -> Profile:
    stages = [s for s in range(run.problem.num_stages) if run.site(s).device.name == device]
    times = _times(run, stages, _modelled(run, run.site(stages[0])))
    return Profile(
        device=device,
        shape=model_shape(run.model),
        precision=run.training.precision,
        recompute=_recompute_of(run),
        microbatch_size=run.layout.microbatch_size,
        sequence_length=run.training.sequence_length,
        optimizer_s_per_param=0.0,
        action_overhead_s=(times["F"]["overhead"] + times["I"]["overhead"]) / 2,
        cpu_share=run.cpu_share,
        embedding=_part_times(times, "embedding"),
        layer=_part_times(times, "layer"),
        head=_part_times(times, "head"),
    )


def _part_times(times: Mapping[str, Mapping[str, float]], part: str) -> PartTimes:
    return PartTimes(**{figure: times[kind][part] for kind, figure in FIGURES.items()})


def _times(run: RunOfPlan, stages: Sequence[int], model: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
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


def _fit_kind(run: RunOfPlan, stages: Sequence[int], kind: str, model: Floats, layer_s: float = 0.0) -> Floats:
    """Seconds of PARTS; `layer_s`: of a layer's forward, which I and B of stages that recompute contain as well."""
    counts = np.array([_counts(run, stage, kind) for stage in stages])
    seconds = np.array([_seconds(run, stage, kind) for stage in stages])
    if kind in "IB":
        seconds = seconds - [_recomputed(run, stage) * layer_s for stage in stages]
    return _fit(counts, seconds, model)


def _recompute_of(run: RunOfPlan) -> str:
    """Recomputation that a layer's times contain: attention's core, if every stage selects that, else none."""
    return "selective" if {placement.recompute for placement in run.placements} == {"selective"} else "none"


def _recomputed(run: RunOfPlan, stage: int) -> float:
    """Forwards of a layer that a stage's input gradient contains; of operations the part that the cost model has."""
    placement = run.placements[stage]
    if not operations_of(placement.recompute) or _recompute_of(run) == "selective":
        return placement.num_layers if placement.recompute == "full" else 0
    training = settle(run.training, run.layout).model_copy(update={"recompute": placement.recompute})
    site = run.site(stage)
    return placement.num_layers * again_share(run.model, training, run.layout, site, calibration_of(site.device))


def _counts(run: RunOfPlan, stage: int, kind: str) -> list[float]:
    """Number of times that each of PARTS is in the time of a stage."""
    is_first, is_last = stage == 0, stage == run.problem.num_stages - 1
    return [run.placements[stage].num_layers, float(is_first), float(is_last), float(kind != "W")]


def _seconds(run: RunOfPlan, stage: int, kind: str) -> float:
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


def _modelled(run: RunOfPlan, site: Site) -> dict[str, Floats]:
    """Seconds of PARTS by kind, as the cost model has them without recomputation (or all of it, if all select)."""
    mode: Recompute = "selective" if _recompute_of(run) == "selective" else "none"
    costs = JobCosts(run.model, run.training)

    def whole(embedding: bool, head: bool) -> tuple[Floats, Floats]:
        pair = costs.apart(run.layout, site, mode, embedding=embedding, head=head)
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


def _with_optimizer(run: RunOfPlan, profiles: Sequence[Profile], cluster: Cluster) -> list[Profile]:
    """The profiles with the optimizer's time per parameter, out of what the step took besides its pipeline."""
    base_s, more_s = (_overhead_s(run, profiles, cluster, rate) for rate in (0.0, _STEP_S))
    rate = max(0.0, run.overhead_s - base_s) * _STEP_S / (more_s - base_s) if more_s > base_s else 0.0
    return [profile.model_copy(update={"optimizer_s_per_param": rate}) for profile in profiles]


def _overhead_s(run: RunOfPlan, profiles: Sequence[Profile], cluster: Cluster, rate: float) -> float:
    known = {profile.device: profile.model_copy(update={"optimizer_s_per_param": rate}) for profile in profiles}
    costs = JobCosts(run.model, run.training, known)
    return step_cost(costs, run.layout, run.placements, cluster).overhead_s
