"""The order of a user's pipeline: agreed on by all ranks, from a plan or by the name of a method."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from farpipe import __version__
from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.schedule import check
from farpipe.core.step import Problem, Rank, Schedule, Stage
from farpipe.core.strict import parse_json
from farpipe.engine.transport import Transport
from farpipe.planning import Plan
from farpipe.planning.planner.orders import V_ORDERS, find_order
from farpipe.torch.order_changes import is_first, shared_mesh

SEARCH_S: Final = 10.0
"""Time that the search for an order may take, where one is asked for."""
Stages = dict[int, nn.Module]
"""Modules of a rank by the number of their stage."""


@dataclass(frozen=True)
class Asked:
    """Settings of this rank."""

    num_microbatches: int
    plan: Plan | str | Path | None
    method: str | None
    has_loss: bool
    records: bool
    """True where a directory for the figures of the run was given."""
    replans: bool = False

    def load(self) -> Plan | None:
        """The plan; InputError for settings that contradict each other or it."""
        plan = self.plan if isinstance(self.plan, Plan) or self.plan is None else Plan.load(self.plan)
        if plan is None and self.method is None:
            raise InputError("which order? Give a plan (plan='plan.json') or a method (method='zb-h1')")
        if plan is None and self.records:
            raise InputError("run_dir: the figures of a run are shown beside its plan; give the plan too")
        if self.replans and not self.records:
            raise InputError("replan: steps are measured, and what happens is written down; give plan and run_dir too")
        if plan is not None and plan.problem.num_microbatches != self.num_microbatches:
            raise InputError(
                f"the plan is for {plan.problem.num_microbatches} microbatches, and n_microbatches is "
                f"{self.num_microbatches}; plan again with that many, or change it"
            )
        return plan


@dataclass(frozen=True)
class Agreed:
    """Settings that all ranks of the pipeline have agreed on."""

    plan: Plan | None
    problem: Problem
    schedule: Schedule
    stages: Stages
    """Stages of this rank."""
    trains: bool
    """True if the rank of the last stage has a loss function."""
    records: bool
    """True if rank 0 writes the figures of the run; of several pipelines that share weights the first one's does."""
    replans: bool
    """True if the order may change between two steps."""


def agree(asked: Asked, given: Any, transport: Transport, topic: str) -> Agreed:
    """Hear of the others what they run and find the order for it; on all ranks at the same time.

    `given`: a stage of torch's or a module, or several. InputError, the same on all ranks, where they contradict each
    other.
    """
    plan, stages, mine = _introduction(asked, given, transport)
    waiting_for = "the others to make their part of the pipeline"
    texts = transport.exchange(topic, json.dumps(mine).encode(), waiting_for=waiting_for)
    known = [json.loads(text) for text in texts]
    _expect_equal(known)
    owners = stage_owners([one["stages"] for one in known])
    problem = _problem(plan, asked.num_microbatches, owners, transport.world_size)
    schedule = _schedule(plan, asked.method, problem, transport, f"{topic}, order")
    first = known[0]
    return Agreed(plan, problem, schedule, stages, known[owners[-1]]["has_loss"], first["records"], first["replans"])


def _introduction(asked: Asked, given: Any, transport: Transport) -> tuple[Plan | None, Stages, dict[str, Any]]:
    """Return the plan, this rank's stages, and what the others have to know: an error as well, for they would wait."""
    try:
        plan = asked.load()
        stages = numbered(given, plan, asked.method, transport.rank, transport.world_size)
    except FarpipeError as error:
        return None, {}, {"error": str(error)}
    mine = {
        "stages": [*stages],
        "version": __version__,
        "microbatches": asked.num_microbatches,
        "method": asked.method,
        "plan": plan and hashlib.sha256(plan.to_json().encode()).hexdigest(),
        "has_loss": asked.has_loss,
        "records": asked.records and is_first(shared_mesh(stages.values())),
        "replans": asked.replans,
    }
    return plan, stages, mine


