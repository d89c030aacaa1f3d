"""The benchmark's lower bound of a step: below plans of small batches, above work alone where memory is short."""

import numpy as np
import pytest

from benchmarks.sequences.least_step import least_step
from benchmarks.sequences.sequences_paper import NUM_DEVICES, a800, models
from benchmarks.sequences.sequences_rivals import work_s
from chosen import chosen
from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Cluster, Job, Pins, Training
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.workload import BatchOptions

MODEL = models()["30b"]
FREE = BatchOptions()
LAYOUTS = [
    (Pins(pipeline=1), 3, FREE),
    (Pins(pipeline=1, data=1), 3, BatchOptions(num_slices=3)),
    (Pins(pipeline=16, tensor=2), 1, FREE),
    (Pins(pipeline=8, tensor=4, data=1), 1, BatchOptions(equal="tokens")),
    (Pins(pipeline=30, tensor=1, data=1), 1, BatchOptions(checkpointing="uniform")),
]


def steps(sizes):
    for pins, zero, options in LAYOUTS:
        training = Training(sequence_length=262144, global_batch=64, grad_reduce_in_fp32=False).decided(zero)
        job = Job(model=MODEL, training=training, cluster=Cluster(sites=(a800(),)), layout=pins)
        try:
            yield plan_batch(job, sizes, options).step_s
        except FarpipeError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("longest", chosen([[262_144], [150_000, 120_000], [4_000] * 20], 1, 2))
def test_no_plan_is_faster_than_the_bound(longest):
    sizes = np.array([*longest, *range(400, 8_400, 1_000)])
    found = list(steps(sizes))
    assert len(found) >= 3
    assert min(found) >= least_step(MODEL, sizes)


def test_memory_makes_long_documents_dearer_than_their_work():
    sizes = np.array([262_144] * 8)
    work = work_s(MODEL, sizes)
    assert least_step(MODEL, sizes) > 1.02 * work
    assert least_step(MODEL, sizes, most_stages=1) > least_step(MODEL, sizes)
    short = np.array([8_000] * NUM_DEVICES)
    assert work_s(MODEL, short) < least_step(MODEL, short) < 1.03 * work_s(MODEL, short)
