"""A rank's work around its actions in every step: training a model, or rehearsing without one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from farpipe.runtime.checkpoint.files import Piece
from farpipe.runtime.checkpoint.state import state_pieces
from farpipe.runtime.data.batches import Batches, Share, load_batches
from farpipe.runtime.executor import message_row, message_table
from farpipe.runtime.learning_rate import learning_rate
from farpipe.runtime.make_stage import make_stage, numerics_of
from farpipe.runtime.model.decoder import StageSlice, slices
from farpipe.runtime.optimizer import Optimizer, global_norm
from farpipe.runtime.peers import Messenger, Peers, TensorMessage
from farpipe.runtime.replicas.collectives import Line, Rings
from farpipe.runtime.replicas.flat import Flat, Shard, whole_shards
from farpipe.runtime.replicas.replicas import (
    COMPLETE,
    PipelinePeers,
    RehearsedSync,
    ReplicaSync,
    WeightSync,
    exposed_transfer,
)
from farpipe.runtime.run_spec import RunSpec, transfer_of
from farpipe.runtime.stage import PipelineStage, SleepStage, TorchStage
from farpipe.runtime.tied_weights import EndsExchange, TiedWeights


class Work(Protocol):
    """A rank's stages and what it does before and after their actions."""

    @property
    def stages(self) -> Mapping[int, PipelineStage]:
        """This rank's stages by number."""

    @property
    def data_digest(self) -> bytes:
        """Equal on all ranks that read the same data; empty on a rank that needs none."""

    def begin_step(self, step: int) -> None:
        """Before the first action."""

    def stage_begins(self, step: int, stage: int) -> None:
        """Before the first action of a stage."""

    def stage_done(self, step: int, stage: int) -> None:
        """After the last action of a stage."""

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        """After the last action: the norm of the whole gradient, and what `StepReport.sync` tells.

        Every rank waits here for every other.
        """

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """Of the step that is finished; see `StepReport.link_bytes`."""

    @property
    def loss(self) -> float:
        """Of the step; NaN on a rank without the last stage."""

    def state(self) -> Sequence[Piece]:
        """Pieces of the training's state on this rank, as live views; between steps, on all ranks at once."""

    def restore(self, num_steps: int) -> None:
        """The views of `state` have been written to; so many steps are done."""


class SleepTrainer:
    """Stages that sleep. Everything that a training sends is sent, and steps wait for each other."""

    data_digest = b""
    loss = float("nan")

    def __init__(self, run: RunSpec, peers: Peers) -> None:
        self._peers, self._problem = peers, run.problem
        pipeline = PipelinePeers(peers, run.places)
        mine = run.problem.stages_of_rank[pipeline.rank]
        self.stages: dict[int, PipelineStage] = {stage: SleepStage(run.problem, stage) for stage in mine}
        levels = run.places.ring_levels(peers.rank)
        reduced = [stage for stage in mine if run.has_reduce(stage)]
        between_sites = run.problem.between_sites
        rings = levels, peers.rank, between_sites
        gather, reduce = (partial(exposed_transfer, run.problem, kind) for kind in ("gather", "reduce"))
        syncs = {s: RehearsedSync(gather(s), reduce(s), *rings) for s in reduced}
        self._replicas = ReplicaSync(run, peers, syncs)
        exchange = _exchange(run, pipeline)
        ends = {0, run.problem.num_stages - 1} if exchange is not None else set()
        self._ends = [(stage, exchange) for stage in mine if stage in ends and exchange is not None]

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """See Work."""
        return self._replicas.link_bytes

    def begin_step(self, step: int) -> None:
        """See Work."""
        self._replicas.begin_step(step)

    def stage_begins(self, step: int, stage: int) -> None:
        """See Work."""
        self._replicas.stage_begins(step, stage)

    def stage_done(self, step: int, stage: int) -> None:
        """See Work."""
        self._replicas.stage_done(step, stage)
        for end, exchange in self._ends:
            if end == stage:
                exchange.send(step, stage, torch.zeros(self._exchanged_bytes(stage), dtype=torch.uint8))

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        """See Work."""
        rows = self._replicas.finish_step()
        messages = [exchange.receive(step, stage) for stage, exchange in self._ends]
        return global_norm(0.0, self._peers, step), np.concatenate([rows, _rows(messages)])

    def _exchanged_bytes(self, stage: int) -> int:
        transfer = transfer_of(self._problem, "exchange", stage)
        assert transfer is not None
        return round(float(self._problem.row(transfer.bytes)[0]))

    def state(self) -> Sequence[Piece]:
        """See Work: a rehearsal has none."""
        return ()

    def restore(self, num_steps: int) -> None:
        """See Work."""


