"""Changes of a job that would help: each simulated, from what costs nothing to what costs most."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Cluster, Job, Pins, Site, SiteLink, without_flash_attention
from farpipe.core.step import occupied_s
from farpipe.core.units import counted, format_rate
from farpipe.planning.cost import JobCosts
from farpipe.planning.planner.candidates import Candidate, decided, near_batches, placed, with_pins, with_training
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.plan import Change, CostClass
from farpipe.planning.planner.refinement import predicted, refined
from farpipe.planning.planner.search import BEST_ONLY, Advance, search

MAX_CHANGES: Final = 3
"""Largest number of changes that are listed."""
RunsOn = Callable[[Job, Evaluated], tuple[str, ...] | None]
"""`Change.runs_on` of a changed job as it is planned."""
WORTH_LISTING: Final = 0.02
"""Relative gain in tokens per second from which a change is listed."""
COSTS: Final[tuple[CostClass, ...]] = get_args(CostClass)
"""Classes of cost of a change, the cheapest first."""
LIMIT_S: Final = 30.0
"""Time, in seconds, after which no further change or strategy is tried: the plan is there, and a person waits."""
_BETTER: Final[tuple[tuple[str, Any, str], ...]] = (
    ("sequence_parallel", True, "training.sequence_parallel = true"),
    ("zero", 1, "training.zero = 1"),
    ("flash_attention", True, "training.flash_attention = true"),
    ("overlap", True, "training.overlap = true"),
    ("recompute", "auto", 'training.recompute = "auto"'),
)
_FEWER_BITS: Final = {
    "bf16": ("fp8", "matrix products are computed in 8 bit"),
    "fp32": ("tf32", "factors of matrix products have 10 bits of mantissa"),
}
"""Format of matrix products with fewer bits by precision, and what it changes in training."""
_FREE_PINS: Final = (
    "pipeline",
    "data",
    "tensor",
    "virtual",
    "context",
    "expert",
    "layers",
    "num_microbatches",
    "replicas",
    "sites",
)


@dataclass(frozen=True)
class _Idea:
    what: str
    job: Job
    costs: CostClass
    training: str = ""
    freed: str = ""
    """Key that is left out, where `what` names what the planner chooses instead."""

    @property
    def key(self) -> str:
        """The key that is set; all of `what` where none is."""
        return self.what.partition(" = ")[0]

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.job.training.global_batch


def changes_that_help(
    job: Job,
    costs: JobCosts,
    found: Sequence[Evaluated],
    step_s: float,
    progress: Advance | None = None,
    limit_s: float = LIMIT_S,
    most: int = MAX_CHANGES,
    runs_on: RunsOn | None = None,
) -> tuple[list[Change], list[str]]:
    """The `most` cheapest changes that gain WORTH_LISTING in tokens per second, and those untried after `limit_s`.

    The plan, which takes `step_s`, was made of the first of `found`; they come the fastest first. All changes go
    through a quick search, which evaluates the plan's own layout as well; those with the largest gain by it are refined
    as the plan was. Of equal cost the best come first; of equal answers the first. `runs_on` says what could run each.
    """
    trial = _ChangeTrial(job, costs, found[0].candidate, step_s, runs_on)
    hopeful, untried = trial.quickly(list(_ideas(job, found[0])), progress, time.monotonic() + limit_s)
    chosen, answers = list[Change](), set[tuple[str, str, str]]()
    for idea, one in sorted(hopeful, key=lambda pair: (COSTS.index(pair[0].costs), pair[1].step_s / pair[0].batch)):
        if len(chosen) == most:
            break
        answer = (idea.costs, str(one.candidate), f"{one.step_s:.9g}")
        if answer not in answers and idea.key not in {change.what.partition(" = ")[0] for change in chosen}:
            answers.add(answer)
            chosen += trial.in_full(idea, one)
    return sorted(chosen, key=lambda change: (COSTS.index(change.costs), -change.gain)), untried


def still_helping(changes: Sequence[Change], faster: float) -> tuple[Change, ...]:
    """The changes for a plan whose step takes only `faster` times what it took: those that help that one, too."""
    now = [change.model_copy(update={"gain": (1 + change.gain) * faster - 1}) for change in changes]
    return tuple(change for change in now if change.gain >= WORTH_LISTING)


@dataclass(frozen=True)
class _ChangeTrial:
    """Trial of changes of a job whose plan takes `step_s`."""

    job: Job
    costs: JobCosts
    like: Candidate
    """The plan's own layout, which is evaluated under each change too."""
    step_s: float
    runs_on: RunsOn | None = None

    def quickly(
        self, ideas: Sequence[_Idea], progress: Advance | None, until_s: float
    ) -> tuple[list[tuple[_Idea, Evaluated]], list[str]]:
        """The changes that help by a quick search, each with the best that it found, and those that there was no time
        to try."""
        before, helpful = _quickly(self.job, self.costs, self.like), list[tuple[_Idea, Evaluated]]()
        for number, idea in enumerate(ideas if before is not None else ()):
            if time.monotonic() > until_s:
                return helpful, [left.what for left in ideas[number:]]
            if progress is not None:
                progress(number, len(ideas))
            after = _quickly(idea.job, self._costs(idea.job), self.like)
            if (
                before is not None
                and after is not None
                and self._gain(idea, after.step_s, before.step_s) >= WORTH_LISTING
            ):
                helpful.append((idea, after))
        return helpful, []

    def in_full(self, idea: _Idea, one: Evaluated) -> list[Change]:
        """The change with its figures, if it still helps when both are refined."""
        best = refined(idea.job, one, self._costs(idea.job))[1]
        changed_s = predicted(idea.job, best).step_s
        gain = self._gain(idea, changed_s, self.step_s)
        what = f"{idea.what} (then {_instead(idea.freed, best)})" if idea.freed else idea.what
        if gain < WORTH_LISTING:
            return []
        able = self.runs_on(idea.job, best) if self.runs_on is not None else None
        return [Change(what=what, step_s=changed_s, gain=gain, costs=idea.costs, training=idea.training, runs_on=able)]

    def _gain(self, idea: _Idea, changed_s: float, step_s: float) -> float:
        """Relative gain in tokens per second."""
        more = idea.job.training.tokens_per_step / self.job.training.tokens_per_step
        return more * step_s / changed_s - 1

    def _costs(self, changed: Job) -> JobCosts:
        return self.costs if changed.training == self.job.training else self.costs.trained(changed.training)


