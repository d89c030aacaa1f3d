"""Plans with whole pipelines at every site, as options of Megatron-LM and torchtitan: who is where, what crosses."""

import pytest

from farpipe import planning
from farpipe.interop.megatron_flags import megatron_flags
from farpipe.interop.nemo_config import nemo_config
from farpipe.interop.torchtitan_config import torchtitan_config, torchtitan_flags
from planning.planner.jobs import TRAINING
from planning.planner.test_replicas_across import across

INSTANCES = "--num-distributed-optimizer-instances 2"


def plan(data, zero=1):
    return planning.plan(across(data=data, training=TRAINING.model_copy(update={"zero": zero})))


def crossing(text):
    """How many times the planned bytes cross, as a comment says."""
    notes = [line for line in text.splitlines() if "between sites" in line]
    return float(notes[0].split(" sends ")[1].split()[0]) if notes else 1.0


@pytest.mark.parametrize(
    ("data", "zero", "times", "is_whole"),
    [
        (2, 0, 1.0, False),  # a ring over one replica of each site is what the plan has
        (2, 1, 1.0, False),
        (4, 0, 1.5, False),  # 2 x 3/4 of the gradients in place of 2 x 1/2
        (4, 1, 1.3, True),  # gradients of 4 bytes there and back, in place of these and weights of 2
    ],
)
def test_megatron_lm_numbers_one_site_after_the_other(data, zero, times, is_whole):
    found = plan(data, zero)
    text = megatron_flags(found)
    assert f"# Ranks by site: a 0-{data - 1}, b {data}-{2 * data - 1}; " in text
    assert "Only sums of gradients cross." in text
    assert "# a to b: " in text
    assert "--use-tp-pp-dp-mapping" in text.splitlines()
    assert (INSTANCES in text.splitlines()) == is_whole
    assert crossing(text) == times
    assert ("num_distributed_optimizer_instances: 2" in nemo_config(found)) == is_whole
    assert "dist:\n  use_tp_pp_dp_mapping: true\n" in nemo_config(found)


def test_an_optimizer_at_every_site_needs_memory_for_it():
    found = plan(4)
    ranks = tuple(
        rank.model_copy(update={"memory_bytes": 1.001 * peak})
        for rank, peak in zip(found.problem.ranks, found.prediction.peak_memory_bytes, strict=True)
    )
    text = megatron_flags(found.model_copy(update={"problem": found.problem.model_copy(update={"ranks": ranks})}))
    assert INSTANCES not in text
    assert crossing(text) == 1.5  # both parts of the ring are 3/4 in place of 1/2


@pytest.mark.parametrize(
    ("data", "zero", "replicate", "shard", "ranks", "times"),
    [
        (2, 1, 1, 2, "a 0, b 1, a 2, b 3", 1.0),
        (2, 3, 1, 2, "a 0, b 1, a 2, b 3", 1.0),
        (4, 1, 2, 2, "a 0-1, b 2-3, a 4-5, b 6-7", 1.3),
        (4, 3, 2, 2, "a 0-1, b 2-3, a 4-5, b 6-7", 1.0),
    ],
)
def test_torchtitan_divides_inside_a_site(data, zero, replicate, shard, ranks, times):
    found = plan(data, zero)
    flags, tables = torchtitan_flags(found), torchtitan_config(found)
    wanted = {"replicate": replicate, "shard": shard}
    for kind, degree in wanted.items():
        assert f"data_parallel_{kind}_degree = {degree}" in tables
        assert (f"--parallelism.data_parallel_{kind}_degree {degree}" in flags) == (kind == "shard" or degree > 1)
    for text in (flags, tables):
        assert f"# Ranks by site: {ranks}; " in text
        assert crossing(text) == times
    always = zero == 3 and replicate > 1  # weights are not gathered from the other site in every microbatch
    assert ("fsdp_reshard_after_forward always" in flags) == always


def test_without_a_pipeline_torchtitan_sums_in_every_microbatch():
    training = TRAINING.model_copy(update={"zero": 1, "microbatch_size": 2})
    found = planning.plan(across(data=2, pipeline=1, training=training))
    assert crossing(torchtitan_flags(found)) == found.layout.num_microbatches > 1