class Trainer:
    """Stages of a model that is trained."""

    stage_kind: ClassVar[type[TorchStage]] = TorchStage
    _batches: Batches | None = None

    def __init__(self, run: RunSpec, peers: Peers, parameters: torch.dtype = torch.float32) -> None:
        """`parameters`: their dtype; bf16 trains with float32 parameters and computes with copies of them.

        With ZeRO-1 a replica has its share of those parameters, and copies of all.
        """
        assert run.model is not None
        assert run.training is not None
        self._model = run.model
        self._peers, self._training, self._num_steps = peers, run.training, run.num_steps
        self._place, pipeline = run.places.of(peers.rank), PipelinePeers(peers, run.places)
        mine = run.problem.stages_of_rank[pipeline.rank]
        parts = slices(run.partition)
        self.torch_stages = {s: _make_stage(run, s, parts[s], parameters, self.stage_kind) for s in mine}
        self.stages: Mapping[int, PipelineStage] = self.torch_stages
        if any(parts[s].has_embedding or parts[s].has_head for s in mine):
            self._open_data(run)
        self._tied, self._end_beside = _tie(run, self.torch_stages, pipeline), _other_ends(run, self._place.replica)
        self._syncs = _replica_syncs(run, peers, self.torch_stages, self._tied)
        self._replicas = ReplicaSync(run, peers, self._syncs)
        self._num_replicas, self._complete_after = run.num_replicas, -1
        self._is_writer = run.places.is_first_at_site(peers.rank)
        self.shards = [*_shards(self.torch_stages, self._syncs)]
        """Parameters that this process updates: all of its stages', or with ZeRO-1 its share of them."""
        copies = [s.parameter for s in self.shards if s.stage > 0 and s.whole is self._tied.copies.get(s.stage)]
        self._optimizer = Optimizer([shard.parameter for shard in self.shards], run.training, copies=copies)

    def _open_data(self, run: RunSpec) -> None:
        """On the ranks that read the text."""
        self._batches = batches_of(run, self._place.replica)

    @property
    def data_digest(self) -> bytes:
        """See Work."""
        return b"" if self._batches is None else self._batches.digest

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """See Work."""
        return self._replicas.link_bytes

    @property
    def loss(self) -> float:
        """See Work."""
        last = [stage for stage in self.torch_stages.values() if stage.module.part.has_head]
        return last[0].loss if last else float("nan")

    def begin_step(self, step: int) -> None:
        """See Work."""
        batch = None
        if self._batches is not None:
            batch = self._batches.batch(step)
        for stage in self.torch_stages.values():
            stage.begin_step(batch)
        self._replicas.begin_step(step)

    def begin_evaluation(self, index: int) -> int:
        """See Evaluable: batch `index` of the held-out text; after `complete_weights`."""
        batch = None
        if self._batches is not None:
            batch = self._batches.held_out_batch(index % self._batches.num_held_out_batches)
        for stage in self.torch_stages.values():
            stage.begin_step(batch)
        return 0 if batch is None else batch.num_target_tokens

    def stage_begins(self, step: int, stage: int) -> None:
        """See Work."""
        self._replicas.stage_begins(step, stage)

    def stage_done(self, step: int, stage: int) -> None:
        """See Work."""
        if stage in self._syncs:  # what begins now reads the gradient
            self.torch_stages[stage].finish()
        self._replicas.stage_done(step, stage)
        if self._num_replicas == 1:
            self._tied.stage_done(step, stage)

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        """See Work."""
        rows = self.sum_gradients(step)
        norm = global_norm(self._share_of_norm(), self._peers, step)
        self._optimizer.set_learning_rate(learning_rate(self._training, step, self._num_steps))
        self._optimizer.update(norm)
        self._weights_have_changed()
        return norm, rows

    def _weights_have_changed(self) -> None:
        for sync in self._syncs.values():
            sync.updated()
        for stage in self.torch_stages.values():
            stage.module.forget_casts()

    def sum_gradients(self, step: int) -> NDArray[np.int64]:
        """Over the replicas and over the copies of the tied matrix; what `StepReport.sync` tells of it."""
        rows = self._replicas.finish_step()
        if self._num_replicas > 1:  # the ends exchange what the replicas have summed
            for stage in self._tied.copies:
                self._tied.stage_done(step, stage)
        messages = self._tied.sum_gradients(step)
        for stage, message in zip(self._tied.copies, messages, strict=False):
            self._replicas.count_received(self._end_beside[stage], message.tensor.nbytes)
        for shard in self.shards:
            shard.take_grad()
        return _rows(messages) if self._num_replicas == 1 else rows

    def complete_weights(self, step: int) -> None:
        """Between steps, after `step`, on all processes: with ZeRO-1 everybody gets what the others have updated."""
        if self._complete_after == step:
            return
        for number, sync in self._syncs.items():
            sync.gather(Line(self._peers, step, number, "the replicas' weights", COMPLETE))
        self._complete_after = step

    def _share_of_norm(self) -> float:
        """The sum of squares of the gradients that count here; not finite if the loss isn't, so that all ranks stop."""
        if not all(math.isfinite(stage.loss) for stage in self.torch_stages.values()):
            return math.nan
        is_sharded = any(shard.parameter is not shard.whole for shard in self.shards)
        return self._optimizer.sum_of_squares() if is_sharded or self._place.replica == 0 else 0.0

    def state(self) -> Sequence[Piece]:
        """See Work."""
        return list(state_pieces(self.shards, self._model, self._optimizer, is_writer=self._is_writer))

    def restore(self, num_steps: int) -> None:
        """See Work."""
        self._optimizer.restore(num_steps)
        self._weights_have_changed()


