"""Changes of a job that would make it faster, each simulated, from what costs nothing to what costs most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from farpipe.cost import JobCosts
from farpipe.errors import FarpipeError
from farpipe.plan.bandwidth import link_bytes
from farpipe.plan.candidates import Candidate
from farpipe.plan.decided import decided
from farpipe.plan.evaluate import Evaluated
from farpipe.plan.guided import placed
from farpipe.plan.plan import Change
from farpipe.plan.quick import quick_search
from farpipe.plan.refined import predicted, refined
from farpipe.spec import Cluster, Job, Pins, Site, SiteLink, Training
from farpipe.units import format_rate

MAX_CHANGES: Final = 3
WORTH_TELLING: Final = 0.02
"""Relative gain in tokens per second."""
COSTS: Final = ("a setting", "other numbers", "another batch", "bandwidth", "devices")
"""Classes of cost of a change, the cheapest first."""
Cost = Literal["a setting", "other numbers", "another batch", "bandwidth", "devices"]
_BETTER: Final[tuple[tuple[str, Any, str], ...]] = (
    ("sequence_parallel", True, "training.sequence_parallel = true"),
    ("zero", 1, "training.zero = 1"),
    ("flash_attention", True, "training.flash_attention = true"),
    ("overlap", True, "training.overlap = true"),
    ("recompute", "auto", 'training.recompute = "auto"'),
)
_FREE_PINS: Final = ("pipeline", "data", "tensor", "virtual", "layers", "num_microbatches", "replicas", "sites")


@dataclass(frozen=True)
class _Idea:
    what: str
    job: Job
    costs: Cost
    training: str = ""
    freed: str = ""
    """A key that is left out, if `what` is to tell what the planner chooses instead."""


def improvements(job: Job, best: Evaluated, costs: JobCosts, step_s: float, most: int = MAX_CHANGES) -> list[Change]:
    """The `most` cheapest changes that raise tokens per second by WORTH_TELLING at least; of equal cost the best first.

    `best` is what the plan was made of, `step_s` what the plan predicts. All changes go through the quick search, which
    looks at the plan's own layout as well; those that promise most are refined as the plan was, and compared with it.
    """
    hopes = sorted(_hopes(job, best, costs), key=lambda hope: (COSTS.index(hope[0].costs), hope[1].step_s))
    found: list[Change] = []
    for idea, hope in hopes:
        if len(found) == most:
            break
        found += _worth_it(job, idea, hope, costs, step_s)
    return sorted(found, key=lambda change: (COSTS.index(change.costs), -change.gain))


def still_helping(changes: Sequence[Change], faster: float) -> tuple[Change, ...]:
    """The changes for a plan whose step takes only `faster` times what it took: those that help that one, too."""
    told = [change.model_copy(update={"gain": (1 + change.gain) * faster - 1}) for change in changes]
    return tuple(change for change in told if change.gain >= WORTH_TELLING)


def _hopes(job: Job, best: Evaluated, costs: JobCosts) -> Iterator[tuple[_Idea, Evaluated]]:
    """The changes that help as far as the quick search tells, and the best that it finds of each."""
    before = _quickly(job, costs, best.candidate)
    for idea in _ideas(job, best) if before is not None else ():
        after = _quickly(idea.job, _costs(idea.job, job, costs), best.candidate)
        if (
            before is not None
            and after is not None
            and _gain(idea.job, after.step_s, job, before.step_s) >= WORTH_TELLING
        ):
            yield idea, after


def _worth_it(job: Job, idea: _Idea, hope: Evaluated, costs: JobCosts, step_s: float) -> list[Change]:
    """The change with its figures, if it still helps when both are refined."""
    best = refined(idea.job, hope, _costs(idea.job, job, costs))[1]
    changed_s = predicted(idea.job, best).step_s
    gain = _gain(idea.job, changed_s, job, step_s)
    what = f"{idea.what} (then {_instead(idea.freed, best)})" if idea.freed else idea.what
    change = Change(what=what, step_s=changed_s, gain=gain, costs=idea.costs, training=idea.training)
    return [change] if gain >= WORTH_TELLING else []


def _gain(changed: Job, changed_s: float, job: Job, step_s: float) -> float:
    """Relative, in tokens per second."""
    return changed.training.tokens_per_step / changed_s / (job.training.tokens_per_step / step_s) - 1


def _instead(freed: str, best: Evaluated) -> str:
    """The planner's choice where the key, ``layout`` for all of them, is left out."""
    at, where = best.candidate.layout, best.candidate.where
    layers = ", ".join(str(placement.num_layers) for placement in best.placements)
    told = {"microbatch_size": f"microbatches of {at.microbatch_size}", "layers": layers, "sites": where}
    told |= {"replicas": where, "layout": str(best.candidate), "num_microbatches": str(at.num_microbatches)}
    return told[freed] if freed in told else str(getattr(at, freed))


