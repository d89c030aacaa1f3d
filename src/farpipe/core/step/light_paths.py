"""Other times of a step's messages: given ones, staggered replicas, and light paths (``farpipe/light-paths/1``).

Light paths have of every message its wait, rate and delay: `farpipe optical simulate` writes them, the engine's
emulated links carry the messages like this, and the same figures make the Problem that is simulated for the
prediction. Seconds and bytes per second; one figure per microbatch.
"""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, InstanceOf

from farpipe.core.document import Document, Table
from farpipe.core.errors import InputError
from farpipe.core.step.figures import Positive, Seconds
from farpipe.core.step.links import Hop, Transfer
from farpipe.core.step.problem import Problem
from farpipe.core.step.schedule import Schedule
from farpipe.core.strict import validate

Floats = NDArray[np.float64]


def retimed(problem: Problem, occupies_s: Floats, arrives_after_s: Floats) -> Problem:
    """The same step with other times of its messages: both [2, S, M], as in `Messages`, of what hops there are.

    Where replicas are staggered, these are the times of one replica's messages, as if it were alone.
    """

    def timed(transfer: Transfer | None, at: tuple[int, int]) -> Transfer | None:
        if transfer is None:
            return None
        times = {"occupies_s": _figure(occupies_s[at]), "arrives_after_s": _figure(arrives_after_s[at])}
        return Transfer(**(dict(transfer) | times))

    hops = tuple(
        hop and Hop(forward=timed(hop.forward, (0, index)), backward=timed(hop.backward, (1, index + 1)))
        for index, hop in enumerate(problem.hops)
    )
    return problem.model_copy(update={"hops": hops})


def _figure(of_microbatches: Floats) -> float | tuple[float, ...]:
    """One figure where all microbatches have the same, so that a step of fewer microbatches can be made of it."""
    first = float(of_microbatches[0])
    return first if (of_microbatches == first).all() else tuple(of_microbatches.tolist())


def stagger(problem: Problem, num_replicas: int) -> Problem:
    """The step of staggered replicas, given that of replicas that send together between sites.

    Together, a message carries the bytes of all `num_replicas`, and all arrive when the last byte has. Staggered, each
    replica's message is sent at the full rate, and the replicas run one message apart from each other
    (`StepTraffic.stagger_s`). That saves the others' share of every transfer that a rank waits for, at the cost of one
    at the beginning of the step: better where the step waits for more than one transfer, unless messages differ
    so much in size that the stagger, which is the longest, is too long for the others. Neither is better everywhere.

    On other links that carry collectives as well as messages replicas are staggered too.
    """
    chosen = frozenset(filter(problem.between_sites.get, problem.links))
    all_links = chosen | set(problem.mixed_links)
    changed = {
        name: link.model_copy(update={"num_staggered": num_replicas}) if name in all_links else link
        for name, link in problem.links.items()
    }
    hops = tuple(hop and _one_replicas_hop(problem, hop, num_replicas, chosen) for hop in problem.hops)
    staggered = problem.model_copy(update={"links": changed, "hops": hops})
    if any(link.num_staggered > 1 for link in problem.links.values()):  # else nothing can be wrong, and checks are slow
        staggered = problem.changed(links=changed, hops=hops)
    if not any(transfer.has_times for _, transfer in problem.transfers()):
        return staggered
    messages, of_link = problem.traffic.messages, [num_replicas if name in chosen else 1 for name in problem.links]
    occupies_s = messages.occupies_s / np.array([*of_link, 1, 1])[messages.link]  # the last two: NOTHING and FREE
    return retimed(staggered, occupies_s, messages.arrives_after_s - messages.occupies_s + occupies_s)


def _one_replicas_hop(problem: Problem, hop: Hop, num_replicas: int, chosen: frozenset[str]) -> Hop:
    def part(transfer: Transfer | None) -> Transfer | None:
        if transfer is None:
            return None
        if isinstance(transfer.link, str) and not isinstance(transfer.bytes, tuple):
            size = transfer.bytes / (num_replicas if transfer.link in chosen else 1)
            return Transfer.computed(link=transfer.link, bytes=size)
        names = [transfer.link] * problem.num_microbatches if isinstance(transfer.link, str) else transfer.link
        sizes = zip(names, problem.row(transfer.bytes).tolist(), strict=True)
        part_bytes = tuple(b / (num_replicas if n in chosen else 1) for n, b in sizes)
        return Transfer.computed(link=transfer.link, bytes=part_bytes)

    return Hop.computed(forward=part(hop.forward), backward=part(hop.backward))