def _rows(messages: list[TensorMessage]) -> NDArray[np.int64]:
    return message_table([message_row(message) for message in messages])


def _replica_syncs(
    run: RunSpec, peers: Peers, stages: Mapping[int, TorchStage], tied: TiedWeights
) -> dict[int, WeightSync]:
    """The collectives of this process's stages; none where there is one replica.

    With ZeRO-1 a process needs its share of the summed gradient only, but all of the tied matrix's, which the ends of
    the pipeline exchange afterwards.
    """
    if run.num_replicas == 1:
        return {}
    assert run.training is not None
    rings, zero1 = Rings(run.places.ring_levels(peers.rank), peers.rank), run.training.zero1
    found = {}
    for number, stage in stages.items():
        copy, named = tied.copies.get(number), dict(stage.module.named_parameters())
        own = {name: parameter for name, parameter in named.items() if parameter is not copy}
        shared = {name: parameter for name, parameter in named.items() if parameter is copy}
        flat = partial(Flat, number, rings=rings, compute=stage.boundary.dtype, sharded=zero1)
        flats = [flat(own, scattered=zero1)] + ([flat(shared, scattered=False)] if shared else [])
        found[number] = WeightSync(flats)
    return found


def _shards(stages: Mapping[int, TorchStage], syncs: Mapping[int, WeightSync]) -> Iterator[Shard]:
    for number, stage in stages.items():
        if number in syncs:
            for flat in syncs[number].flats:
                yield from flat.shards()
        else:
            yield from whole_shards(number, dict(stage.module.named_parameters()))


def _exchange(run: RunSpec, peers: Messenger) -> EndsExchange | None:
    ends = run.ends
    if ends is None:
        return None
    return EndsExchange(peers, (ends.first_rank, ends.last_rank), run.problem.num_stages - 1)


def _other_ends(run: RunSpec, replica: int) -> dict[int, int]:
    """By stage, the process with the other copy of the tied matrix."""
    if run.ends is None:
        return {}
    first, last = (run.places.process(rank, replica) for rank in (run.ends.first_rank, run.ends.last_rank))
    return {0: last, run.problem.num_stages - 1: first}


def _tie(run: RunSpec, stages: Mapping[int, TorchStage], peers: Messenger) -> TiedWeights:
    """This rank's copies of a tied matrix; none where nothing is tied or one stage has both ends."""
    assert run.model is not None
    last = run.problem.num_stages - 1
    copies: dict[int, nn.Parameter] = {}
    if run.model.tied_embeddings and last > 0:
        copies |= {stage: stages[stage].module.embedding.weight for stage in stages if stage == 0}
        copies |= {stage: stages[stage].module.head.weight for stage in stages if stage == last}
    return TiedWeights(copies, last, _exchange(run, peers))


def _make_stage(
    run: RunSpec, number: int, part: StageSlice, parameters: torch.dtype, kind: type[TorchStage]
) -> TorchStage:
    assert run.model is not None
    assert run.training is not None
    recompute = run.recompute[number] if run.recompute else "none"
    return make_stage(run.model, run.training, part, numerics_of(run.training, parameters, recompute), run.device, kind)


def batches_of(run: RunSpec, replica: int = 0) -> Batches:
    """Batches that `replica` of a training works on; InputError if the text can't be read or does not fit."""
    assert run.model is not None
    assert run.training is not None
    assert run.training.microbatch_size is not None
    num_microbatches = run.problem.num_microbatches * run.num_replicas
    shape = (num_microbatches, run.training.microbatch_size, run.training.sequence_length)
    return load_batches(run.data, run.model, shape, run.training.seed, Share(replica, run.num_replicas))
