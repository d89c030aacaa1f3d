"""Rollouts beside a training: the newest weights, then ``generate``, until the training has ended."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import farpipe.torch

prompts, model = torch.tensor([list(b"def "), list(b"for ")]), None
with farpipe.torch.subscribe(sys.argv[1], site="rollouts") as versions:
    for weights in versions:
        if model is None:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**weights.config))
        weights.load_into(model)
        tokens = model.generate(prompts, max_new_tokens=24, do_sample=True, pad_token_id=0)
        print(f"step {weights.step}, {weights.wire_bytes:,} of {weights.whole_bytes:,} bytes came:", flush=True)
        for row in tokens.tolist():
            print("   ", bytes(row), flush=True)