def _costs(changed: Job, job: Job, costs: JobCosts) -> JobCosts:
    return costs if changed.training == job.training else JobCosts(changed.model, changed.training, costs.profiles)


def _quickly(job: Job, costs: JobCosts, like: Candidate) -> Evaluated | None:
    """The best that the quick search finds; None where nothing works."""
    try:
        return next(iter(quick_search(job, costs, 1, 1, _again(job, like))), None)
    except FarpipeError:
        return None


def _again(job: Job, like: Candidate) -> list[Candidate]:
    """The same layout on the sites of the changed job, as far as it still stands for the same batch."""
    at, sites = like.layout, {site.name: site for site in job.cluster.sites}
    if at.data * at.num_microbatches * at.microbatch_size != job.training.global_batch:
        return []
    order = [sites[name] for name in like.order] if not at.replica_sites else [sites[like.sites[0].name]]
    candidate = placed(job, order, at, like.in_v)
    return [] if candidate is None else [candidate]


def _ideas(job: Job, best: Evaluated) -> Iterator[_Idea]:
    yield from _settings(job)
    yield from _fewer_pins(job)
    yield from _narrower(job, best)
    twice = job.training.model_copy(update={"global_batch": 2 * job.training.global_batch})
    if job.layout.num_microbatches is None or job.layout.data is None or job.training.microbatch_size is None:
        words = f"training.global_batch = {twice.global_batch} (twice the tokens a step)"
        yield _Idea(words, _with(job, training=twice), "another batch")
    yield from _wider(job, best)
    yield from _more_devices(job, best)


def _settings(job: Job) -> Iterator[_Idea]:
    for key, value, words in _BETTER:
        if getattr(job.training, key) != value and (key != "zero" or job.training.zero == 0):
            yield _Idea(words, _with(job, training=job.training.model_copy(update={key: value})), "a setting")
    if job.schedule is not None:
        yield _Idea('schedule.method = "auto"', _with(job, schedule=None), "a setting")


def _fewer_pins(job: Job) -> Iterator[_Idea]:
    """Changes that leave to the planner a key that the job pins."""
    size = "microbatch_size"
    if job.training.microbatch_size is not None:
        changed = _with(job, training=job.training.model_copy(update={size: None}))
        yield _Idea(f"leave out training.{size}", changed, "a setting", freed=size)
    pinned = [key for key in _FREE_PINS if getattr(job.layout, key) is not None]
    for key in pinned:
        changed = _with(job, layout=job.layout.model_copy(update={key: None}))
        yield _Idea(f"leave out layout.{key}", changed, "a setting", freed=key)
    if len(pinned) > 1:
        yield _Idea("leave out all of layout", _with(job, layout=Pins()), "a setting", freed="layout")