def _instead(freed: str, best: Evaluated) -> str:
    """The planner's choice where the key, ``layout`` for all of them, is left out."""
    at, where = best.candidate.layout, best.candidate.where
    layers = ", ".join(str(placement.num_layers) for placement in best.placements)
    named = {"microbatch_size": f"microbatches of {at.microbatch_size}", "layers": layers, "sites": where}
    named |= {"replicas": where, "layout": str(best.candidate), "num_microbatches": str(at.num_microbatches)}
    return named[freed] if freed in named else str(getattr(at, freed))


def _quickly(job: Job, costs: JobCosts, like: Candidate) -> Evaluated | None:
    """The best that the quick search finds; None where nothing works."""
    try:
        return search(job, costs, BEST_ONLY, also=_again(job, like)).best
    except FarpipeError:
        return None


def _again(job: Job, like: Candidate) -> list[Candidate]:
    """The same layout on the sites of the changed job, as far as it still stands for the same batch."""
    at, sites = like.layout, {site.name: site for site in job.cluster.sites}
    if at.data * at.num_microbatches * at.microbatch_size != job.training.global_batch:
        return []
    order = [sites[name] for name in like.order] if not at.replica_sites else [sites[like.sites[0].name]]
    found = placed(job, order, at, like.in_v)
    return [found] if found is not None else []


def _ideas(job: Job, best: Evaluated) -> Iterator[_Idea]:
    yield from _settings(job)
    yield from _fewer_pins(job)
    yield from _narrower(job, best)
    yield from _other_batches(job)
    yield from _wider(job, best)
    yield from _more_devices(job, best)


