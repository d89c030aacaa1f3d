"""The step of a plan as a distribution: over links that lose packets or jitter.

A sample is a step whose messages take times of their own (`planning.cost.lossy_links`). All orders are played on the
same samples (common random numbers), so that their difference is theirs and not that of the draw.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate import makespans_s, simulate
from farpipe.core.spec import Job
from farpipe.core.step import Collectives, Messages, Problem, Schedule
from farpipe.core.step.arrays import StepArrays, step_arrays
from farpipe.planning.cost.lossy_links import LossyLink, lateness_s, lossy_link
from farpipe.planning.planner.plan import Plan, Spread

Floats = NDArray[np.float64]
Lateness = dict[tuple[int, ...], Floats]
"""Seconds of lateness [num_samples, messages], by (direction, stage) of messages or place of collectives."""
AnyMessages = TypeVar("AnyMessages", bound=Messages)

NUM_SAMPLES: Final = 100
SEED: Final = 1


def lossy_links(job: Job, problem: Problem) -> dict[int, LossyLink]:
    """The links of a step that lose packets or jitter, by their place in the Problem."""
    of_name = {link.name: link for link in job.cluster.links}
    found = {i: lossy_link(job.cluster, of_name[n]) for i, n in enumerate(problem.links) if n in of_name}
    return {place: link for place, link in found.items() if link.is_disturbed}


@dataclass(frozen=True)
class StepSamples:
    """Samples of one step, `num_samples` of them, the same for every order of its actions."""

    job: Job
    problem: Problem
    num_samples: int = NUM_SAMPLES

    @cached_property
    def lossy(self) -> dict[int, LossyLink]:
        """The links that lose packets or jitter, by their place in the Problem."""
        return lossy_links(self.job, self.problem)

    @property
    def differ(self) -> bool:
        """True if the samples differ at all."""
        return bool(self.lossy)

    @cached_property
    def _step(self) -> StepArrays:
        return step_arrays(self.problem)

    def spread(self, schedule: Schedule, overhead_s: float) -> Spread:
        """The distribution of the step under `schedule`."""
        step_s = self.makespans_s(schedule) + overhead_s
        p50_s, p90_s = np.quantile(step_s, (0.5, 0.9)).tolist()
        return Spread(mean_s=float(step_s.mean()), p50_s=p50_s, p90_s=p90_s, num_samples=self.num_samples)

    def makespans_s(self, schedule: Schedule) -> Floats:
        """The makespan of every sample: [num_samples]. Messages follow each other as in the step of mean messages."""
        gap_s = simulate(self.problem, schedule, checked=True).makespan_s / self.problem.num_microbatches
        return makespans_s(self._samples(gap_s), schedule)

    def message_quantiles(self, share: float) -> tuple[Floats, Floats]:
        """Quantiles of the messages that this share of the samples keeps: seconds on the link, and until arrival."""
        work_s = self._step.duration_s[:3].sum(axis=0).mean(axis=1)
        gap_s = float(np.bincount(self._step.rank_of_stage, weights=work_s).max())
        drawn = [sample.messages for sample in self._samples(gap_s)]
        each = (np.stack([getattr(one, name) for one in drawn]) for name in ("leaves_after_s", "arrives_after_s"))
        leaves_after_s, arrives_after_s = (np.quantile(values, share, axis=0) for values in each)
        return leaves_after_s, arrives_after_s

    def _samples(self, gap_s: float) -> Iterator[StepArrays]:
        step = self._step
        known = [(self._travel_s(part), self._lateness(part, gap_s)) for part in (step.messages, step.collectives)]
        for sample in range(self.num_samples):
            messages = _resampled(step.messages, *known[0], sample)
            collectives = _resampled(step.collectives, *known[1], sample)
            yield replace(step, messages=messages, collectives=collectives)

    def _travel_s(self, part: Messages) -> Floats:
        """Seconds from a message's last byte sent to its arrival; over lossy links the latency alone, not the mean."""
        travel_s = part.arrives_after_s - part.leaves_after_s
        for place, lossy in self.lossy.items():
            travel_s[part.link == place] = lossy.latency_s
        return travel_s

    def _lateness(self, part: Messages, gap_s: float) -> Lateness:
        """Lateness of each message, or collective, in every sample: [num_samples, messages]."""
        found = {}
        for at in np.ndindex(*part.link.shape[:2]):
            link, sizes = np.atleast_1d(part.link[at]), np.atleast_1d(part.bytes[at])
            if (lossy := self.lossy.get(int(link[0]))) is not None:
                direction, stage = (at[0] >= part.begin[0], part.stage[at]) if isinstance(part, Collectives) else at
                seed = SEED + 1 + 2 * int(stage) + int(direction)
                shape, gap = (self.num_samples, link.size), gap_s if link.size > 1 else np.inf
                found[at] = lateness_s(lossy, float(sizes.mean()), gap, shape, seed)
        return found


def spread_of(plan: Plan, schedule: Schedule) -> Spread | None:
    """The distribution of a plan's step under `schedule`; None where every step takes the same."""
    samples = StepSamples(plan.job, plan.problem)
    return samples.spread(schedule, plan.prediction.overhead_s) if samples.differ else None


def _resampled(part: AnyMessages, travel_s: Floats, late_s: Lateness, sample: int) -> AnyMessages:
    """The same messages with their lateness; `travel_s`: from when one has left until it is there without that."""
    travel_s = travel_s.copy()
    for at, late in late_s.items():
        travel_s[at] += late[sample] if travel_s.ndim == 3 else late[sample, 0]
    return replace(part, arrives_after_s=part.leaves_after_s + travel_s)
