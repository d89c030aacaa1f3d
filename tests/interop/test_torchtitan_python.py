"""Configurations of torchtitan in Python as jobs."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.interop.settings import Setting
from farpipe.interop.torchtitan import read_python_of_torchtitan

# In the form of torchtitan/models/llama3/config_registry.py (pytorch/torchtitan, August 2026); the last function is in
# that of earlier modules, with sequences in place of tokens.
PYTHON = """
from torchtitan.trainer import Trainer
from . import model_registry

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192, steps=1000),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4, tensor_parallel_degree=2,
                                      pipeline_parallel_schedule="Interleaved1F1B"),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=FullAC.Config(),
    )

def llama3_8b_mxfp8() -> Trainer.Config:
    config = llama3_8b()
    config.compile = CompileConfig(enable=True, components=["model"])
    config.model_spec = model_registry("8B", converters=[MXFP8LinearConverter.Config(x=config.compile.enable)])
    config.training.steps = 70
    config.parallelism.tensor_parallel_degree = DEGREE
    return config

def llama3_tiny() -> Trainer.Config:
    cfg = Trainer.Config(
        model_spec=model_registry("debugmodel"), training=TrainingConfig(local_batch_size=8, seq_len=512),
        optimizer=OptimizersContainer.Config(param_groups=[ParamGroupConfig(optimizer_kwargs={"lr": 1e-3})]),
    )
    return cfg

def helper():
    raise SystemExit("nothing is run")

raise SystemExit("nothing is run")
"""


def test_configurations_in_python_are_read_by_their_syntax():
    draft = read_python_of_torchtitan(PYTHON, "config_registry.py", "llama3_8b")
    draft.num_devices = Setting(16, "here")
    draft.settle()
    assert draft.not_understood == []
    job = parse_job(draft.to_toml("h100"), "job")
    assert (job.model.name, job.training.sequence_length, job.training.num_steps) == ("llama-3-8b", 8192, 1000)
    assert (job.layout.pipeline, job.layout.tensor, job.layout.virtual, job.layout.data) == (2, 2, 2, 4)
    assert (job.training.microbatch_size, job.training.global_batch) == (2, 2 * 4 * 4)
    assert (job.training.recompute, job.training.learning_rate, job.training.kernels) == ("full", 3e-4, "eager")


def test_a_configuration_in_python_changes_another_one():
    draft = read_python_of_torchtitan(PYTHON, "config_registry.py", "llama3_8b_mxfp8")
    assert (draft.value("training", "num_steps"), draft.value("training", "matmul")) == (70, "mxfp8")
    assert draft.value("layout", "tensor") == 2
    assert draft.shapes == {"tensor_parallel_degree": "tensor_parallel_degree = DEGREE (line 22)"}
    tiny = read_python_of_torchtitan(PYTHON, "config_registry.py", "llama3_tiny")
    assert (tiny.value("training", "sequence_length"), tiny.value("training", "microbatch_size")) == (512, 8)
    assert (tiny.value("training", "learning_rate"), tiny.value("model", "hidden")) == (1e-3, 256)


@pytest.mark.parametrize(
    ("text", "wanted", "complaint"),
    [
        (PYTHON, None, "--set config=NAME: llama3_8b, llama3_8b_mxfp8, llama3_tiny"),
        (PYTHON, "llama3_9b", "no configuration 'llama3_9b'; it has llama3_8b"),
        ("def f(:", None, "not Python"),
        ("x = 1", None, "no function returns a Trainer.Config"),
    ],
)
def test_configurations_in_python_that_are_not_there_are_named(text, wanted, complaint):
    with pytest.raises(InputError, match=complaint):
        read_python_of_torchtitan(text, "config_registry.py", wanted)
