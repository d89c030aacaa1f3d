"""The executor frees what `step.byte_tables` says, when it says so: no rule of its own, only what autograd lets go."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farpipe.core.step import byte_tables
from farpipe.engine.executor.executor import Executor
from in_process import run_ranks
from small_models import LLAMA, make_batch, make_stages, placed_problem
from strategies import schedules

NUM_STAGES, NUM_MICROBATCHES = 2, 3


class Watched:
    """A stage that notes, after every action, what all stages hold: (activations, put-off weight gradients)."""

    def __init__(self, stage, note):
        self.stage, self.note = stage, note

    def __getattr__(self, name):
        def call(*args, **options):
            found = getattr(self.stage, name)(*args, **options)
            self.note()
            return found

        return call


def held_by_table(schedule, stash_bytes):
    """Bytes held after every action where an activation is one byte and its stash so many."""
    problem = placed_problem((0,) * NUM_STAGES, NUM_MICROBATCHES)
    sizes = {"activation_bytes": 1.0, "weight_stash_bytes": stash_bytes}
    stages = tuple(stage.model_copy(update=sizes) for stage in problem.stages)
    taken, freed = byte_tables(problem.model_copy(update={"stages": stages}))
    return np.cumsum((taken - freed)[schedule.codes]).tolist()


@given(st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_stages_hold_after_every_action_is_what_the_table_says(data):
    schedule = data.draw(schedules(placed_problem((0,) * NUM_STAGES, NUM_MICROBATCHES)))
    stages = dict(enumerate(make_stages(LLAMA, NUM_STAGES, torch.float32)))
    batch = make_batch(LLAMA, NUM_MICROBATCHES)
    seen = []

    def note():
        seen.append((sum(len(s._saved) for s in stages.values()), sum(len(s.store._waiting) for s in stages.values())))

    def work(peers):
        executor = Executor(schedule, {number: Watched(stage, note) for number, stage in stages.items()}, peers)
        for stage in stages.values():
            stage.begin_step(batch)
        executor.run(0)

    run_ranks(1, work)
    assert [saved for saved, _ in seen] == held_by_table(schedule, 0.0)
    assert [saved + waiting for saved, waiting in seen] == held_by_table(schedule, 1.0)
