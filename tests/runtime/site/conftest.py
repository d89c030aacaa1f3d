"""The model that trainings of several processes per site are tried with."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from farpipe.runtime.stages.self_check import shrunk
from farpipe.spec.hugging_face import read_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Qwen3 with tied ends, as transformers writes it."""
    folder = tmp_path_factory.mktemp("model")
    config = shrunk(AutoConfig.for_model("qwen3"))
    config.update({"vocab_size": 256, "tie_word_embeddings": True})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return read_model(folder)
