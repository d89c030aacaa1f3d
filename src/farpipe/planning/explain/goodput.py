"""Goodput: the part of a strategy's speed that is left when sites fail, played with failures as events of a run.

A site fails at random, with its mean time between failures, and is back after its time to repair. A strategy says how
fast it goes on without some sites, how many steps a failure undoes, and for how long it stands. Events of this kind are
all that is played: within a stretch between two of them steps follow each other as the simulator predicts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from farpipe.core.spec import Job, Site
from farpipe.planning.cost.adapters import trained_model_params
from farpipe.planning.planner.plan import Strategy

RESTART_S: Final = 60.0
"""From a site that is lost to the first step of what goes on: noticing it, processes, reading a checkpoint. A guess:
small runs on one machine took 8 to 12 s, real sites have more to read."""
SURVIVE_S: Final = 1.0
"""The same for replicas that survive, beside one step: noticing it in a connection that breaks."""
NUM_FAILURES: Final = 2000
"""Failures that are played for one figure; their number is what its last digit hangs on."""
STATE_BYTES: Final = 12
"""Bytes of a parameter in a checkpoint: weight and two moments in 32 bit."""
MIRROR_SHARE: Final = 0.8
"""Part of a link that mirroring takes, at most; see `engine.checkpoint.mirror`."""

Recovery = Literal["restart", "mirror", "survivors", "local steps"]


class Failure(NamedTuple):
    """An outage of a site, or its death: then its disk is gone."""

    at_s: float
    site: str
    back_s: float
    is_death: bool = False


@dataclass(frozen=True)
class UnderFailures:
    """What failures do to a strategy."""

    step_s: float
    recovery: Recovery
    speed: Callable[[frozenset[str]], float]
    """Steps/s while some sites are away."""
    every_steps: float
    """Steps between two checkpoints, or two exchanges of local steps."""
    mirror_steps: float = 0.0
    """Steps that pass until a checkpoint is at all sites."""
    num_sites: int = 1

    def undone(self, progress: float, away: frozenset[str], *, is_death: bool) -> float:
        """Steps that are lost, of `progress` so far, when a site fails and `away` are away then, that one included."""
        if self.recovery == "survivors" and len(away) < self.num_sites:
            return 0.0
        if self.recovery == "local steps" and len(away) < self.num_sites:
            return progress % self.every_steps / self.num_sites
        if self.recovery == "restart" and is_death:
            return progress
        usable = progress - self.mirror_steps if self.recovery == "mirror" else progress
        kept = max(0.0, usable // self.every_steps * self.every_steps) if self.every_steps else 0.0
        return progress - kept

    def pause_s(self, away: frozenset[str]) -> float:
        """Standstill after a failure."""
        if len(away) == self.num_sites or self.recovery in ("restart", "mirror"):
            return RESTART_S
        return SURVIVE_S + self.step_s if self.recovery == "survivors" else 0.0


class Goodput(NamedTuple):
    """Result of playing failures."""

    share: float
    """Steps that count, in those of the same time without failures."""
    steps_lost: float
    """Steps that a failure undoes, in the mean."""
    num_failures: int


def failures_of(sites: Sequence[Site], horizon_s: float, seed: int = 0) -> list[Failure]:
    """Failures at random of the sites that state `mtbf`, until `horizon_s`, in their order."""
    found = []
    for site in sites:
        draw, at_s = random.Random(f"{seed} {site.name}"), 0.0
        while site.mtbf_s is not None:
            at_s += draw.expovariate(1 / site.mtbf_s)
            if at_s > horizon_s:
                break
            found.append(Failure(at_s, site.name, at_s + site.mttr_s))
            at_s += site.mttr_s
    return sorted(found)


def play(run: UnderFailures, failures: Sequence[Failure], horizon_s: float) -> Goodput:
    """A run of `horizon_s` through these failures."""
    progress = lost = stands_until_s = now_s = 0.0
    away: frozenset[str] = frozenset()
    events = sorted([(one.at_s, 1, one) for one in failures] + [(one.back_s, 0, one) for one in failures])
    for at_s, is_failure, failure in [*events, (horizon_s, 2, None)]:
        until_s = min(at_s, horizon_s)
        progress += run.speed(away) * max(0.0, until_s - max(now_s, stands_until_s))
        now_s = max(now_s, until_s)
        if failure is None or at_s >= horizon_s:
            break
        if is_failure:
            away |= {failure.site}
            undone = run.undone(progress, away, is_death=failure.is_death)
            progress, lost = progress - undone, lost + undone
            stands_until_s = max(stands_until_s, at_s + run.pause_s(away))
        else:
            was_down = run.speed(away) == 0.0
            away -= {failure.site}
            if was_down or run.recovery == "mirror":
                stands_until_s = max(stands_until_s, at_s + RESTART_S)
    return Goodput(progress * run.step_s / horizon_s, lost / max(1, len(failures)), len(failures))


def with_goodput(job: Job, strategies: Sequence[Strategy], local_every: int) -> list[Strategy]:
    """The strategies with what failures leave of them; as they are where no site of the job states `mtbf`.

    `local_every`: local steps between two exchanges.
    """
    rates = {site.name: site.mtbf_s for site in job.cluster.sites if site.mtbf_s is not None}
    if not rates:
        return list(strategies)
    return [one.model_copy(update=_figures(job, one, strategies, local_every)) for one in strategies]


def _figures(job: Job, one: Strategy, every: Sequence[Strategy], local_every: int) -> dict[str, object]:
    sites = [site for site in job.cluster.sites if site.name in one.sites]
    rate = sum(1 / site.mtbf_s for site in sites if site.mtbf_s is not None)
    if not rate:
        return {"recovery": "", "goodput": 1.0, "steps_lost_per_failure": 0.0}
    horizon_s = NUM_FAILURES / rate
    run = under_failures(job, one, every, mirrors=job.training.mirror, local_every=local_every)
    found = play(run, failures_of(sites, horizon_s), horizon_s)
    return {"recovery": run.recovery, "goodput": found.share, "steps_lost_per_failure": found.steps_lost}


def under_failures(
    job: Job, one: Strategy, every: Sequence[Strategy], *, mirrors: bool, local_every: int = 1
) -> UnderFailures:
    """What failures do to a strategy; `mirrors`: its checkpoints are at all of its sites.

    Replicas survive (with `training.elastic`). A pipeline with a mirror goes on as the fastest of `every` strategy on
    the sites that are left; else what fails waits for the site.
    """
    names, num_sites = frozenset(one.sites), len(one.sites)
    if one.kind in ("replicas", "local steps"):
        recovery: Recovery = "survivors" if one.kind == "replicas" else "local steps"
        exchanges = float(local_every if one.kind == "local steps" else _checkpoint_steps(job, one.step_s))

        def left(away: frozenset[str]) -> float:
            return (num_sites - len(away & names)) / num_sites / one.step_s

        return UnderFailures(one.step_s, recovery, left, exchanges, num_sites=num_sites)
    others = [(frozenset(other.sites), other.step_s) for other in every if other.same_training]

    def rest(away: frozenset[str]) -> float:
        if not away & names:
            return 1 / one.step_s
        able = [step_s for sites, step_s in others if mirrors and sites and sites < names and not sites & away]
        return 1 / min(able) if able else 0.0

    every_steps = _checkpoint_steps(job, one.step_s)
    is_mirror = mirrors and num_sites > 1
    lag = _mirror_s(job, one) / one.step_s if is_mirror else 0.0
    kind: Recovery = "mirror" if is_mirror else "restart"
    return UnderFailures(one.step_s, kind, rest, every_steps, lag, num_sites)


def _checkpoint_steps(job: Job, step_s: float) -> float:
    """Steps between two checkpoints; 0: there are none."""
    training = job.training
    if not training.keep_checkpoints:
        return 0.0
    by_clock = 60 * training.checkpoint_every_minutes / step_s
    return min((steps for steps in (float(training.checkpoint_every_steps), by_clock) if steps), default=0.0)


def _mirror_s(job: Job, one: Strategy) -> float:
    """Seconds until a checkpoint is mirrored, if steps left the links free: each site's part over its slowest link."""
    links = [link for link in job.cluster.links if {link.source, link.target} <= set(one.sites)]
    slowest = min((link.bandwidth_bytes_per_s for link in links), default=float("inf"))
    part = STATE_BYTES * trained_model_params(job.model, job.training) / len(one.sites)
    return part / (MIRROR_SHARE * slowest)


