"""What a rank does around its actions in every step: training a model, or rehearsing without one."""

import os
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from farpipe.errors import InputError
from farpipe.runtime.data import Batches, load_text, require_vocabulary
from farpipe.runtime.model import Numerics, StageModule, StageSlice, compute_dtype, initialise, slices
from farpipe.runtime.optimizer import Optimizer, global_norm
from farpipe.runtime.peers import Peers
from farpipe.runtime.run_spec import RunSpec
from farpipe.runtime.stage import Boundary, SleepStage, Stage, TorchStage
from farpipe.runtime.tied_weights import EndsExchange, TiedWeights
from farpipe.runtime.transport import Message
from farpipe.runtime.weight_grads import WeightGradStore
from farpipe.spec import Model, Training


class Work(Protocol):
    """A rank's stages and what it does before and after their actions."""

    @property
    def stages(self) -> Mapping[int, Stage]:
        """This rank's stages by number."""

    @property
    def data_digest(self) -> bytes:
        """Equal on all ranks that read the same data; empty on a rank that needs none."""

    def begin_step(self, step: int) -> None:
        """Before the first action."""

    def stage_done(self, step: int, stage: int) -> None:
        """After the last action of a stage."""

    def finish_step(self, step: int) -> tuple[float, list[Message]]:
        """After the last action: the norm of the whole gradient, and the tied weights' gradient if one came.

        Every rank waits here for every other.
        """

    @property
    def loss(self) -> float:
        """Of the step; NaN on a rank without the last stage."""


class Rehearsal:
    """Stages that sleep. Everything that a training sends is sent, and steps wait for each other."""

    data_digest = b""
    loss = float("nan")

    def __init__(self, run: RunSpec, peers: Peers) -> None:
        self._peers, self._problem = peers, run.problem
        mine = run.problem.stages_of_rank[peers.rank]
        self.stages: dict[int, Stage] = {stage: SleepStage(run.problem, stage) for stage in mine}
        exchange = _exchange(run, peers)
        ends = {0, run.problem.num_stages - 1} if exchange is not None else set()
        self._ends = [(stage, exchange) for stage in mine if stage in ends and exchange is not None]

    def begin_step(self, step: int) -> None:
        """See Work."""

    def stage_done(self, step: int, stage: int) -> None:
        """See Work."""
        for end, exchange in self._ends:
            if end == stage:
                exchange.send(step, stage, torch.zeros(self._exchanged_bytes(stage), dtype=torch.uint8))

    def finish_step(self, step: int) -> tuple[float, list[Message]]:
        """See Work."""
        messages = [exchange.receive(step, stage) for stage, exchange in self._ends]
        return global_norm(0.0, self._peers, step), messages

    def _exchanged_bytes(self, stage: int) -> int:
        sync = (self._problem.sync or ())[stage]
        assert sync is not None
        assert sync.reduce is not None
        return round(float(self._problem.row(sync.reduce.bytes)[0]))


class Learning:
    """Stages of a model that is trained."""

    def __init__(self, run: RunSpec, peers: Peers, parameters: torch.dtype = torch.float32) -> None:
        """`parameters`: their dtype; bf16 trains with float32 parameters and computes with copies of them."""
        assert run.model is not None
        assert run.training is not None
        self._peers = peers
        numerics = numerics_of(run.training, parameters)
        mine = run.problem.stages_of_rank[peers.rank]
        parts = slices(run.partition)
        self.torch_stages = {s: make_stage(run.model, run.training, parts[s], numerics, run.device) for s in mine}
        self.stages: Mapping[int, Stage] = self.torch_stages
        self._batches = _load_batches(run) if any(parts[s].has_embedding or parts[s].has_head for s in mine) else None
        self._tied = _tie(run, self.torch_stages, peers)
        copies = [copy for stage, copy in self._tied.copies.items() if stage > 0]
        self._optimizer = Optimizer(self._parameters(), run.training, copies=copies)

    @property
    def data_digest(self) -> bytes:
        """See Work."""
        return b"" if self._batches is None else self._batches.digest

    @property
    def loss(self) -> float:
        """See Work."""
        last = [stage for stage in self.torch_stages.values() if stage.module.part.has_head]
        return last[0].loss if last else float("nan")

    def begin_step(self, step: int) -> None:
        """See Work."""
        batch = None if self._batches is None else self._batches.batch(step)
        for stage in self.torch_stages.values():
            stage.begin_step(batch)

    def stage_done(self, step: int, stage: int) -> None:
        """See Work."""
        self._tied.stage_done(step, stage)

    def finish_step(self, step: int) -> tuple[float, list[Message]]:
        """See Work."""
        messages = self._tied.sum_gradients(step)
        norm = global_norm(self._optimizer.sum_of_squares(), self._peers, step)
        self._optimizer.update(norm)
        for stage in self.torch_stages.values():
            stage.module.forget_casts()
        return norm, messages

    def _parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.torch_stages.values():
            yield from stage.module.parameters()


def _exchange(run: RunSpec, peers: Peers) -> EndsExchange | None:
    ends = run.ends
    if ends is None:
        return None
    return EndsExchange(peers, (ends.first_rank, ends.last_rank), run.problem.num_stages - 1)


def _tie(run: RunSpec, stages: Mapping[int, TorchStage], peers: Peers) -> TiedWeights:
    """This rank's copies of a tied matrix; none where nothing is tied or one stage has both ends."""
    assert run.model is not None
    last = run.problem.num_stages - 1
    copies: dict[int, nn.Parameter] = {}
    if run.model.tied_embeddings and last > 0:
        copies |= {stage: stages[stage].module.embedding.weight for stage in stages if stage == 0}
        copies |= {stage: stages[stage].module.head.weight for stage in stages if stage == last}
    return TiedWeights(copies, last, _exchange(run, peers))


def numerics_of(training: Training, parameters: torch.dtype = torch.float32) -> Numerics:
    """What a training computes in."""
    compute = compute_dtype(training.precision)
    compute = parameters if compute == torch.float32 else compute
    return Numerics(parameters, compute, recompute_layers=training.recompute == "full")


def choose_gpu() -> None:
    """Each rank of a machine takes the GPU with its local number."""
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise InputError(
            f"device 'cuda': there are {num_gpus} GPUs for local rank {local_rank}; start fewer ranks here"
        )
    torch.cuda.set_device(local_rank)


def make_stage(model: Model, training: Training, part: StageSlice, numerics: Numerics, device: str) -> TorchStage:
    """A stage with its initial weights."""
    assert training.microbatch_size is not None
    store = WeightGradStore()
    module = StageModule(model, part, training.sequence_length, store, numerics)
    initialise(module, training.seed)
    boundary = Boundary((training.microbatch_size, training.sequence_length, model.hidden), numerics.compute)
    return TorchStage(module.to(device), store, boundary, device)


def _load_batches(run: RunSpec) -> Batches:
    assert run.model is not None
    assert run.training is not None
    assert run.training.microbatch_size is not None
    require_vocabulary(run.model)
    shape = (run.problem.num_microbatches, run.training.microbatch_size, run.training.sequence_length)
    return Batches(load_text(run.data), shape, run.training.seed)
