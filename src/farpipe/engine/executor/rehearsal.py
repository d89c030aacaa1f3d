"""A rank's work around its actions in a rehearsal, without a model."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.executor.optimizer import Squares, global_norm
from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.work import ends_exchange, message_rows
from farpipe.engine.replicas.replicas import PipelinePeers, RehearsedSync, ReplicaSync, exposed_transfer
from farpipe.engine.run_spec import RunSpec, transfer_of
from farpipe.engine.stages.stage import PipelineStage, SleepStage


class SleepTrainer:
    """Work of stages that sleep. Everything that a training sends is sent, and steps wait for each other."""

    data_digest = b""
    boundaries: Mapping[int, str] = MappingProxyType({})
    loss = float("nan")

    def __init__(self, run: RunSpec, peers: Peers) -> None:
        self._peers, self._problem = peers, run.plan.problem
        pipeline = PipelinePeers(peers, run.places)
        mine = run.plan.problem.stages_of_rank[pipeline.rank]
        self.stages: dict[int, PipelineStage] = {stage: SleepStage(run.plan.problem, stage) for stage in mine}
        levels = run.places.ring_levels(peers.rank)
        reduced = [stage for stage in mine if run.has_reduce(stage)]
        between_sites = run.plan.problem.between_sites
        rings = levels, peers.rank, between_sites
        gather, reduce = (partial(exposed_transfer, run.plan.problem, kind) for kind in ("gather", "reduce"))
        syncs = {s: RehearsedSync(gather(s), reduce(s), *rings) for s in reduced}
        self._replicas = ReplicaSync(run, peers, syncs)
        exchange = ends_exchange(run, pipeline)
        ends = {0, run.plan.problem.num_stages - 1} if exchange is not None else set()
        self._ends = [(stage, exchange) for stage in mine if stage in ends and exchange is not None]

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        return self._replicas.link_bytes

    def begin_step(self, step: int) -> None:
        self._replicas.begin_step(step)

    def stage_begins(self, step: int, stage: int) -> None:
        self._replicas.stage_begins(step, stage)

    def stage_done(self, step: int, stage: int) -> None:
        self._replicas.stage_done(step, stage)
        for end, exchange in self._ends:
            if end == stage:
                exchange.send(step, stage, torch.zeros(self._exchanged_bytes(stage), dtype=torch.uint8))

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        rows = self.sum_gradients(step)
        return global_norm(self.share_of_norm(), self._peers, step), rows

    def sum_gradients(self, step: int) -> NDArray[np.int64]:
        rows = self._replicas.finish_step()
        messages = [exchange.receive(step, stage) for stage, exchange in self._ends]
        return np.concatenate([rows, message_rows(messages)])

    def share_of_norm(self) -> Squares:
        return Squares()

    def update(self, step: int, norm: float) -> None:
        """Do nothing, as the next three: a rehearsal has no weights."""

    def is_clipped(self, norm: float) -> bool:
        return False

    def keep(self) -> None:
        pass

    def take_back(self) -> None:
        pass

    def _exchanged_bytes(self, stage: int) -> int:
        transfer = transfer_of(self._problem, "exchange", stage)
        assert transfer is not None
        return round(float(self._problem.row(transfer.bytes)[0]))

    def state(self) -> Sequence[Piece]:
        """No pieces: a rehearsal has none."""
        return ()

    def restore(self, num_steps: int) -> None:
        """Do nothing: a rehearsal has no state."""