def numbered(given: Any, plan: Plan | None, method: str | None, rank: int, num_ranks: int) -> Stages:
    """The modules of this rank by the number of their stage.

    torch's stages have numbers. Modules are those of the plan on this rank, in its order; without a plan they are dealt
    to the ranks in turn, or for orders of two stages in a V the second ones in reverse. InputError where they are not
    as many as the plan has.
    """
    parts = [*given] if isinstance(given, list | tuple | nn.ModuleList) else [given]
    if all(isinstance(part, _PipelineStageBase) for part in parts):
        return {part.stage_index: part.submod for part in sorted(parts, key=lambda part: part.stage_index)}
    if not all(isinstance(part, nn.Module) for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise InputError(f"stages must be modules, or PipelineStages of torch: found {kinds}")
    numbers = [number * num_ranks + rank for number in range(len(parts))]
    if plan is not None:
        known = plan.problem.stages_of_rank
        numbers = [*known[rank]] if rank < len(known) else []
    elif method in V_ORDERS and len(parts) == 2:
        numbers = [rank, 2 * num_ranks - 1 - rank]
    if len(numbers) != len(parts):
        raise InputError(f"the plan has {len(numbers)} stages on rank {rank}, and it was given {len(parts)} modules")
    return dict(zip(numbers, parts, strict=True))


def stage_owners(stages: Sequence[Sequence[int]]) -> list[int]:
    """Ranks by stage, from the stages of every rank; InputError for one that is missing or there twice."""
    if len(stages) < 2:
        raise InputError("a pipeline over one rank has no peer to send to; make a group of two ranks or more")
    owners: dict[int, int] = {}
    for rank, numbers in enumerate(stages):
        for number in numbers:
            if owners.setdefault(number, rank) != rank or list(numbers).count(number) > 1:
                raise InputError(f"stage {number} is on rank {owners[number]} and again on rank {rank}")
        if not numbers:
            raise InputError(f"rank {rank} has no stage")
    if missing := set(range(max(owners) + 1)) - set(owners):
        raise InputError(f"stage {min(missing)} of {max(owners) + 1} is on no rank")
    return [owners[number] for number in range(len(owners))]


def _expect_equal(known: Sequence[dict[str, Any]]) -> None:
    """InputError for what differs between two ranks, or is wrong on one."""
    for rank, one in enumerate(known):
        if "error" in one:
            raise InputError(f"rank {rank}: {one['error']}")
    words = {"version": "versions of farpipe", "microbatches": "n_microbatches", "method": "methods", "plan": "plans"}
    words["replans"] = "settings of replan"
    for key, what in words.items():
        for rank, one in enumerate(known):
            if one[key] != known[0][key]:
                shown = "" if key == "plan" else f": {known[0][key]} and {one[key]}"
                raise InputError(f"ranks 0 and {rank} have different {what}{shown}")


def _problem(plan: Plan | None, num_microbatches: int, owners: list[int], num_ranks: int) -> Problem:
    """The plan's Problem, whose stages must be where they are; without a plan, equal stages and links of no length."""
    if plan is None:
        figures = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "activation_bytes": 1.0}
        return Problem(
            num_microbatches=num_microbatches,
            ranks=(Rank(),) * num_ranks,
            stages=tuple(Stage(rank=rank, **figures, weight_stash_bytes=0.5) for rank in owners),
        )
    problem = plan.problem
    if problem.num_ranks != num_ranks:
        raise InputError(f"the plan has {problem.num_ranks} ranks, the group {num_ranks}")
    planned = [stage.rank for stage in problem.stages]
    if planned != owners:
        raise InputError(f"the plan has stages on ranks {planned}, and they are on {owners}")
    return problem


def _schedule(plan: Plan | None, method: str | None, problem: Problem, transport: Transport, topic: str) -> Schedule:
    """The order, found by rank 0 for all: what a search finds depends on the machine."""
    if plan is not None and method is None:
        return plan.schedule
    assert method is not None
    found: dict[str, Any] = {}
    if transport.rank == 0:
        try:
            found = {"order": find_order(problem, method, time_limit_s=SEARCH_S).schedule.to_data()}
        except FarpipeError as error:
            found = {"error": str(error)}
    answer = transport.exchange(topic, json.dumps(found).encode(), waiting_for="rank 0 to find the order")[0]
    body = parse_json(answer.decode(), topic)
    if "error" in body:
        raise InputError(str(body["error"]))
    schedule = Schedule.from_data(body["order"], topic)
    check(problem, schedule, memory=False)
    return schedule
