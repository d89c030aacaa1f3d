"""Arms: every use of sites and links at its best, on one cost model, and what limits each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from farpipe.cost import JobCosts
from farpipe.cost.money import money_of_step
from farpipe.plan.advice import breakdown_s
from farpipe.plan.bandwidth import link_bounds, link_bytes, replayed
from farpipe.plan.evaluate import Evaluated, whole
from farpipe.plan.guided import kind_of
from farpipe.plan.mixtures import Mixture, mixture
from farpipe.plan.plan import Arm, ArmKind
from farpipe.plan.quick import best_of_uses, quick_search
from farpipe.plan.refined import refined
from farpipe.plan.separate_sites import SeparateSites, SideBySide, separate_sites
from farpipe.spec import Job

PER_KIND: Final = 3
"""Uses of sites of each kind that become arms."""
NARROW: Final = "int8 or fp8 messages"
LOCAL_STEPS: Final = 100
"""Steps between two exchanges of the arm with local steps; DiLoCo's authors use 50 to 500 (arXiv 2311.08105)."""
NARROW_BYTES: Final = 1
"""Of a parameter's difference in 8 bits; exchanges of 4 were seen to train as well (arXiv 2501.18512)."""
WORTH_TELLING: Final = 0.05
"""Share of the step below which a part does not limit it."""
_KINDS: Final[dict[str, ArmKind]] = {"alone": "one site", "pipelines": "pipeline", "replicas": "replicas"}
_LIMITS: Final = {
    "for the links inside sites": "links inside sites",
    "idle in the pipeline": "filling and draining the pipeline",
    "for the optimizer and other overhead": "optimizer and other overhead",
}


def arms_of(
    job: Job, costs: JobCosts, found: Sequence[Evaluated] = (), local_steps: int = LOCAL_STEPS, per_kind: int = PER_KIND
) -> list[Arm]:
    """The arms of a job, the fastest first: `found` (a search's results) or else a quick search's, and beside them
    pipelines with narrower messages, and sites that each have a layout of their own.

    `job` is decided, `costs` are its. Arms whose training differs from the job's say how.
    """
    found = sorted(found or quick_search(job, costs, per_kind), key=lambda one: one.step_s)
    arms = [_arm(job, one) for one in _chosen(best_of_uses(found), per_kind)]
    arms += _narrow(job, costs, [one for one in found if kind_of(one.candidate) == "pipelines"])
    arms += [_separate_arm(job, *pair) for pair in _separate(job, costs, local_steps)]
    arms += [_mixture_arm(job, one) for one in (mixture(job, costs),) if one is not None]
    return sorted(arms, key=lambda arm: arm.step_s)


def _chosen(found: Iterable[Evaluated], per_kind: int) -> list[Evaluated]:
    chosen: dict[str, list[Evaluated]] = {}
    for one in found:
        chosen.setdefault(kind_of(one.candidate), []).append(one)
    return [one for every in chosen.values() for one in every[:per_kind]]


def _narrow(job: Job, costs: JobCosts, pipelines: Sequence[Evaluated]) -> list[Arm]:
    """The best pipelines over several sites with messages of 8 bits; int8 and fp8 are as long."""
    if not pipelines or job.training.wire_type != "none":
        return []
    narrow = job.model_copy(update={"training": job.training.model_copy(update={"wire_type": "int8"})})
    others = JobCosts(narrow.model, narrow.training, costs.profiles)
    also = [one.candidate for one in pipelines[:1]]
    found = [one for one in quick_search(narrow, others, 1, 1, also) if kind_of(one.candidate) == "pipelines"]
    return [_arm(narrow, refined(narrow, one, others)[1], NARROW) for one in found[:1]]


