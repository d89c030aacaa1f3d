"""Options of random plans in Megatron-LM's argument parser and validation; nothing is trained.

    python -m benchmarks.engine.megatron_options 200 [/path/to/Megatron-LM]

Without a checkout the installed megatron-core is asked: 0.19 (Python 3.12) has the parser, 0.16 has not. Needs what its
arguments import: torch, triton, einops, and typing_extensions before Python 3.12.
"""

import contextlib
import importlib
import io
import os
import random
import shlex
import sys
import typing
import warnings
from collections import Counter
from typing import Any

import torch
import typing_extensions

from farpipe import planning
from farpipe.core.errors import FarpipeError
from farpipe.core.spec import parse_job
from farpipe.interop.megatron_flags import megatron_flags
from farpipe.planning import Plan

MODELS = ("llama-3.2-1b", "qwen2.5-7b", "gpt2", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
DEGREES = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (4, 2, 1), (2, 1, 2), (4, 1, 2), (2, 2, 1))
"""Pipeline, tensor, stages on each rank."""
JOB = """
[model]
preset = "{model}"
[training]
sequence_length = 1024
global_batch = {batch}
microbatch_size = 1
zero = {zero}
recompute = "{recompute}"
overlap = {overlap}
matmul = "{matmul}"
precision = "{precision}"
[layout]
pipeline = {pipeline}
tensor = {tensor}
virtual = {virtual}
context = {context}
data = {data}
{replicas}
{expert}
[schedule]
method = "{method}"
[[cluster.sites]]
name = "one"
device = {{ preset = "h100", memory = "9000 GiB" }}
num_devices = {num_devices}
{second}
"""
SECOND = """
[[cluster.sites]]
name = "two"
device = {{ preset = "h100", memory = "9000 GiB" }}
num_devices = {num_devices}
[[cluster.links]]
between = ["one", "two"]
latency = "10 ms"
bandwidth = "100 Gbit/s"
"""


def random_plan(draw: random.Random) -> Plan:
    """A plan of one of several models; FarpipeError where the draw is none."""
    pipeline, tensor, virtual = draw.choice(DEGREES)
    context, model = draw.choice((1, 1, 2)), draw.choice(MODELS)
    num_devices, num_sites = 2 * pipeline * tensor * context, draw.choice((1, 1, 2))
    text = JOB.format(
        model=model,
        batch=draw.choice((16, 64)),
        zero=draw.choice((0, 1, 1, 2, 3)),
        recompute=draw.choice(("none", "full", "selective", "layernorm")),
        overlap=draw.choice(("true", "false")),
        matmul=draw.choice(("same", "same", "fp8")),
        precision=draw.choice(("bf16", "bf16", "fp16")),
        expert=f"expert = {draw.choice((1, 2))}" if model.startswith(("mix", "qwen3", "deep")) else "",
        method="interleaved" if virtual > 1 else "1f1b",
        num_devices=num_devices,
        data=2 * num_sites,
        second=SECOND.format(num_devices=num_devices) if num_sites > 1 else "",
        replicas='replicas = "across"' if num_sites > 1 else "",
        pipeline=pipeline,
        tensor=tensor,
        virtual=virtual,
        context=context,
    )
    return planning.plan(parse_job(text))


def parser_of(checkout: str | None = None) -> Any:
    """The module of arguments of a checkout, or of the installed package, on a machine without a GPU."""
    warnings.simplefilter("ignore")
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    sys.path[:0] = [checkout] if checkout else []
    arguments = importlib.import_module("megatron.training.arguments")
    arguments.get_device_arch_version = lambda: 9
    of_models = importlib.import_module("megatron.core.transformer.transformer_config")
    of_models.is_te_min_version = lambda *_, **__: True  # Transformer Engine needs a GPU to be built
    return arguments


def complaint(arguments: Any, plan: Plan) -> str:
    """What Megatron-LM says against the options of a plan; empty where it takes them, and reads what was meant."""
    words = shlex.split(megatron_flags(plan), comments=True)
    at = plan.layout
    os.environ |= {"WORLD_SIZE": str(at.pipeline * at.tensor * at.context * at.data), "RANK": "0"}
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if (at.tensor > 1 or at.context > 1) and plan.job.training.zero in (0, 1):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as the first line of the options says
    sys.argv = ["pretrain_gpt.py", *words, "--tokenizer-type", "NullTokenizer", "--mock-data", "--no-rope-fusion"]
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            found = arguments.parse_args()
            layers = _layers(arguments, found)
            arguments.validate_args(found)
            importlib.import_module("megatron.training.argument_utils").core_transformer_config_from_args(found)
    except SystemExit:
        return told.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    degrees = ("tensor_model", "pipeline_model", "context", "data")
    read = [*(getattr(found, f"{name}_parallel_size") for name in degrees), found.use_tp_pp_dp_mapping, layers]
    layers_meant = [place.num_layers for place in plan.placements]
    sizes = [at.tensor, at.pipeline, at.context, at.data, bool(at.replica_sites)]
    meant = [*sizes, layers_meant if len(layers_meant) > 1 else layers]
    return "" if read == meant else f"read {read}, meant {meant}"


def _layers(arguments: Any, found: Any) -> list[int]:
    """Layers of every stage, as Megatron-LM's own class reads them."""
    text, pipeline = found.pipeline_model_parallel_layout, found.pipeline_model_parallel_size
    if text is None:
        return []
    layout = arguments.PipelineParallelLayerLayout.from_str(text, pipeline).layout
    num_stages = pipeline * len(layout[0])
    stages = [layout[stage % pipeline][stage // pipeline] for stage in range(num_stages)]
    return [[kind.name for kind in stage].count("decoder") for stage in stages]


def main() -> None:
    """Print how many plans were taken, and each complaint with how often it came."""
    count, checkout = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    arguments, draw = parser_of(checkout), random.Random(1)
    complaints, refused = Counter[str](), Counter[str]()
    while complaints.total() < count:
        try:
            plan = random_plan(draw)
            words = complaint(arguments, plan)
        except FarpipeError as error:
            refused[str(error).splitlines()[0][:100]] += 1
            continue
        complaints[f"{plan.job.model.name}: {words[:200]}" if words else "taken"] += 1
    for counted in (complaints, refused):
        for words, times in counted.most_common():
            print(f"{times:5} {words}")


if __name__ == "__main__":
    main()
