"""One rank of a pipelined step over the real transport; leaves its loss and gradients in a file.

Run by test_run.py: ``gradient_rank.py SCHEDULE.json FOLDER``.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from farpipe.core.step import Schedule
from farpipe.engine.executor.executor import Executor, stage_ranks
from farpipe.engine.executor.peers import TensorPeers
from farpipe.engine.rendezvous import rendezvous_from_env
from farpipe.engine.transport import TransportConfig, connect
from small_models import LLAMA, make_batch, make_stages


def main():
    schedule, folder = Schedule.load(sys.argv[1]), Path(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), stage_ranks(schedule)
    stages = dict(enumerate(make_stages(LLAMA, len(ranks), torch.float64)))
    mine = {stage: stages[stage] for stage in stages if ranks[stage] == rank}
    with connect(rank, len(schedule.ranks), TransportConfig(), rendezvous_from_env()) as transport:
        for stage in mine.values():
            stage.begin_step(make_batch(LLAMA, schedule.num_microbatches))
        Executor(schedule, mine, TensorPeers(transport)).run(0)
    gradients = {name: p.grad.numpy() for stage in mine.values() for name, p in stage.module.named_parameters()}
    np.savez(folder / f"rank-{rank}.npz", loss=sum(stage.loss for stage in mine.values()), **gradients)


if __name__ == "__main__":
    main()
