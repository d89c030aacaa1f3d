"""Context parallelism: a ring of keys and values, or tokens exchanged for heads, whichever is faster."""

import pytest
from pydantic import ValidationError

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, LocalLink, Training
from farpipe.interop.megatron_flags import megatron_flags
from farpipe.interop.torchtitan_config import torchtitan_config
from farpipe.planning.planner.candidates import context_degrees
from planning.planner.every_layout import candidates
from planning.planner.jobs import job, site, why

DEGREES = {"pipeline": 1, "data": 1, "tensor": 1, "num_microbatches": 8}


def long_job(length=1024, rate=3e11, **pins):
    place = site("a").model_copy(update={"machine_link": LocalLink(latency_s=5e-6, bandwidth_bytes_per_s=rate)})
    asked = Training(sequence_length=length, global_batch=8, zero=0, sequence_parallel=False)
    return job([place], training=asked, schedule="1f1b", **(DEGREES | {"context": 4} | pins))


@pytest.mark.parametrize(("length", "rate"), [(1024, 3e11), (32768, 3e11), (1024, 1e9), (32768, 1e9)])
def test_the_planner_takes_the_faster_method(length, rate):
    steps = {
        how: planning.plan(long_job(length, rate, context_exchange=how)).prediction.step_s
        for how in ("ring", "ulysses")
    }
    plan = planning.plan(long_job(length, rate))
    assert plan.prediction.step_s == min(steps.values())
    assert steps[plan.layout.context_exchange] == plan.prediction.step_s


def test_the_planner_chooses_how_many_devices_share_a_sequence():
    """Where a step has fewer sequences than the cluster has devices, half of them would idle or layers be cut small."""
    asked = Training(sequence_length=32768, global_batch=2)
    free, alone = (planning.plan(job([site("a", 8)], training=asked, **pins)) for pins in ({}, {"context": 1}))
    assert free.layout.context > 1
    assert free.prediction.step_s < alone.prediction.step_s


def test_short_sequences_are_shared_only_where_there_are_too_few_of_them():
    few = job([site("a", 8)], training=Training(sequence_length=4096, global_batch=2))
    many = job([site("a", 8)], training=Training(sequence_length=4096, global_batch=8))
    assert context_degrees(few, 8) == [1, 2, 4]
    assert context_degrees(many, 8) == [1]
    assert context_degrees(job([site("a", 8)], training=few.training, context=2), 8) == [2]


def test_a_long_sequence_hides_the_ring_and_otherwise_fewest_bytes_win():
    assert planning.plan(long_job(32768)).layout.context_exchange == "ring"
    few = long_job(256, 1e8, context=2)  # 4 key heads of 16: 3 x 8 heads go round, 2 x 40 / 2 are exchanged
    many = few.model_copy(update={"model": few.model.model_copy(update={"num_kv_heads": 16})})  # 3 x 32 and 2 x 64 / 2
    assert planning.plan(few).layout.context_exchange == "ring"
    assert planning.plan(many).layout.context_exchange == "ulysses"


def test_heads_that_cannot_be_divided_leave_the_ring():
    wide = Cluster(sites=(site("a", 8),))
    methods = {
        size: {
            c.layout.context_exchange for c in candidates(long_job(context=size).model_copy(update={"cluster": wide}))
        }
        for size in (4, 8)
    }
    assert methods == {4: {"ring", "ulysses"}, 8: {"ring"}}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"context": 1, "context_exchange": "ring"}, "no devices share a sequence"),
        ({"context": 4, "tensor": 4, "context_exchange": "ulysses"}, "16 heads and 4 key heads"),
    ],
)
def test_a_method_that_cannot_be_is_an_input_error(pins, message):
    with pytest.raises(ValidationError, match=message):
        long_job(**pins)


def test_the_method_is_told_and_exported():
    ring, ulysses = (planning.plan(long_job(context_exchange=how)) for how in ("ring", "ulysses"))
    assert "each sequence over 4 devices (ulysses)" in str(ulysses)
    assert "--cp-comm-type a2a" in megatron_flags(ulysses)
    assert "--cp-comm-type p2p" in megatron_flags(ring)
    assert "context_parallel_degree = 4" in torchtitan_config(ring)
    with pytest.raises(InputError, match="torchtitan has no Ulysses"):
        torchtitan_config(ulysses)
    assert type(ulysses).from_body(ulysses.to_body(), "plan").layout == ulysses.layout


def test_attention_over_a_window_is_never_planned_on_a_ring():
    whole = long_job(32768)
    local = whole.model_copy(update={"model": whole.model.model_copy(update={"sliding_window": 1024})})
    plan = planning.plan(local)
    assert (planning.plan(whole).layout.context_exchange, plan.layout.context_exchange) == ("ring", "ulysses")
    assert plan.prediction.step_s < planning.plan(long_job(32768, context_exchange="ulysses")).prediction.step_s
    assert "sliding windows" in why(local).uncompared
    for pins, message in (({"context_exchange": "ring"}, "no ring is known"), ({"tensor": 4}, "only method for win")):
        with pytest.raises(ValidationError, match=message):
            type(local).model_validate(dict(local) | {"layout": local.layout.model_copy(update=pins)})
