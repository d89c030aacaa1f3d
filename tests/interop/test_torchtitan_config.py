"""Plans as torchtitan's settings: how replicas divide the state, and what would not start or train wrongly there."""

import importlib.util
import sys
import types

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import Training
from farpipe.interop.megatron_flags import megatron_flags
from farpipe.interop.torchtitan_config import torchtitan_config
from planning.planner.jobs import device, job, site

RATES = device().model_copy(update={"peak_flops": {"bf16": 312e12, "fp16": 312e12, "fp8": 624e12, "fp32": 20e12}})

PIPELINE = {"pipeline": 2, "data": 4, "tensor": 2, "virtual": 1}
ALONE = {"pipeline": 1, "data": 4, "tensor": 1}


def plan(zero=1, schedule="1f1b", training=None, **pins):
    asked = {"sequence_length": 1024, "global_batch": 16, "microbatch_size": 1, "zero": zero} | (training or {})
    return planning.plan(job([site("a", 16, RATES)], (), Training(**asked), schedule, **pins))


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Settings and degrees as torchtitan's own parser and ParallelDims take them."""
    found = importlib.util.find_spec("torchtitan")
    pytest.importorskip("tyro", reason="torchtitan's parser needs it")
    if found is None:
        pytest.skip("torchtitan is not installed")
    package = types.ModuleType("torchtitan")  # its own __init__ imports kernels, which need a GPU's compiler
    package.__path__ = [*found.submodule_search_locations]
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    def parse(found_plan):
        file = tmp_path / "torchtitan.toml"
        file.write_text(torchtitan_config(found_plan))
        config = ConfigManager().parse_args([f"--job.config_file={file}"])
        at = config.parallelism
        degrees = ParallelDims(
            dp_replicate=at.data_parallel_replicate_degree,
            dp_shard=at.data_parallel_shard_degree,
            cp=at.context_parallel_degree,
            tp=at.tensor_parallel_degree,
            pp=at.pipeline_parallel_degree,
            ep=at.expert_parallel_degree,
            etp=at.expert_tensor_parallel_degree,
            world_size=sum(found_plan.devices.values()),
        )
        return config, degrees

    return parse


def starts(config, degrees):
    """What torchtitan 0.2 demands when it starts (parallelize.py, pipeline_parallel.py, train.py)."""
    ddp = degrees.dp_replicate_enabled and not degrees.fsdp_enabled
    assert not ddp or degrees.world_size == degrees.dp_replicate, "DDP has not supported > 1D parallelism"
    assert config.training.seq_len % degrees.seq_len_divisor == 0
    replicas = degrees.dp_replicate * degrees.dp_shard
    accumulated = config.training.global_batch_size / (config.training.local_batch_size * replicas)
    assert accumulated == int(accumulated)
    assert not degrees.pp_enabled or accumulated == 1
    return accumulated


@pytest.mark.slow  # the parser is imported
@pytest.mark.parametrize(
    ("zero", "pins", "replicate", "shard", "reshard"),
    [
        (0, PIPELINE, 1, 4, "never"),
        (0, ALONE, 4, 1, "default"),
        (0, {"pipeline": 1, "data": 2, "tensor": 1, "context": 2, "context_exchange": "ring"}, 1, 2, "never"),
        (1, PIPELINE, 1, 4, "never"),
        (1, ALONE, 1, 4, "never"),
        (2, ALONE, 1, 4, "never"),
        (3, PIPELINE, 1, 4, "always"),
        (3, ALONE, 1, 4, "always"),
    ],
)
def test_torchtitan_reads_the_file_and_divides_what_the_plan_divides(read, zero, pins, replicate, shard, reshard):
    found = plan(zero, **pins)
    config, degrees = read(found)
    assert (degrees.dp_replicate, degrees.dp_shard) == (replicate, shard)
    assert config.parallelism.fsdp_reshard_after_forward == reshard
    assert starts(config, degrees) == (1 if degrees.pp_enabled else found.layout.num_microbatches)


def test_split_backwards_are_written_where_weights_stay_whole_and_refused_where_not():
    assert 'reshard_after_forward = "never"' in torchtitan_config(plan(1, "zb-h1", **PIPELINE))
    with pytest.raises(InputError, match=r"loses gradients .*zb-h1.*training.zero = 1.* takes [\d.]+ ms instead of"):
        torchtitan_config(plan(3, "zb-h1", **PIPELINE))


def test_weights_that_stay_whole_in_torchs_pipeline_are_told_or_refused():
    found = plan(3, **PIPELINE)
    # of a device's parameters, 2 + 4 bytes without the quarter that the plan counts
    assert "Not as planned: torch's pipeline keeps weights and gradients whole between backwards: up to" in (
        torchtitan_config(found)
    )
    tight = [
        rank.model_copy(update={"memory_bytes": peak})
        for rank, peak in zip(found.problem.ranks, found.prediction.peak_memory_bytes, strict=True)
    ]
    full = found.model_copy(update={"problem": found.problem.model_copy(update={"ranks": tuple(tight)})})
    with pytest.raises(InputError, match=r"rank 0 then needs .* of .*; plan again with training.zero = 1"):
        torchtitan_config(full)


@pytest.mark.parametrize(
    ("training", "pins", "message"),
    [
        ({"precision": "fp16"}, {}, 'no fp16; plan again with training.precision = "bf16"'),
        ({"sequence_length": 1022}, {"tensor": 2}, "2 x tensor x context = 4 parts; training.sequence_length is 1022"),
    ],
)
def test_what_torchtitan_refuses_when_it_starts_is_refused_before(training, pins, message):
    with pytest.raises(InputError, match=message):
        torchtitan_config(plan(training=training, **{"pipeline": 1, "data": 1} | pins))


def test_scales_for_rows_are_a_recipe_of_torchtitan_and_nothing_of_megatron():
    found = plan(training={"precision": "bf16", "matmul": "fp8_rowwise"}, **ALONE)
    text = torchtitan_config(found)
    assert 'converters = ["quantize.linear.float8"]' in text
    assert '[quantize.linear.float8]\nrecipe_name = "rowwise"' in text
    with pytest.raises(InputError, match=r'no scale for every row; plan again with training.matmul = "fp8"'):
        megatron_flags(found)


def test_what_torchtitan_does_otherwise_is_told():
    assert "# Not as planned: without FSDP torchtitan computes in float32" in torchtitan_config(
        plan(pipeline=2, data=1, tensor=1)
    )
    assert "# Not as planned: torchtitan gathers weights and reduces gradients in every" in (
        torchtitan_config(plan(**ALONE, num_microbatches=4))
    )
    assert "beside other degrees torchtitan has no DDP" in torchtitan_config(plan(0, **PIPELINE))
    assert "Not as planned" not in torchtitan_config(plan(**PIPELINE))
    narrow = plan(training={"precision": "bf16", "grad_reduce_in_fp32": False}, **PIPELINE)
    assert "# Not as planned: torchtitan reduces gradients in float32" in torchtitan_config(narrow)
    assert 'mixed_precision_param = "float32"' in torchtitan_config(plan(training={"precision": "fp32"}, **PIPELINE))
