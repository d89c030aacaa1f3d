"""A rank's work around its actions when every step is planned on chunks of sequences: training, or a rehearsal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.rehearsal import SleepTrainer
from farpipe.engine.executor.work import Trainer
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.run_text import documents_of
from farpipe.engine.stages.chunk_stage import ChunkBatch, ChunkStage, chunk_batch
from farpipe.engine.stages.stage import PipelineStage, SleepStage
from farpipe.planning.documents.batches import DocumentBatches, Documents
from farpipe.planning.workload import StepPlan


class ChunkTrainer(Trainer):
    """Stages of a model that is trained on chunks of whole documents."""

    on_chunks = True
    _documents: DocumentBatches | None = None
    _plan: StepPlan
    evaluation_plans: Sequence[StepPlan] = ()
    """Plans of the held-out batches."""

    def _open_data(self, run: RunSpec) -> None:
        self._documents = documents_of(run)

    @property
    def data_digest(self) -> bytes:
        return b"" if self._documents is None else self._documents.digest

    def lengths(self, step: int) -> NDArray[np.int64]:
        """Tokens of every sequence of `step`; asked of rank 0 only."""
        assert self._documents is not None, "rank 0 has the first stage"
        return self._documents.lengths(step)

    def take_plan(self, plan: StepPlan) -> None:
        """Take the plan of the next step, before `begin_step`."""
        self._plan = plan

    @property
    def held_bytes(self) -> int:
        """The most that the stages have held in this step."""
        return sum(stage.held.peak for stage in self.torch_stages.values() if isinstance(stage, ChunkStage))

    def held_out_lengths(self, index: int) -> NDArray[np.int64]:
        """Tokens of every sequence of held-out batch `index`; asked of rank 0 only."""
        assert self._documents is not None, "rank 0 has the first stage"
        return self._documents.held_out_lengths(index)

    def begin_step(self, step: int) -> None:
        self._replicas.begin_step(step)
        self._begin(self._plan, None if self._documents is None else self._documents.batch(step))

    def begin_evaluation(self, index: int) -> int:
        batch = None if self._documents is None else self._documents.held_out_batch(index)
        return self._begin(self.evaluation_plans[index], batch)

    def _begin(self, plan: StepPlan, documents: Documents | None) -> int:
        """Give the stages the chunks of a batch; its tokens that count, 0 on a rank without text."""
        batch = ChunkBatch(plan.chunks, (), (), groups=plan.groups)
        if documents is not None:
            marks = None if documents.counted is None else [torch.from_numpy(one) for one in documents.counted]
            tokens = [torch.from_numpy(one) for one in documents.tokens]
            extra = {part.sequence for chunk in plan.chunks for part in chunk.slices} - {*range(len(tokens))}
            tokens += [tokens[0][:1]] * len(extra)  # those of processes without documents
            batch = replace(chunk_batch(plan.chunks, tokens, marks), groups=plan.groups)
        for number, stage in self.torch_stages.items():
            assert isinstance(stage, ChunkStage)
            stage.begin_chunks(batch, plan.recomputed[number].tolist(), keeps_attention=plan.keeps_attention)
        return 0 if documents is None else batch.num_target_tokens


class ChunkSleeper(SleepTrainer):
    """Stages that sleep as long as the chunks of each step are predicted to take."""

    def __init__(self, run: RunSpec, peers: Peers) -> None:
        super().__init__(run, peers)
        assert run.chunk_costs is not None
        self._costs = run.chunk_costs
        self._documents = documents_of(run) if peers.rank == 0 else None

    def lengths(self, step: int) -> NDArray[np.int64]:
        """Tokens of every sequence of `step`; asked of rank 0 only."""
        assert self._documents is not None
        return self._documents.lengths(step)

    def take_plan(self, plan: StepPlan) -> None:
        """Take the plan of the next step, before `begin_step`."""
        problem = plan.problem(self._costs)
        stages: Mapping[int, PipelineStage] = {stage: SleepStage(problem, stage) for stage in self.stages}
        self.stages = dict(stages)
