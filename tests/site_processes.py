"""Processes that share stages, as the launcher starts them for a test: ``python site_processes.py CASE...``."""

import copy
import json
import os
import sys
import traceback
from contextlib import nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.step import Schedule, awaited
from farpipe.engine.data.batches import Batch
from farpipe.engine.executor.executor import Executor
from farpipe.engine.launch.launcher import launch
from farpipe.engine.launch.reports import leave_result
from farpipe.engine.rendezvous import store_from_env
from farpipe.engine.site import tensor_plans
from farpipe.engine.site.context import heads_for_tokens
from farpipe.engine.site.expert_exchange import SAME, divide_experts, expert_mesh, experts_of
from farpipe.engine.site.mesh import DATA, TENSOR, join_site, shares_in, stage_mesh
from farpipe.engine.site.self_check import check_divided, check_divided_chunks
from farpipe.engine.site.sharding import StepReduction, is_counted, settle, shard
from farpipe.engine.site.tensor_plans import divide
from farpipe.engine.site.twin_stage import twin_stage
from farpipe.engine.stages.balanced_stage import torch_stage
from farpipe.engine.stages.divided_stages import twins_in
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, PassThrough, layers_of
from farpipe.engine.stages.self_check import random_model, reference_loss, shrunk
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stage import Boundary
from farpipe.engine.transport.clock import Clock
from site_checkpoints import checkpoints
from site_groups import in_groups, stuck
from site_loads import loads, refusals
from small_models import placed_problem, relative_error

NUM_MICROBATCHES, SIZE, LENGTH = 3, 2, 12
PARTS = (StageSlice(0, 3, True, False), StageSlice(3, 6, False, True))


class Alone:
    """The one rank of a pipeline."""

    rank, clock = 0, Clock()


def on_one_rank(schedule):
    """The orders of all ranks as one: each rank in turn does its next action as soon as what it needs is made."""
    num_stages = 1 + max(action.stage for actions in schedule.ranks for action in actions)
    waiting, done, merged = [list(actions) for actions in schedule.ranks], set(), []
    while any(waiting):
        for actions in waiting:
            if actions and is_ready(actions[0], done, num_stages):
                done.add((actions[0].stage, "F" if actions[0].kind == "F" else "I", actions[0].microbatch))
                merged.append(actions.pop(0))
    return Schedule(schedule.num_microbatches, (tuple(merged),))


def is_ready(action, done, num_stages):
    need = awaited(action, num_stages)
    return need is None or (need[0], "F" if action.kind == "F" else "I", need[2]) in done


def batch_of(seed):
    tokens = torch.randint(64, (NUM_MICROBATCHES, SIZE, LENGTH), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, tokens.roll(-1, -1))


class Site:
    """All stages of a model, each divided over the processes of this world."""

    def __init__(self, whole, mesh, recompute="none", zero=1, hybrid=False, expert=1, **sharding):
        """`expert`: processes that share a layer's experts. `hybrid`: in two groups of processes that each divide all
        weights among themselves (HSDP)."""
        shares, twins = shares_in(mesh), twins_in(mesh)
        if hybrid:
            shares = init_device_mesh("cpu", (2, shares.size() // 2), mesh_dim_names=("groups", "shares"))
        boundary = Boundary((SIZE, LENGTH, whole.config.hidden_size), whole.dtype)
        self.stages = []
        for part in PARTS:
            module = HuggingFaceSlice(copy.deepcopy(whole), part, recompute)
            if mesh[TENSOR].size() > 1:
                divide(module, mesh[TENSOR])
            if expert > 1:
                owners = expert_mesh(mesh, expert)
                divide_experts(module, owners)
                for experts in experts_of(module):
                    shard(experts, [], owners[SAME], **sharding)
            options = {"share": 1 / NUM_MICROBATCHES}
            if twins is None:
                stage = torch_stage(module, boundary, **options)
            else:
                stage = twin_stage(module, boundary, twins, **options)
            if shares.size() > 1:
                layers = [layer for layer in layers_of(module.inner)[1] if not isinstance(layer, PassThrough)]
                shard(module, layers, shares, **sharding)
            self.stages.append(stage)
        self.reductions = [StepReduction(stage.module, stage.store, zero=zero) for stage in self.stages]

    def run(self, batch, schedule):
        for stage, reduction in zip(self.stages, self.reductions, strict=True):
            stage.module.zero_grad()
            stage.begin_step(batch)
            reduction.begin()
        executor = Executor(schedule, dict(enumerate(self.stages)), Alone(), lambda _, s: self.reductions[s].end())
        executor.run(0)

    def gradients(self):
        """By name, whole; of tied ends the sum."""
        found = {}
        for stage in self.stages:
            for name, parameter in stage.module.named_parameters():
                if (grad := parameter.grad) is not None:
                    assert not isinstance(grad, DTensor) or grad.placements == parameter.placements
                    found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return found


WITH_LOSS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
"""Models with experts that transformers balances by a loss, which weighs as much as the other here."""
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


class Float64Routers(TorchFunctionMode):
    """Context in which routers that ask for float32 multiply in float64: sums over a part of the tokens round alike."""

    def __torch_function__(self, function, types, inputs=(), options=None):
        asks = function is torch.Tensor.type and inputs[1:] == (torch.float32,)
        return inputs[0] if asks and inputs[0].dtype == torch.float64 else function(*inputs, **(options or {}))


def errors(name, degrees, method, recompute="none", *, routers="float32", **sharding):
    """Relative errors of loss and gradients against the whole model."""
    with Float64Routers() if routers == "float64" else nullcontext():
        return found_errors(name, degrees, method, recompute, **sharding)


def found_errors(name, degrees, method, recompute, **sharding):
    torch.manual_seed(0)
    data, tensor, context = degrees
    balanced = BALANCED if name in WITH_LOSS else {}
    whole = random_model(shrunk(AutoConfig.for_model(name, **balanced), tensor * context), torch.float64)
    mesh = stage_mesh("cpu", data=data, context=context, tensor=tensor)
    batches = [batch_of(seed) for seed in range(data)]
    expected = sum(reference_loss(whole, batch) for batch in batches)
    site = Site(whole, mesh, recompute, **sharding)
    schedule = on_one_rank(order(method, placed_problem((0, 1), NUM_MICROBATCHES)))
    for _ in range(2 if data > 1 else 1):  # the second step begins with the shares that the first has left
        site.run(batches[mesh[DATA].get_local_rank()], schedule)
    loss = torch.tensor(site.stages[-1].loss, dtype=torch.float64)
    dist.all_reduce(loss, group=shares_in(mesh).get_group())
    found = site.gradients()
    head, table = (end(whole).weight for end in (type(whole).get_output_embeddings, type(whole).get_input_embeddings))
    if head is table:
        shared = site.stages[0].module.shared_names
        ((mine, of_table),) = shared.items()
        found[of_table] = found[of_table] + found.pop(mine)
    worst = {"loss": abs(float(loss) - expected) / expected}
    if balanced and worst["loss"] < 1e-7:  # transformers sums the balancing loss in float32
        del worst["loss"]
    for key, parameter in whole.named_parameters():
        if parameter.grad is not None:
            worst[key] = relative_error(found[key], parameter.grad) if key in found else float("inf")
    key = max(worst, key=lambda key: worst[key])
    return {"error": worst[key], "of": key}


class SummedInEveryBackward(SequenceParallel):
    """What transformers does with gains of norms over single heads: sums of earlier microbatches are summed again."""

    def _apply(self, module, mesh):
        hooked = set()

        def hook(module, _):
            for parameter in {*module.parameters()} - hooked:  # those that are here at the first forward
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.to_local()))
                hooked.add(parameter)

        module.register_forward_pre_hook(hook)
        return super()._apply(module, mesh)


