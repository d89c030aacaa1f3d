"""Count the parameters of a model by transformers' class: ``python -m`` with its config.json on stdin."""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from farpipe.engine.stages.hugging_face import build


def count_parameters(config: dict[str, Any]) -> int:
    """Parameters of the causal language model of a config, of which none is made; a tied one counts once."""
    kind, rest = (
        config["model_type"],
        {key: config[key] for key in config.keys() - {"model_type", "quantization_config"}},
    )
    whole: PreTrainedConfig = AutoConfig.for_model(kind, **rest)
    model = build(whole.get_text_config(), torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    print(count_parameters(json.load(sys.stdin)))
