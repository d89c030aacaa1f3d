"""The model that trainings of several processes per site are tried with."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from farpipe.core.spec.hugging_face import read_model
from farpipe.engine.stages.self_check import shrunk
from forked import WITH_FORKS
from trainings import metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Qwen3 with tied ends, as transformers writes it."""
    folder = tmp_path_factory.mktemp("model")
    config = shrunk(AutoConfig.for_model("qwen3"))
    config.update({"vocab_size": 256, "tie_word_embeddings": True})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return read_model(folder)


@pytest.fixture
def train(tmp_path):
    """`train(name, job, *options)` with the command into a directory of this name; lines of its metrics."""

    def command(name, job, *options):
        path = tmp_path / f"{name}.toml"
        path.write_text(job)
        words = [sys.executable, WITH_FORKS, "-m", "farpipe", "train", path, "--run-dir", tmp_path / name, *options]
        subprocess.run(words, check=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return metrics(tmp_path / name)

    return command
