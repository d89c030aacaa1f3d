"""Models with experts of transformers in stages: largest difference of a gradient from the whole model's in float64,
and CPU time of F, I and W. Prints JSON.

    python -m benchmarks.engine.expert_gradients [--processes 2]

Small models of each class (six layers of width 32; experts balanced by transformers' loss with a coefficient of 0.5,
where the class has one) on four microbatches: all forwards, then I and W of each in reverse. `worst`: relative to the
largest element of the gradient; `of`: whose. CPU milliseconds are of one microbatch of 256 tokens in float32 in a stage
of four layers of width 256 with 8 experts of width 512, medians of nine.

`--processes` 2 or 4: both stages on as many processes of a site instead, which share experts, in each of LAYOUTS. Every
second class has all recomputed. GLM-4.5 is there for tensor parallelism; its router multiplies in float32.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

if __package__ is None or __package__ == "":  # a process is started by its path
    sys.path[0] = str(Path(__file__).parents[2])

CLASSES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")
BY_TENSOR, BY_CONTEXT = ("mixtral", "qwen3_moe", "glm4_moe"), ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
CUTS = ((2, "none"), (4, "full"))
LAYOUTS = {
    2: {"data 2, expert 2": (2, 1, 1, 2), "tensor 2, expert 2": (1, 2, 1, 2), "context 2, expert 2": (1, 1, 2, 2)},
    4: {
        "data 4, expert 2": (4, 1, 1, 2),
        "data 4, expert 4": (4, 1, 1, 4),
        "data 2, tensor 2, expert 4": (2, 2, 1, 4),
        "context 2, tensor 2, expert 4": (1, 2, 2, 4),
    },
}
"""By number of processes and in words: data, tensor, context, expert."""
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
WITHOUT_LOSS = ("deepseek_v3", "glm4_moe")
WIDE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
}
NUM_SKIPPED, NUM_REPEATS = 1, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=LAYOUTS)
    parser.add_argument("--one-of", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if given.one_of:
        run_process(given.processes)
    elif given.processes:
        from farpipe.engine.launch.launcher import launch

        words = [sys.executable, str(Path(__file__).resolve()), "--processes", str(given.processes), "--one-of"]
        print(json.dumps({"layouts": launch(lambda number: words, given.processes)[0]}, indent=1))
    else:
        print(json.dumps({"classes": [row for name in CLASSES for row in rows(name)]}, indent=1))


def run_process(num_processes: int) -> None:
    """One of the processes of a site; leaves a row for each class and layout."""
    import torch.distributed as dist

    from farpipe.engine.launch.reports import leave_result
    from farpipe.engine.rendezvous import store_from_env
    from farpipe.engine.site.mesh import join_site

    store = store_from_env().torch_store
    join_site(store, "zurich", int(os.environ["RANK"]), num_processes, device="cpu", timeout_s=60)
    found = []
    for words, degrees in LAYOUTS[num_processes].items():
        able = [name for name in CLASSES if degrees[1] == 1 or name in BY_TENSOR]
        for place, name in enumerate(name for name in able if degrees[2] == 1 or name in BY_CONTEXT):
            recompute = ("none", "full")[place % 2]
            worst, of = shared_difference(name, degrees, recompute)
            found.append({"class": name, "layout": words, "recompute": recompute, "worst": worst, "of": of})
    leave_result(found)
    dist.destroy_process_group()


def shared_difference(name: str, degrees: tuple[int, int, int, int], recompute: Any) -> tuple[float, str]:
    """The largest relative difference of a gradient on these processes, and whose it is."""
    import copy

    import torch

    from farpipe.engine.data.batches import Batch
    from farpipe.engine.site.mesh import DATA, stage_mesh
    from farpipe.engine.site.sharding import StepReduction
    from farpipe.engine.site.twin_stage import twin_stage
    from farpipe.engine.stages import self_check
    from farpipe.engine.stages.balanced_stage import torch_stage
    from farpipe.engine.stages.divided_stages import divide_module, twins_in
    from farpipe.engine.stages.hugging_face import HuggingFaceSlice
    from farpipe.engine.stages.slices import slices
    from farpipe.engine.stages.stage import Boundary

    torch.manual_seed(0)
    data, tensor, context, expert = degrees
    mesh = stage_mesh("cpu", data=data, tensor=tensor, context=context)
    whole = self_check.random_model(config_of(name, tensor * context), torch.float64)
    every = [torch.randint(64, (4, 2, 16)) for _ in range(data)]
    batches = [Batch(tokens, tokens.roll(-1, -1)) for tokens in every]
    boundary, twins, share = Boundary((2, 16, whole.config.hidden_size), whole.dtype), twins_in(mesh), 1 / 4
    stages, reductions = [], []
    for part in slices(tuple(pairwise((0, 3, 6)))):
        module = HuggingFaceSlice(copy.deepcopy(whole), part, recompute)
        divide_module(module, mesh, torch.float64, expert=expert)
        shared = None if twins is None else twin_stage(module, boundary, twins, share=share)
        stages.append(shared or torch_stage(module, boundary, share=share))
        reductions.append(StepReduction(module, stages[-1].store))
    for stage, reduction in zip(stages, reductions, strict=True):
        stage.begin_step(batches[mesh[DATA].get_local_rank()])
        reduction.begin()
    self_check.run_in_turn(stages, 4)
    for reduction in reductions:
        reduction.end()
    for batch in batches:
        self_check.reference_loss(whole, batch)
    return self_check.worst_error(stages, whole, 1.0, 1.0)


def config_of(name: str, num_twins: int = 1) -> Any:
    """A small model of this class, balanced by a loss where it has one."""
    from transformers import AutoConfig

    from farpipe.engine.stages.self_check import shrunk

    return shrunk(AutoConfig.for_model(name, **({} if name in WITHOUT_LOSS else BALANCED)), num_twins)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """One row for each layout, the times with the first."""
    for number, (num_stages, recompute) in enumerate(CUTS):
        worst, of = difference(name, num_stages, recompute)
        row = {"class": name, "stages": num_stages, "recompute": recompute, "worst": worst, "of": of}
        yield row | ({} if number else cpu_ms(name))


def difference(name: str, num_stages: int, recompute: Any) -> tuple[float, str]:
    """The largest relative difference of a gradient, and whose it is."""
    import torch

    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages import self_check

    torch.manual_seed(0)
    whole = self_check.random_model(config_of(name), torch.float64)
    tokens = torch.randint(64, (4, 2, 16))
    batch = Batch(tokens, tokens.roll(-1, -1))
    stages = self_check.make_stages(whole, batch, recompute, num_stages)
    self_check.run_in_turn(stages, len(tokens))
    self_check.reference_loss(whole, batch)
    return self_check.worst_error(stages, whole, 1.0, 1.0)


def cpu_ms(name: str) -> dict[str, float]:
    """CPU milliseconds of F, I and W of a microbatch."""
    import torch
    from transformers import AutoConfig

    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages.hugging_face import HuggingFaceSlice
    from farpipe.engine.stages.self_check import random_model
    from farpipe.engine.stages.slices import StageSlice
    from farpipe.engine.stages.stage import Boundary, TorchStage

    config = AutoConfig.for_model(name)
    known = config.to_dict()
    experts = {key: 8 for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in known}
    more = {"layer_types": ["full_attention"] * 4} if known.get("layer_types") else {}
    more |= {
        key: value for key, value in (("first_k_dense_replace", 0), ("n_group", 1), ("topk_group", 1)) if key in known
    }
    config = AutoConfig.for_model(name, **{key: value for key, value in WIDE.items() if key in known} | experts | more)
    tokens = torch.randint(256, (1, 2, 128))
    boundary = Boundary((2, 128, 256), torch.float32)
    stage = TorchStage(HuggingFaceSlice(random_model(config, torch.float32), StageSlice(0, 4, True, True)), boundary)
    stage.begin_step(Batch(tokens, tokens.roll(-1, -1)))
    calls = {
        "F": lambda: stage.forward(0, None),
        "I": lambda: stage.input_grad(0, None),
        "W": lambda: stage.weight_grad(0),
    }
    found: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(NUM_SKIPPED + NUM_REPEATS):
        for kind, call in calls.items():
            begin_s = time.process_time()
            call()
            found[kind].append(1e3 * (time.process_time() - begin_s))
    return {f"{kind}_ms": round(median(times[NUM_SKIPPED:]), 1) for kind, times in found.items()}


if __name__ == "__main__":
    main()
