"""Everything that the ranks of a run need to know, in one JSON file: ``farpipe/run/1``."""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field, InstanceOf, model_validator

from farpipe.emulate import LinkShape
from farpipe.problem import Problem, Transfer, is_inter_site
from farpipe.problem import Stage as ProblemStage
from farpipe.schedule import Schedule, check
from farpipe.spec import Data, Model, Training
from farpipe.spec.part import Count, Flag, Natural, Part, Positive, SiteName, fault
from farpipe.strict import expect_format, parse_json, read_text, validate, write_text

FORMAT: Final = "farpipe/run/1"

DeviceKind = Literal["cpu", "cuda", "sleep"]
"""``sleep`` rehearses the schedule: stages take the Problem's time and pass its bytes, but compute nothing."""


class TransportSettings(Part):
    """How the ranks talk."""

    streams: Count = 4
    """TCP connections per channel."""
    timeout_s: Positive = 60.0
    """Longest wait for one message before the run ends with an error."""
    connect_timeout_s: Positive = 60.0
    """Longest wait for all ranks to meet."""


class Ends(NamedTuple):
    """Between which ranks the gradient of tied weights is exchanged, and over which links ("" if none is known)."""

    first_rank: int
    last_rank: int
    link_there: str = ""
    link_back: str = ""


class RunSpec(Part):
    """A run: `schedule` on `problem`, and for training the model that `partition` cuts into stages."""

    problem: InstanceOf[Problem]
    schedule: InstanceOf[Schedule]
    sites: Annotated[tuple[SiteName, ...], Field(min_length=1)]
    """The site of every rank."""
    num_steps: Count
    device: DeviceKind = "cpu"
    emulate_links: Flag = True
    """Delay messages between sites as the Problem's links would; only where all ranks are on one machine."""
    transport: TransportSettings = TransportSettings()
    model: Model | None = None
    training: Training | None = None
    data: Data = Data()
    partition: tuple[tuple[Natural, Natural], ...] = ()
    """(first layer, end layer) of every stage."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check(self.problem, self.schedule, memory=False)
        if len(self.sites) != self.problem.num_ranks:
            raise fault(f"expected one site per rank, {self.problem.num_ranks}, found {len(self.sites)}", "sites")
        self._check_sync()
        if self.device != "sleep":
            self._check_training()
        return self

    def _check_sync(self) -> None:
        """The only collective that runs is the exchange of tied weights between the two ends of the pipeline."""
        sync = self.problem.sync or ()
        reduced = [stage for stage, spec in enumerate(sync) if spec and spec.reduce]
        allowed = [0, len(sync) - 1] if self.ends is not None else []
        if any(spec and spec.gather for spec in sync) or reduced not in ([], allowed):
            raise fault("data-parallel collectives can't be run yet; plan with layout.data = 1", "problem")

    def _check_training(self) -> None:
        if self.model is None or self.training is None:
            missing = "model" if self.model is None else "training"
            raise fault(f"needed to train on device {self.device!r}", missing)
        _check_partition(self.partition, self.model, self.problem.stages)
        size, num_microbatches = self.training.microbatch_size, self.problem.num_microbatches
        if size is None or size * num_microbatches != self.training.global_batch:
            raise fault(
                f"microbatch_size {size} x {num_microbatches} microbatches is not global_batch "
                f"{self.training.global_batch}",
                "training",
            )

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.problem.num_ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step; 0 for a rehearsal without a model."""
        return 0 if self.training is None else self.training.tokens_per_step

    @property
    def ends(self) -> Ends | None:
        """The exchange of tied weights' gradients; None where nothing is tied or both ends are on one rank."""
        first, last = self.problem.stages[0].rank, self.problem.stages[-1].rank
        sync = self.problem.sync or (None,)
        planned = all(spec and spec.reduce for spec in (sync[0], sync[-1]))
        tied = planned if self.model is None or self.device == "sleep" else self.model.tied_embeddings
        if first == last or not tied:
            return None
        there, back = (self.links().get(pair, ("", None))[0] for pair in ((first, last), (last, first)))
        return Ends(first, last, there, back)

    def links(self) -> dict[tuple[int, int], tuple[str, LinkShape | None]]:
        """(source rank, target rank) -> name of its link and, where it is to be emulated, what that link does.

        Ranks of two sites that have no hop in common still share the sites' link for control messages.
        """
        names = _hop_links(self.problem) | {}
        for source, a in enumerate(self.sites):
            for target, b in enumerate(self.sites):
                if a != b and f"{a}>{b}" in self.problem.links:
                    names.setdefault((source, target), f"{a}>{b}")
        return {pair: (name, self._shape(name)) for pair, name in names.items()}

    def _shape(self, name: str) -> LinkShape | None:
        if not (self.emulate_links and is_inter_site(name)):
            return None
        link = self.problem.links[name]
        return LinkShape(link.latency_s, link.bandwidth_bytes_per_s)

    def to_json(self) -> str:
        """The run in the format ``farpipe/run/1``."""
        body = json.loads(self.model_dump_json(exclude={"problem", "schedule"}, exclude_none=True))
        problem, schedule = json.loads(self.problem.to_json()), self.schedule.to_data()
        return json.dumps({"format": FORMAT, **body, "problem": problem, "schedule": schedule})

    def save(self, path: Path | str) -> None:
        """Write the run to `path`, whole or not at all."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def from_json(cls, text: str, source: str = "run") -> Self:
        """Read ``farpipe/run/1``; InputError names the place of whatever is wrong."""
        body: dict[str, Any] = expect_format(parse_json(text, source), FORMAT, source)
        if "problem" in body:
            inner = expect_format(body["problem"], "farpipe/problem/1", f"{source}: problem")
            body["problem"] = validate(Problem, inner, source, "problem")
        if "schedule" in body:
            body["schedule"] = Schedule.from_data(body["schedule"], f"{source}: schedule")
        return validate(cls, body, source)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a run file."""
        return cls.from_json(read_text(path), str(path))


def _check_partition(partition: tuple[tuple[int, int], ...], model: Model, stages: tuple[ProblemStage, ...]) -> None:
    if len(partition) != len(stages):
        raise fault(f"expected one entry per stage, {len(stages)}, found {len(partition)}", "partition")
    ends = (0, *(end for _, end in partition))
    for stage, ((first, end), before) in enumerate(zip(partition, ends, strict=False)):
        if first != before or end < first:
            raise fault(f"stage {stage} has layers {first} to {end}, but the one before ends at {before}", "partition")
    if ends[-1] != model.num_layers:
        raise fault(f"the last stage ends at layer {ends[-1]}, the model has {model.num_layers}", "partition")


def _hop_links(problem: Problem) -> dict[tuple[int, int], str]:
    """The link of every rank pair that a hop joins; a pair has one."""
    found: dict[tuple[int, int], str] = {}
    for index, hop in enumerate(problem.hops):
        a, b = problem.stages[index].rank, problem.stages[index + 1].rank
        if hop is None or a == b:
            continue
        for pair, transfer in (((a, b), hop.forward), ((b, a), hop.backward)):
            for name in _names(transfer):
                if found.setdefault(pair, name) != name:
                    raise fault(f"{name!r} and {found[pair]!r} both join ranks {pair[0]} and {pair[1]}", "problem")
    return found


def _names(transfer: Transfer | None) -> tuple[str, ...]:
    if transfer is None:
        return ()
    return (transfer.link,) if isinstance(transfer.link, str) else transfer.link