HEADS = "replicated_with_grad_allreduce"
TRAPS = {
    "norms summed again": lambda: patch("farpipe.engine.site.self_check.settle", summed_again),
    "q_norm": lambda: patch.dict(tensor_plans._STYLES, {HEADS: SummedInEveryBackward(use_local_output=True)}),
    "tokens out of order": lambda: patch(
        "farpipe.engine.site.context_chunks.heads_for_tokens", lambda x, *rest: heads_for_tokens(x.flip(2), *rest)
    ),
}


def summed_again(module):
    for parameter in (p for p in module.parameters() if p.ndim == 1):
        parameter.grad = parameter.grad * 2.0


def checks(name, num_twins, trap="", context=1, on_chunks=False, **changes):
    """What the check of twins says, with one of TRAPS; "" where they compute what the whole does."""
    config = AutoConfig.for_model(name)
    config.update(changes)
    data, tensor = dist.get_world_size() // num_twins, num_twins // context
    mesh = stage_mesh("cpu", data=data, context=context, tensor=tensor)
    try:
        with TRAPS[trap]() if trap else nullcontext():
            (check_divided_chunks if on_chunks else check_divided)(config, twins_in(mesh))
    except InputError as error:
        return {"said": str(error)}
    return {"said": ""}


def norms(name):
    """Norm of the whole gradient, and from the parts of all processes, before and after partial sums are settled."""
    torch.manual_seed(0)
    whole = random_model(shrunk(AutoConfig.for_model(name)), torch.float64)
    batch = batch_of(0)
    reference_loss(whole, batch)
    site = Site(whole, stage_mesh("cpu", data=1, tensor=2))
    schedule = on_one_rank(order("zb-h1", placed_problem((0, 1), NUM_MICROBATCHES)))
    found = {"whole": float(sum(p.grad.square().sum() for p in whole.parameters())) ** 0.5}
    with patch("farpipe.engine.site.sharding.settle"):
        site.run(batch, schedule)
    found["unsettled"] = norm_of(site)
    names = [name for stage in site.stages for name in settle(stage.module)]
    return found | {"settled": norm_of(site), "names": names}


def norm_of(site):
    """The norm of all processes' gradients, each element counted once."""
    parameters = [p for stage in site.stages for p in stage.module.parameters()]
    squares = sum(p.grad.to_local().square().sum() for p in parameters if is_counted(p))
    dist.all_reduce(squares)
    return float(squares) ** 0.5


CASES = {
    "errors": errors,
    "checks": checks,
    "norms": norms,
    "checkpoints": checkpoints,
    "loads": loads,
    "refusals": refusals,
    "in_groups": in_groups,
    "stuck": stuck,
}


def run_processes(count, cases):
    """What process 0 of `count` finds for each of the cases (one of CASES, *arguments, options)."""
    words = [json.dumps(case) for case in cases]
    return launch(lambda number: [sys.executable, __file__, *words], count)[0]


def main(cases):
    torch.set_num_threads(1)
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_site(store_from_env().torch_store, "zurich", number, count, device="cpu", timeout_s=30)
    found = []
    for case in cases:
        function, *arguments = json.loads(case)
        try:
            found.append(CASES[function](*arguments[:-1], **arguments[-1]))
        except Exception:
            found.append({"raised": traceback.format_exc()})
    leave_result(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
