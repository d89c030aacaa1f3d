"""A rank's work around its actions in every step of a training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from farpipe.core.spec import Training
from farpipe.engine.checkpoint.checkpointer import state_pieces
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.data.batches import Batch, Batches, load_batches
from farpipe.engine.executor.executor import message_table
from farpipe.engine.executor.optimizer import Optimizer, Squares, global_norm, learning_rate
from farpipe.engine.executor.peers import Messenger, Peers, TensorMessage
from farpipe.engine.replicas.collectives import Flat, Line, Rings, Shard, whole_shards
from farpipe.engine.replicas.places import Place
from farpipe.engine.replicas.replicas import COMPLETE, PipelinePeers, ReplicaSync, WeightSync, has_barrier
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.run_text import shape_of, trained
from farpipe.engine.stages.divided_stages import (
    check_twins,
    divided_stages,
    groups_of,
    mesh_of,
    part_of_boundary,
    twins_in,
)
from farpipe.engine.stages.make_stage import check_model, make_stage, numerics_of
from farpipe.engine.stages.router_bias import ROUTER_BIAS
from farpipe.engine.stages.slices import StageSlice, slices
from farpipe.engine.stages.stage import PipelineStage, TorchStage
from farpipe.engine.stages.tied_weights import EndsExchange, TiedWeights
from farpipe.planning.documents.batches import Share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from farpipe.engine.site.context_chunks import Groups
    from farpipe.engine.site.shared_weights import SharedWeights

AGAIN: Final = 1 << 50
"""Added to the number of a step whose actions are run again, by which its messages differ from those of the first
run."""


class Work(Protocol):
    """A rank's stages and what it does before and after their actions."""

    @property
    def stages(self) -> Mapping[int, PipelineStage]:
        """This rank's stages by number."""

    @property
    def data_digest(self) -> bytes:
        """Equal on all ranks that read the same data; empty on a rank that needs none."""

    @property
    def boundaries(self) -> Mapping[int, str]:
        """Inputs and outputs of each of this rank's stages in words, equal at neighbours; none in a rehearsal."""

    def begin_step(self, step: int) -> None:
        """Get ready, before the first action; of a step that is done again `step` is AGAIN more."""

    def stage_begins(self, step: int, stage: int) -> None:
        """Get a stage ready, before its first action."""

    def stage_done(self, step: int, stage: int) -> None:
        """Pass on a stage's results, after its last action."""

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        """The norm of the whole gradient, and the rows of `StepReport.sync`; after the last action.

        Every rank waits here for every other. Without a barrier it is done in parts, as follow.
        """

    def sum_gradients(self, step: int) -> NDArray[np.int64]:
        """Complete this rank's gradients; rows as `finish_step` has them."""

    def share_of_norm(self) -> Squares:
        """This rank's share of the norm; not finite if its loss isn't."""

    def update(self, step: int, norm: float) -> None:
        """Update the weights, the norm of the whole gradient being `norm`."""

    def is_clipped(self, norm: float) -> bool:
        """True if `update` scales a gradient of this norm."""

    def keep(self) -> None:
        """Keep what the next update changes, for `take_back`."""

    def take_back(self) -> None:
        """Undo the update that came after `keep`, and drop the gradients of the step after it."""

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """Bytes of the step that is finished; see `StepReport.link_bytes`."""

    @property
    def loss(self) -> float:
        """Loss of the step; NaN on a rank without the last stage."""

    def state(self) -> Sequence[Piece]:
        """Pieces of the training's state on this rank, as live views; between steps, on all ranks at once."""

    def restore(self, num_steps: int) -> None:
        """The views of `state` have been written to, and this number of steps is done."""