def _separate(job: Job, costs: JobCosts, local_steps: int) -> list[tuple[SeparateSites, int, str]]:
    """Sites with layouts of their own that exchange gradients, and the same with local steps; what is exchanged then
    also in 8 bits, where it takes WORTH_TELLING of the step.

    Where the sites are alike, replicas at each are an arm already.
    """
    every_step, rarely = (separate_sites(job, costs, number) for number in (1, local_steps))
    found = []
    if every_step is not None and not every_step.alike:
        found.append((every_step, 1, ""))
    if rarely is None:
        return found
    found.append((rarely, local_steps, f"{local_steps} local steps between exchanges"))
    if rarely.exchange_s > WORTH_TELLING * rarely.step_s:
        narrow = separate_sites(job, costs, local_steps, NARROW_BYTES)
        told = f"{local_steps} local steps between {8 * NARROW_BYTES}-bit exchanges"
        found += [(narrow, local_steps, told)] if narrow is not None else []
    return found


def _separate_arm(job: Job, one: SeparateSites, local_steps: int, training: str) -> Arm:
    sent = dict.fromkeys(one.links, one.exchanged_bytes / local_steps)
    kind: ArmKind = "replicas" if local_steps == 1 else "local steps"
    return _side_by_side(job, kind, one, sent, training)


def _mixture_arm(job: Job, one: Mixture) -> Arm:
    return _side_by_side(job, "mixture", one, one.exchanged_bytes, "")


def _side_by_side(
    job: Job,
    kind: ArmKind,
    one: SideBySide,
    exchanged: Mapping[str, float],
    training: str,
) -> Arm:
    """The arm of sites that train side by side; its bytes: those exchanged and those that each of `one.found` sends."""
    sent = dict(exchanged)
    for part in one.found:
        part = whole(part)
        for name, size in link_bytes(part.problem, part.timeline).items():
            if part.problem.between_sites[name]:
                sent[name] = sent.get(name, 0.0) + size
    money = money_of_step(job.cluster, one.devices, one.step_s, sent)
    tokens = job.training.tokens_per_step
    return Arm(
        kind=kind,
        where=one.where,
        what=one.describe(),
        step_s=one.step_s,
        tokens_per_s=tokens / one.step_s,
        num_devices=sum(one.devices.values()),
        inter_site_bytes=sum(sent.values()),
        usd_per_million_tokens=money.per_million_tokens(tokens).total_usd,
        unpriced=money.unpriced,
        limited_by=one.limited_by,
        training=training,
    )


def _arm(job: Job, found: Evaluated, training: str = "") -> Arm:
    found = whole(found)
    between = {
        n: size for n, size in link_bytes(found.problem, found.timeline).items() if found.problem.between_sites[n]
    }
    step = money_of_step(job.cluster, found.candidate.devices, found.step_s, between)
    tokens = job.training.tokens_per_step
    return Arm(
        kind=_KINDS[kind_of(found.candidate)],
        where=found.candidate.where,
        what=str(found),
        step_s=found.step_s,
        tokens_per_s=tokens / found.step_s,
        num_devices=found.candidate.num_devices,
        inter_site_bytes=sum(between.values()),
        usd_per_million_tokens=step.per_million_tokens(tokens).total_usd,
        unpriced=step.unpriced,
        limited_by=limit_of(found),
        training=training,
    )


def limit_of(found: Evaluated) -> str:
    """The longest part of the step besides computing: a link's bandwidth or latency, the pipeline, or overhead.

    ``computing`` where nothing else takes WORTH_TELLING of the step.
    """
    parts = breakdown_s(found)
    name = max((part for part in parts if part != "computing"), key=lambda part: parts[part])
    if parts[name] < WORTH_TELLING * found.step_s:
        return "computing"
    if name != "for the links between sites":
        return _LIMITS[name]
    return _link_limit(found, parts[name])


def _link_limit(found: Evaluated, links_s: float) -> str:
    """Bandwidth where a microbatch takes longer on a link than on the slowest rank, or where endless bandwidth would
    take away most of what links cost; else latency."""
    bounds = sorted(link_bounds(found.problem, found.timeline), key=lambda bound: -bound.message_s)
    if bounds:
        return f"bandwidth of {bounds[0].link}"
    busy = found.timeline.link_busy_ratio()
    busiest = max((name for name in busy if found.problem.between_sites[name]), key=lambda name: busy[name])
    endless = replayed(found.problem, found.schedule, float("inf")).makespan_s
    kind = "bandwidth" if found.timeline.makespan_s - endless > links_s / 2 else "latency"
    return f"{kind} of {busiest}"
