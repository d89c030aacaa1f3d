"""The backend "farpipe" of torch.distributed, for pipelines of any framework. Importing this registers it.

import farpipe.torch
torch.distributed.init_process_group("farpipe")                     # or one group beside others:
pipeline = torch.distributed.new_group(ranks, backend="farpipe")    # pg_options=farpipe.torch.Options(...)

Its pipeline has the arguments of torch's schedules, and runs any order:

schedule = farpipe.torch.Pipeline(stage, n_microbatches, loss_fn, plan="plan.json")

A job of torchtitan has it by ``dataclasses.replace(spec, pipelining_fn=farpipe.torch.titan("plan.json"))``,
and Megatron-Core's schedules send over it with the arguments that ``farpipe.torch.megatron(config)`` returns.

The weights of a training that publishes them, for rollouts elsewhere:

for weights in farpipe.torch.subscribe("publish.json"): weights.load_into(model)
"""

import torch

from farpipe.torch.backend import link_events, register
from farpipe.torch.megatron import megatron
from farpipe.torch.options import Options
from farpipe.torch.pipeline import Pipeline
from farpipe.torch.subscribe import Weights, WeightsSubscription, subscribe
from farpipe.torch.titan import titan
from farpipe.torch.versions import expect_tested

__all__ = ["Options", "Pipeline", "Weights", "WeightsSubscription", "link_events", "megatron", "subscribe", "titan"]

expect_tested("torch", torch.__version__)
register()  # the one room whose import does something, for that is how torch finds backends