class Trainer:
    """Work of stages of a model that is trained."""

    on_chunks: ClassVar[bool] = False
    _batches: Batches | None = None

    def __init__(self, run: RunSpec, peers: Peers, parameters: torch.dtype = torch.float32) -> None:
        """`parameters`: their dtype; bf16 trains with float32 parameters and computes with copies of them.

        With ZeRO-1 a replica has its share of those parameters, and copies of all.
        """
        assert run.plan.model is not None
        assert run.plan.training is not None
        self._peers, self._training, self._num_steps = peers, run.plan.training, run.num_steps
        self._place, pipeline = run.places.of(peers.rank), PipelinePeers(peers, run.places)
        if peers.rank == 0:
            check_model(run.plan.model, run.plan.recompute, on_chunks=self.on_chunks)
        parts, mesh = slices(run.plan.partition), mesh_of(run)
        check_twins(run, twins_in(mesh), on_chunks=self.on_chunks)
        self._part = part_of_boundary(mesh)
        make = partial(_make_stage, run, parameters=parameters, on_chunks=self.on_chunks, mesh=mesh)
        make = partial(make, groups=groups_of(run, mesh))
        self.torch_stages = {
            stage: make(stage, parts[stage]) for stage in run.plan.problem.stages_of_rank[pipeline.rank]
        }
        self.stages: Mapping[int, PipelineStage] = self.torch_stages
        if any(parts[s].has_embedding or parts[s].has_head for s in self.torch_stages):
            self._open_data(run)
        self._shared = divided_stages(run, peers, self.torch_stages, mesh)
        self._tied, self._end_beside = _tie(run, self.torch_stages, pipeline), _other_ends(run, self._place)
        others = {number: stage for number, stage in self.torch_stages.items() if number not in self._shared}
        self._syncs = self._shared | _replica_syncs(run, peers, others, self._tied, parameters)
        self._replicas = ReplicaSync(run, peers, self._syncs)
        self._num_replicas, self._complete_after = run.num_replicas, -1
        self._first_microbatch = self._place.replica * run.plan.problem.num_microbatches
        self._counts = _counts_in_norm(run, peers.rank)
        self._is_writer = run.places.is_first_at_site(peers.rank) and mesh is None
        self.shards = [*_shards(self.torch_stages, self._syncs)]
        """Parameters that this process updates: all of its stages', or with ZeRO-1 its share of them."""
        self._optimizer = self._make_optimizer(run.plan.training, is_divided=mesh is not None)

    def _make_optimizer(self, training: Training, *, is_divided: bool) -> Optimizer:
        """The optimizer of this process's shards; copies of what others update too count once in the norm."""
        copies = [s.parameter for s in self.shards if s.stage > 0 and s.whole is self._tied.copies.get(s.stage)]
        copies += [shard.parameter for shard in self.shards if is_divided and not shard.is_share]
        biases = [shard.parameter for shard in self.shards if shard.name.endswith(ROUTER_BIAS)]
        return Optimizer([shard.parameter for shard in self.shards], training, copies=copies, router_biases=biases)

    def _open_data(self, run: RunSpec) -> None:
        """Open the text, on the ranks that read it."""
        self._batches = batches_of(run, self._place.replica)

    @property
    def data_digest(self) -> bytes:
        return b"" if self._batches is None else self._batches.digest

    @property
    def boundaries(self) -> Mapping[int, str]:
        return {number: f"{stage.message}{self._part}" for number, stage in self.torch_stages.items()}

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        return self._replicas.link_bytes

    @property
    def loss(self) -> float:
        return next((stage.loss for stage in self.torch_stages.values() if stage.module.part.has_head), float("nan"))

    def begin_step(self, step: int) -> None:
        batch = self._batch(step)
        for stage in self.torch_stages.values():
            stage.begin_step(batch)
            if stage.masks is not None:
                stage.masks.begin_step(step % AGAIN, self._first_microbatch)
        self._replicas.begin_step(step)

    def _batch(self, step: int) -> Batch | None:
        return None if self._batches is None else self._batches.batch(step % AGAIN)

    def begin_evaluation(self, index: int) -> int:
        """Give the stages batch `index` of the held-out text; all replicas' tokens that count in it, 0 without text."""
        batches = self._batches
        batch = None if batches is None else batches.held_out_batch(index % batches.num_held_out_batches)
        for stage in self.torch_stages.values():
            stage.begin_step(batch)
        return 0 if batch is None else batch.num_target_tokens

    def stage_begins(self, step: int, stage: int) -> None:
        self._replicas.stage_begins(step, stage)

    def stage_done(self, step: int, stage: int) -> None:
        if stage in self._shared:
            self._shared[stage].end_actions()
        self._replicas.stage_done(step, stage)
        if self._num_replicas == 1:
            self._tied.stage_done(step, stage)

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        rows = self.sum_gradients(step)
        self._sum_over_sites(step)
        return self._update(step), rows

    def _update(self, step: int) -> float:
        norm = global_norm(self.share_of_norm(), self._peers, step)
        self.update(step, norm)
        return norm

    def update(self, step: int, norm: float) -> None:
        self._optimizer.set_learning_rate(learning_rate(self._training, step, self._num_steps))
        self._optimizer.update(norm)
        self._weights_have_changed()

    def is_clipped(self, norm: float) -> bool:
        return self._optimizer.is_clipped(norm)

    def keep(self) -> None:
        self._optimizer.keep(copies_grads=bool(self._syncs))

    def take_back(self) -> None:
        for stage in self.torch_stages.values():
            stage.module.zero_grad(set_to_none=True)
        self._optimizer.take_back()
        self._weights_have_changed()

    def _sum_over_sites(self, step: int) -> None:
        """Add what other sites have, where each is a run of its own; see `farpipe.engine.outer`."""

    def _weights_have_changed(self) -> None:
        for sync in self._syncs.values():
            sync.updated()

    def sum_gradients(self, step: int) -> NDArray[np.int64]:
        """Sum over the replicas and over the copies of the tied matrix; the rows of `StepReport.sync`."""
        rows = self._replicas.finish_step()
        if self._num_replicas > 1:  # the ends exchange what the replicas have summed
            for stage in self._tied.copies:
                self._tied.stage_done(step, stage)
        messages = self._tied.sum_gradients(step)
        for stage, message in zip(self._tied.copies, messages, strict=False):
            self._replicas.count_received(self._end_beside[stage], message.tensor.nbytes)
        for shard in self.shards:
            shard.take_grad()
        return message_rows(messages) if self._num_replicas == 1 else rows

    def complete_weights(self, step: int) -> None:
        """Gather what other processes have updated, with ZeRO-1; on all processes, between steps, after `step`."""
        if self._complete_after == step:
            return
        for number, sync in self._syncs.items():
            sync.gather(Line(self._peers, step, number, "the replicas' weights", COMPLETE))
        self._complete_after = step

    def share_of_norm(self) -> Squares:
        """The sum of squares of the gradients that count here; not finite if the loss isn't, so that all ranks stop."""
        if not all(math.isfinite(stage.loss) for stage in self.torch_stages.values()):
            return Squares(math.nan)
        return self._optimizer.sum_of_squares() if self._counts else Squares()

    def state(self) -> Sequence[Piece]:
        shared = {n: name for stage in self.torch_stages.values() for n, name in stage.module.shared_names.items()}
        return list(state_pieces(self.shards, shared, self._optimizer, is_writer=self._is_writer))

    def restore(self, num_steps: int) -> None:
        self._optimizer.restore(num_steps)
        self._weights_have_changed()