def _narrower(job: Job, best: Evaluated) -> Iterator[_Idea]:
    """Fewer bits between sites, or in matrix products."""
    if job.training.wire_type == "none" and any(best.problem.between_sites.values()):
        changed = job.training.model_copy(update={"wire_type": "int8"})
        words = 'training.wire_type = "int8" (or "fp8")'
        yield _Idea(words, _with(job, training=changed), "other numbers", "messages between sites are rounded to 8 bit")
    able = all("fp8" in site.device.peak_flops for site in best.candidate.sites)
    if job.training.matmul == "same" and job.training.precision == "bf16" and able:
        changed = job.training.model_copy(update={"matmul": "fp8"})
        words = 'training.matmul = "fp8"'
        yield _Idea(words, _with(job, training=changed), "other numbers", "matrix products are computed in 8 bit")


def _wider(job: Job, best: Evaluated) -> Iterator[_Idea]:
    """Twice the bandwidth of the busiest pair of sites, in one direction and in both."""
    sent = {
        name: size for name, size in link_bytes(best.problem, best.timeline).items() if best.problem.between_sites[name]
    }
    links = {link.name: link for link in job.cluster.links if link.name in sent}
    if not links:
        return
    busiest = max(links.values(), key=lambda link: sent[link.name] / link.bandwidth_bytes_per_s)
    rate = 2 * busiest.bandwidth_bytes_per_s
    ends = (busiest.source, busiest.target)
    yield _Idea(f"{format_rate(rate)} from {ends[0]} to {ends[1]} (twice)", _faster(job, [ends], 2.0), "bandwidth")
    both = [ends, ends[::-1]]
    words = f"twice the bandwidth between {ends[0]} and {ends[1]}, both ways"
    yield _Idea(words, _faster(job, both, 2.0), "bandwidth")


def _faster(job: Job, ends: Sequence[tuple[str, str]], factor: float) -> Job:
    def change(link: SiteLink) -> SiteLink:
        changed = (link.source, link.target) in ends
        rate = link.bandwidth_bytes_per_s * (factor if changed else 1.0)
        return link.model_copy(update={"bandwidth_bytes_per_s": rate})

    return _clustered(job, job.cluster.sites, [change(link) for link in job.cluster.links])


def _more_devices(job: Job, best: Evaluated) -> Iterator[_Idea]:
    """Twice the devices at the largest site in use; one more site like the last one, linked as that is."""
    used = [job.cluster.site(name) for name in best.candidate.order]
    largest = max(used, key=lambda site: site.num_devices)
    more = [_doubled(site) if site.name == largest.name else site for site in job.cluster.sites]
    words = f"{2 * largest.num_devices} devices at {largest.name} (twice)"
    yield _Idea(words, _clustered(job, more, job.cluster.links), "devices")
    if len(used) > 1 and job.layout.sites is None:
        yield _one_more(job, used[-1], used[-2])


def _doubled(site: Site) -> Site:
    return site.model_copy(update={"num_devices": 2 * site.num_devices})


def _one_more(job: Job, like: Site, neighbour: Site) -> _Idea:
    """Its links to others are those of `like`, its link to `like` is the one from there to `neighbour`."""
    name = f"{like.name}-2"
    links = list(job.cluster.links)
    for link in job.cluster.links:
        for end, other in (("source", "target"), ("target", "source")):
            if getattr(link, end) == like.name:
                links.append(link.model_copy(update={end: name}))
                if getattr(link, other) == neighbour.name:
                    links.append(link.model_copy(update={end: name, other: like.name}))
    sites = [*job.cluster.sites, like.model_copy(update={"name": name})]
    words = f"one more site like {like.name} ({like.num_devices} devices), with links such as it has"
    return _Idea(words, _clustered(job, sites, links), "devices")


def _clustered(job: Job, sites: Sequence[Site], links: Sequence[SiteLink]) -> Job:
    return _with(job, cluster=Cluster.model_construct(sites=tuple(sites), links=tuple(links)))


def _with(job: Job, training: Training | None = None, **update: Any) -> Job:
    changed = job.model_copy(update=update | ({} if training is None else {"training": training}))
    return decided(changed)