def on_failures(job: Job, strategies: Sequence[Strategy], where: str) -> Iterator[str]:
    """Sentences on what failures change: the strategy that then trains most, and what a mirror would bring."""
    known = [one for one in strategies if one.goodput is not None and one.same_training]
    own = next((one for one in known if one.where == where), None)
    if own is None or own.goodput is None:
        return
    best = max(known, key=lambda one: one.tokens_per_s * (one.goodput or 0.0))
    if best is not own and best.tokens_per_s * (best.goodput or 0.0) > 1.01 * own.tokens_per_s * own.goodput:
        yield (
            f"With the failures that the sites state, {best.kind} at {best.where} trains most: goodput "
            f"{best.goodput:.1%} of {best.tokens_per_s:,.0f} tokens/s, this plan's {own.goodput:.1%} of "
            f"{own.tokens_per_s:,.0f}."
        )
    pipelines = [one for one in (own, *known) if one.recovery == "restart" and len(one.sites) > 1]
    if pipelines:
        yield from _on_mirror(job, pipelines[0], strategies)


def _on_mirror(job: Job, one: Strategy, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Sentence on a pipeline whose checkpoints would be mirrored, where that brings something."""
    sites = [site for site in job.cluster.sites if site.name in one.sites]
    horizon_s = NUM_FAILURES / sum(1 / site.mtbf_s for site in sites if site.mtbf_s is not None)
    found = play(under_failures(job, one, strategies, mirrors=True), failures_of(sites, horizon_s), horizon_s)
    if one.goodput is not None and found.share > one.goodput + 0.01:
        yield (
            f"With training.mirror = true and --on-lost-site replan the goodput of the pipeline at {one.where} is "
            f"{found.share:.1%} instead of {one.goodput:.1%} ({found.steps_lost:.3g} steps lost per failure), and it "
            "survives the loss of a site's disk."
        )