def message_rows(messages: list[TensorMessage]) -> NDArray[np.int64]:
    return message_table([message.row for message in messages])


def _counts_in_norm(run: RunSpec, process: int) -> bool:
    """True if the gradients of a process count in the norm of the whole; others have the same ones."""
    if run.is_divided:
        return run.places.ring_levels(process)[-1][0] == process
    return run.has_gather(0) or run.places.of(process).replica == 0


def _replica_syncs(
    run: RunSpec, peers: Peers, stages: Mapping[int, TorchStage], tied: TiedWeights, parameters: torch.dtype
) -> dict[int, WeightSync]:
    """The collectives of this process's stages; with one replica, those that hold float32 master weights.

    With ZeRO-1 a process needs its share of the summed gradient only, but all of the tied matrix's, which the ends of
    the pipeline exchange afterwards.
    """
    assert run.plan.training is not None
    rings = Rings(run.places.ring_levels(peers.rank), peers.rank)
    zero1 = run.plan.training.zero == 1 and run.num_replicas > 1
    found = {}
    for number, stage in stages.items():
        compute = stage.boundary.dtype
        if run.num_replicas == 1 and compute == parameters:
            continue
        copy, named = tied.copies.get(number), stage.module.trained_parameters
        own = {name: parameter for name, parameter in named.items() if parameter is not copy}
        shared = {name: parameter for name, parameter in named.items() if parameter is copy}
        flat = partial(Flat, number, rings=rings, compute=compute, sharded=zero1)
        flats = [flat(own, scattered=zero1)] + ([flat(shared, scattered=False)] if shared else [])
        found[number] = WeightSync(flats)
    return found


