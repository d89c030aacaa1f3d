"""A log is held against a job of its own sizes only; whatever both say is compared."""

import json

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.interop.log_sizes import sizes_in
from farpipe.interop.logs import read_log_of
from interop.test_logs import megatron
from job_files import EIGHT_LAYERS

JOB = (
    EIGHT_LAYERS
    + """
[training]
sequence_length = 2048
global_batch = 64
microbatch_size = 2

[layout]
tensor = 2
pipeline = 2
context = 1
data = 4

[[cluster.sites]]
name = "zurich"
device = "h100"
num_devices = 16
"""
)
STEPS = "".join(megatron(step, 900.0, 64) + "\n" for step in range(1, 14))
FIRST = "using world size: 16, data-parallel size: 4, context-parallel size: 1, tensor-model-parallel size: 2, "
FIRST += "pipeline-model-parallel size: 2"
ARGUMENTS = """
  context_parallel_size ........................... 1
  data_parallel_size .............................. 4
  fp8 ............................................. None
  hidden_size ..................................... 1024
  micro_batch_size ................................ 2
  num_attention_heads ............................. 16
  num_layers ...................................... 8
  params_dtype .................................... torch.bfloat16
  pipeline_model_parallel_size .................... 2
  seq_length ...................................... 2048
  tensor_model_parallel_size ...................... 2
  world_size ...................................... 16
"""


def read(tmp_path, head, job=JOB):
    path = tmp_path / "train.log"
    path.write_text(f"{head}\n{STEPS}")
    return read_log_of(path, parse_job(job, "job.toml"))


def test_a_log_of_the_job_is_read(tmp_path):
    sizes = read(tmp_path, FIRST + ARGUMENTS).sizes
    assert (sizes["num_devices"], sizes["tensor"], sizes["precision"], sizes["matmul"]) == (16, 2, "bf16", "same")


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("using world size: 128, data-parallel size: 4", "num_devices: 128 in the log, 16 in the job"),
        (FIRST.replace("tensor-model-parallel size: 2", "tensor-model-parallel size: 4"), "tensor: 4 in the log, 2 in"),
        ("using world size: 16, pipeline-model-parallel size: 4", "pipeline: 4 in the log, 2 in the job"),
        (
            ARGUMENTS.replace("data_parallel_size .............................. 4", "data_parallel_size ..... 8"),
            "data: 8",
        ),
        ("  context_parallel_size ........ 2", "context: 2 in the log, 1 in the job"),
        ("  params_dtype ............ torch.float16", "precision: fp16 in the log, bf16 in the job"),
        ("  fp8 ...................... hybrid", "matmul: fp8 in the log, same in the job"),
        ("  micro_batch_size ......... 1", "microbatch_size: 1 in the log, 2 in the job"),
        ("  num_layers ............... 32", "num_layers: 32 in the log, 8 in the job"),
        ("  num_attention_heads ...... 32", "num_heads: 32 in the log, 16 in the job"),
        ("  world_size ............... 64", "num_devices: 64 in the log, 16 in the job"),
        (" Total number of parameters in billions: 70.55", "num_params: 70550000000 in the log"),
        ("Model llama3 8B size: 8,030,261,248 total parameters", "num_params: 8030261248 in the log"),
        ("Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [2, 1, 8]", "tensor: 8 in the log, 2 in the job"),
    ],
)
def test_every_size_that_both_have_is_compared(tmp_path, head, told):
    with pytest.raises(InputError, match="the log is of another training") as found:
        read(tmp_path, head)
    assert told in str(found.value)


def test_all_differences_are_named_at_once(tmp_path):
    with pytest.raises(InputError) as found:
        read(tmp_path, "using world size: 128, tensor-model-parallel size: 8\n  params_dtype .... torch.float32")
    assert str(found.value).count(" in the log, ") == 3


def test_replicas_and_shards_of_torchtitan_are_data():
    line = "Building device mesh with parallelism: pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=4, etp=1"
    assert sizes_in(line) == {"tensor": 2, "pipeline": 2, "context": 1, "data": 8, "expert": 4}


def test_the_trainer_of_transformers_tells_its_batch():
    assert sizes_in("  Total train batch size (w. parallel, distributed & accumulation) = 32") == {"global_batch": 32}


def check(farpipe, tmp_path, job, head):
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "train.log").write_text(f"{head}\n{STEPS}")
    return farpipe("check", "job.toml", "--log", "train.log", "--json", "--tolerance", "99")


def test_check_names_what_differs_and_no_error_of_the_prediction(farpipe, tmp_path):
    done = check(farpipe, tmp_path, JOB, "using world size: 128")
    assert (done.returncode, "can't be compared" in done.stderr) == (3, True)
    found = json.loads(done.stdout)
    assert not found["is_comparable"]
    assert found["differences"] == {"num_devices": {"log": 128, "job": 16}}
    assert "%" not in done.stderr


def test_degrees_that_the_job_leaves_open_are_the_log_s(farpipe, tmp_path):
    open_job = JOB.replace("tensor = 2\npipeline = 2\ncontext = 1\ndata = 4\n", "").replace("microbatch_size = 2\n", "")
    assert planning.plan(parse_job(open_job, "job.toml")).layout.pipeline == 1
    done = check(farpipe, tmp_path, open_job, FIRST + ARGUMENTS)
    found = json.loads(done.stdout)
    assert found["is_comparable"]
    assert any("taken from the log: layout.tensor = 2, layout.pipeline = 2" in note for note in found["notes"])
    assert found["predicted_step_s"] == json.loads(check(farpipe, tmp_path, JOB, "").stdout)["predicted_step_s"]


def test_a_run_that_left_a_site_out_is_compared_with_its_job(farpipe, tmp_path):
    job = JOB.replace("tensor = 2\npipeline = 2\ncontext = 1\ndata = 4\n", 'pipeline = 1\nreplicas = "inside"\n')
    job += JOB[JOB.index("[[cluster") :].replace("zurich", "lugano").replace("= 16", "= 8")
    job += '[[cluster.links]]\nbetween = ["zurich", "lugano"]\nlatency = "20 ms"\nbandwidth = "10 Gbit/s"\n'
    plan = planning.plan(parse_job(job, "job.toml"))
    assert sum(plan.devices.values()) == 16
    plan.save(tmp_path / "plan.json")
    lines = [json.dumps({"step": step, "step_s": 1.0, "attempt": 0}) for step in range(12)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "job.toml").write_text(job)
    done = farpipe("check", "job.toml", "--log", tmp_path, "--json", "--tolerance", "99")
    assert json.loads(done.stdout)["predicted_step_s"] == plan.prediction.step_s


def test_a_run_of_farpipe_is_known_by_its_plan(farpipe, tmp_path):
    planning.plan(parse_job(JOB, "job.toml")).save(tmp_path / "plan.json")
    lines = [json.dumps({"step": step, "step_s": 1.0, "attempt": 0}) for step in range(12)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    job = JOB.replace("tensor = 2\npipeline = 2", "tensor = 4\npipeline = 1")
    (tmp_path / "job.toml").write_text(job)
    done = farpipe("check", "job.toml", "--log", tmp_path)
    assert "tensor: 2 in the log, 4 in the job" in done.stderr