Direction = Literal["forward", "backward"]


class LightPath(NamedTuple):
    """Light path of one message, or several side by side that carry it together."""

    wait_s: float
    """Seconds from the end of the producer until the first bit can be sent."""
    bandwidth_bytes_per_s: float
    latency_s: float


class LitHop(Table):
    """Light paths of the messages that one stage sends in one direction, by microbatch."""

    direction: Direction
    stage: Annotated[int, Field(ge=0, strict=True)]
    """The stage that sends."""
    wait_s: tuple[Seconds, ...]
    bandwidth_bytes_per_s: tuple[Positive, ...]
    latency_s: tuple[Seconds, ...]

    def path(self, microbatch: int) -> LightPath:
        """Light path of the message of `microbatch`."""
        return LightPath(self.wait_s[microbatch], self.bandwidth_bytes_per_s[microbatch], self.latency_s[microbatch])


class LitStep(Table):
    """Light paths of one step; a hop that is not there takes no time, as inside a node of the network."""

    hops: tuple[LitHop, ...]

    def path(self, direction: str, stage: int, microbatch: int) -> LightPath | None:
        """Light path of a message; None: it is there at once."""
        found = (hop for hop in self.hops if (hop.direction, hop.stage) == (direction, stage))
        hop = next(found, None)
        return None if hop is None else hop.path(microbatch)


class LightPaths(Document, Table):
    """Light paths of the messages of some steps in one order; a run of more steps begins with the first again."""

    FORMAT: ClassVar[str] = "farpipe/light-paths/1"

    schedule: InstanceOf[Schedule]
    """The order in which the light paths were asked for."""
    steps: Annotated[tuple[LitStep, ...], Field(min_length=1)]

    def of_step(self, step: int) -> LitStep:
        """Light paths of step `step` of a run."""
        return self.steps[step % len(self.steps)]

    def expect_fit(self, problem: Problem, where: str = "light paths") -> None:
        """InputError unless they are of a step with the stages and microbatches of `problem`."""
        count, stages = problem.num_microbatches, problem.num_stages
        ranks = (self.schedule.num_ranks, self.schedule.num_microbatches)
        if ranks != (problem.num_ranks, count):
            raise InputError(
                f"{where}: of {ranks[0]} ranks and {ranks[1]} microbatches, the run has {problem.num_ranks} and {count}"
            )
        for number, step in enumerate(self.steps):
            for index, hop in enumerate(step.hops):
                place = f"{where}: steps[{number}].hops[{index}]"
                target = hop.stage + (1 if hop.direction == "forward" else -1)
                if not (hop.stage < stages and 0 <= target < stages):
                    raise InputError(f"{place}: stage {hop.stage} of {stages} sends nothing {hop.direction}")
                for name in ("wait_s", "bandwidth_bytes_per_s", "latency_s"):
                    if len(getattr(hop, name)) != count:
                        found = len(getattr(hop, name))
                        raise InputError(f"{place}.{name}: expected one per microbatch, {count}, found {found}")

    def problem(self, problem: Problem, step: int) -> Problem:
        """The step as it is predicted: every message has its light path for itself."""
        shape = (2, problem.num_stages, problem.num_microbatches)
        sizes, arrives_after_s = problem.traffic.messages.bytes, np.zeros(shape)
        for hop in self.of_step(step).hops:
            at = (0 if hop.direction == "forward" else 1, hop.stage)
            rates, waits = np.array(hop.bandwidth_bytes_per_s), np.array(hop.wait_s)
            arrives_after_s[at] = waits + sizes[at] / rates + np.array(hop.latency_s)
        return retimed(problem, np.zeros(shape), arrives_after_s)

    def to_body(self) -> dict[str, Any]:
        return {"schedule": self.schedule.to_data(), "steps": [step.model_dump(mode="json") for step in self.steps]}

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        if "schedule" in body:
            body = body | {"schedule": Schedule.from_data(body["schedule"], f"{source}: schedule")}
        return validate(cls, body, source)