def _shards(stages: Mapping[int, TorchStage], syncs: "Mapping[int, WeightSync | SharedWeights]") -> Iterator[Shard]:
    for number, stage in stages.items():
        if number in syncs:
            yield from syncs[number].shards()
        else:
            yield from whole_shards(number, stage.module.trained_parameters)


def ends_exchange(run: RunSpec, peers: Messenger) -> EndsExchange | None:
    ends = run.ends
    if ends is None:
        return None
    ranks, last = (ends.first_rank, ends.last_rank), run.plan.problem.num_stages - 1
    return EndsExchange(peers, ranks, last, copies=not has_barrier(run))


def _other_ends(run: RunSpec, place: Place) -> dict[int, int]:
    """Processes with the other copy of the tied matrix, by stage."""
    if run.ends is None:
        return {}
    ranks = (run.ends.first_rank, run.ends.last_rank)
    first, last = (run.places.process(rank, place.replica, place.twin) for rank in ranks)
    return {0: last, run.plan.problem.num_stages - 1: first}


def _tie(run: RunSpec, stages: Mapping[int, TorchStage], peers: Messenger) -> TiedWeights:
    """This rank's copies of a tied matrix; none where nothing is tied or one stage has both ends."""
    assert run.plan.model is not None
    last = run.plan.problem.num_stages - 1
    copies: dict[int, nn.Parameter] = {}
    if run.plan.model.tied_embeddings and last > 0:
        copies = {n: w for n, stage in stages.items() for w in stage.module.end_weights.values() if w.requires_grad}
    return TiedWeights(copies, last, ends_exchange(run, peers))


def _make_stage(
    run: RunSpec,
    number: int,
    part: StageSlice,
    *,
    parameters: torch.dtype,
    on_chunks: bool,
    mesh: "DeviceMesh | None",
    groups: "Groups | None",
) -> TorchStage:
    assert run.plan.model is not None
    assert run.plan.training is not None
    recompute = run.plan.recompute[number] if run.plan.recompute else "none"
    numerics = numerics_of(run.plan.training, parameters, recompute)
    at = run.plan.model, run.plan.training, part, numerics, run.device
    return make_stage(*at, on_chunks=on_chunks, mesh=mesh, expert=run.plan.expert, groups=groups)


def batches_of(run: RunSpec, replica: int = 0) -> Batches:
    """Batches that `replica` of a training works on; InputError if the text can't be read or does not fit."""
    model, training = trained(run)
    return load_batches(run.plan.data, model, shape_of(run), training.seed, Share(replica, run.num_replicas))
