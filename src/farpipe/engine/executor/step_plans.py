"""A plan of its own for every step, for training on chunks: made on rank 0 while the step before runs, sent to all.

The lengths of a step's sequences follow from its number, so the plan of step t + 1 is asked for when step t begins, of
a helper process (`engine.control.chunk_planner`). It is sent ahead of the exchange that ends step t: a rank that
leaves that exchange has it, or will in a moment.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InfeasibleError, RunError
from farpipe.core.strict import parse_json
from farpipe.engine.executor.peers import Peers
from farpipe.engine.run_spec import RunSpec
from farpipe.planning.workload import StepPlan

_POLL_S: Final = 5e-4


@dataclass(frozen=True)
class PlannedStep:
    """Rank 0's knowledge of a step before it runs."""

    plans: tuple[StepPlan, ...]
    """Plans of every replica."""
    facts: dict[str, Any]
    """Fields of the step's line in the metrics: what was predicted and how the plan was made."""
    warning: str = ""
    """Problem that planning met, though there is a plan."""


class StepPlanner(Protocol):
    """Rank 0's part: plans beside the run."""

    def ask(self, step: int, lengths: NDArray[np.int64]) -> None:
        """Begin to plan `step`, whose sequences have these lengths."""

    def answer(self, step: int, *, patient: bool) -> PlannedStep:
        """The plan of a step that was asked for; InfeasibleError where there is none.

        Waits only for a moment unless `patient`, and makes do with what served the steps before.
        """

    def close(self) -> None:
        """End whatever it has started."""


MakePlanner = Callable[[RunSpec, Path], StepPlanner]
"""Makes rank 0's planner of a run, from its directory."""


class StepPlans:
    """Every rank's part."""

    def __init__(
        self,
        run: RunSpec,
        peers: Peers,
        lengths: Callable[[int], NDArray[np.int64]],
        planner: StepPlanner | None,
    ) -> None:
        """`planner`: on rank 0, which alone is asked for the `lengths` of a step."""
        self._run, self._peers, self._lengths, self._planner = run, peers, lengths, planner
        self._replica = run.places.of(peers.rank).replica
        self.latest: PlannedStep | None = None
        """Plan that was sent last; on rank 0."""

    def of_evaluation(self, lengths: Callable[[int], NDArray[np.int64]], num_batches: int) -> list[StepPlan]:
        """The plans of held-out batches, whose `lengths` rank 0 asks for; on all ranks, before the first step.

        InfeasibleError where there is none.
        """
        topics = [f"evaluation {index}" for index in range(num_batches)]
        if self._planner is not None:
            for index, topic in enumerate(topics):
                number = -1 - index  # the planner's steps of training begin at 0
                self._planner.ask(number, lengths(index))
                self._post(topic, number, patient=True)
        return [self._received(topic) for topic in topics]

    def first(self, step: int) -> StepPlan:
        """The plan of the first step, `step`; on all ranks."""
        if self._planner is not None:
            self._planner.ask(step, self._lengths(step))
        self._send(step, patient=True)
        return self._received(f"step {step}")

    def before_exchange(self, step: int) -> None:
        """Send all the plan of the step after `step`, ahead of the exchange that ends `step`."""
        if step + 1 < self._run.num_steps:
            self._send(step + 1, patient=False)

    def after_exchange(self, step: int) -> StepPlan:
        """The plan of `step`, which the exchange that ended the step before brought; InfeasibleError: there is none."""
        return self._received(f"step {step}")

    def _send(self, step: int, *, patient: bool) -> None:
        if self._planner is None:
            return
        self.latest = self._post(f"step {step}", step, patient=patient) or self.latest
        if step + 1 < self._run.num_steps:
            self._planner.ask(step + 1, self._lengths(step + 1))

    def _post(self, topic: str, number: int, *, patient: bool) -> PlannedStep | None:
        """Send all the planner's answer, on rank 0; None where there is no plan."""
        assert self._planner is not None
        planned = None
        try:
            planned = self._planner.answer(number, patient=patient)
            body: dict[str, Any] = {"plans": [plan.to_data() for plan in planned.plans]}
        except InfeasibleError as error:
            body = {"error": f"{topic}: {error}"}
        payload = json.dumps(body, separators=(",", ":")).encode()
        for rank in range(self._peers.world_size):
            self._peers.post(rank, f"plan of {topic}", payload)
        return planned

    def _received(self, topic: str) -> StepPlan:
        source = f"plan of {topic}"
        body = parse_json(self._await(source).decode(), source)
        if "error" in body:
            raise InfeasibleError(str(body["error"]))
        return StepPlan.from_data(body["plans"][self._replica], source)

    def _await(self, topic: str) -> bytes:
        limit_s, paused_s = self._run.transport.timeout_s, self._peers.paused_s()
        deadline_s = time.monotonic() + limit_s
        while not (found := self._peers.poll(topic)):
            if time.monotonic() > deadline_s + self._peers.paused_s() - paused_s:
                raise RunError(f"waited {limit_s:g} s for rank 0 to send the {topic}")
            time.sleep(_POLL_S)
        return found[0][1]


def num_tokens(plans: Sequence[StepPlan]) -> int:
    """Tokens of a step, over all replicas."""
    return sum(plan.num_tokens for plan in plans)