def _settings(job: Job) -> Iterator[_Idea]:
    for key, value, words in _BETTER:
        if key == "flash_attention" and without_flash_attention(site.device for site in job.cluster.sites):
            continue
        if getattr(job.training, key) != value and (key != "zero" or job.training.zero == 0):
            yield _Idea(words, with_training(job, **{key: value}), "a setting")
    if job.schedule is not None:
        yield _Idea('schedule.method = "auto"', decided(job.model_copy(update={"schedule": None})), "a setting")


def _fewer_pins(job: Job) -> Iterator[_Idea]:
    """Changes that leave to the planner a key that the job pins."""
    size = "microbatch_size"
    if job.training.microbatch_size is not None:
        yield _Idea(f"leave out training.{size}", with_training(job, microbatch_size=None), "a setting", freed=size)
    pinned = [key for key in _FREE_PINS if getattr(job.layout, key) is not None]
    for key in pinned:
        yield _Idea(f"leave out layout.{key}", with_pins(job, **{key: None}), "a pin", freed=key)
    if len(pinned) > 1:
        yield _Idea("leave out all of layout", job.model_copy(update={"layout": Pins()}), "a pin", freed="layout")


def _narrower(job: Job, best: Evaluated) -> Iterator[_Idea]:
    """Fewer bits between sites, or in matrix products."""
    if job.training.wire_type == "none" and any(best.problem.between_sites.values()):
        words, changed = 'training.wire_type = "int8" (or "fp8")', with_training(job, wire_type="int8")
        yield _Idea(words, changed, "other numbers", "messages between sites are rounded to 8 bit")
    narrow, training = _FEWER_BITS.get(job.training.precision, ("", ""))
    able = all(narrow in site.device.peak_flops for site in best.candidate.sites)
    if job.training.matmul == "same" and able:
        words, changed = f'training.matmul = "{narrow}"', with_training(job, matmul=narrow)
        yield _Idea(words, changed, "other numbers", training)


def _wider(job: Job, best: Evaluated) -> Iterator[_Idea]:
    """Twice the bandwidth of the busiest pair of sites, in one direction and in both."""
    sent = best.inter_site_bytes
    links = {link.name: link for link in job.cluster.links if link.name in sent}
    if not links:
        return
    busiest = max(links.values(), key=lambda link: occupied_s(link, sent[link.name]))
    rate = 2 * busiest.bandwidth_bytes_per_s
    ends = (busiest.source, busiest.target)
    yield _Idea(f"{format_rate(rate)} from {ends[0]} to {ends[1]} (twice)", _faster(job, [ends], 2.0), "bandwidth")
    both = [ends, ends[::-1]]
    words = f"twice the bandwidth between {ends[0]} and {ends[1]}, both ways"
    yield _Idea(words, _faster(job, both, 2.0), "bandwidth")


def _other_batches(job: Job) -> Iterator[_Idea]:
    """The batches near the job's, which are a setting more than another training, and twice its batch."""
    batch = job.training.global_batch
    if None not in (job.layout.num_microbatches, job.layout.data, job.training.microbatch_size):
        return
    for near in near_batches(job):
        size = f"{counted(abs(near - batch), 'sequence')} {'more' if near > batch else 'fewer'} a step"
        yield _Idea(f"training.global_batch = {near}", with_training(job, global_batch=near), "a setting", size)
    words = f"training.global_batch = {2 * batch} (twice the tokens a step)"
    yield _Idea(words, with_training(job, global_batch=2 * batch), "another batch")


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
    twice = largest.model_copy(update={"num_devices": 2 * largest.num_devices})
    more = [twice if site.name == largest.name else site for site in job.cluster.sites]
    words = f"{2 * largest.num_devices} devices at {largest.name} (twice)"
    yield _Idea(words, _clustered(job, more, job.cluster.links), "devices")
    if len(used) > 1 and job.layout.sites is None:
        yield _one_more(job, used[-1], used[-2])


def _one_more(job: Job, like: Site, neighbour: Site) -> _Idea:
    """One more site: linked to others as `like` is, and to `like` as that is to `neighbour`."""
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
    cluster = Cluster.model_construct(sites=tuple(sites), links=tuple(links))
    return decided(job.model_copy(update={"cluster": cluster}))
