"""Pipelines of torchtitan's Trainer in farpipe's orders, over farpipe's transport.

spec = dataclasses.replace(spec, pipelining_fn=farpipe.torch.titan("plan.json"))
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from farpipe.core.errors import InputError
from farpipe.engine.stages.deferred import defer
from farpipe.engine.stages.weight_grads import WeightGradStore
from farpipe.planning import Plan
from farpipe.planning.planner.orders import V_ORDERS
from farpipe.torch.pipeline import Pipeline
from farpipe.torch.versions import expect_tested
from farpipe.torch.works import raised_as_torch

_TOKENS: Final = (Shard(1),)
"""Division of activations [batch, sequence, hidden] between layers over tensor-parallel processes."""


def titan(
    plan: str | Path | Plan | None = None,
    *,
    method: str | None = None,
    run_dir: str | Path | None = None,
    replan: bool = False,
) -> Callable[..., Any]:
    """The ``pipelining_fn`` of a model specification of torchtitan (0.3) whose model is one of its decoders.

    It takes the place of torchtitan's ``pipeline_llm``: the model is cut as the plan says, unless the job names the
    modules of every stage; sharding, tensor parallelism and recomputation are applied as torchtitan does. `plan`,
    `method`, `run_dir` and `replan` as for `Pipeline`.
    """

    def pipelining_fn(model: nn.Module, *, parallel_dims: Any, parallelism: Any, **settings: Any) -> Any:
        with raised_as_torch():
            expect_tested("torchtitan", metadata.version("torchtitan"))
            loaded = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
            changed = _cut(parallelism, loaded, method, len(settings["model_config"].layers))
        from torchtitan.distributed.pipeline_parallel import pipeline_llm

        stores: list[WeightGradStore | None] = []
        settings["parallelize_fn"] = _deferring(settings["parallelize_fn"], settings["compile_config"], stores)
        made = pipeline_llm(model, parallel_dims=parallel_dims, parallelism=changed, **settings)
        schedule, parts, has_first, has_last = made
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        if parallel_dims.tp_enabled:
            for stage in stages:
                _send_plain(stage.submod, parallel_dims.get_mesh("tp"), stage.is_first, stage.is_last)
        options: dict[str, Any] = {
            "plan": loaded,
            "method": method,
            "run_dir": run_dir,
            "replan": replan,
            "scale_grads": False,
            "stores": stores,
        }
        pipeline = Pipeline(stages, schedule._n_microbatches, schedule._loss_fn, **options)
        return pipeline, parts, has_first, has_last

    return pipelining_fn


def _deferring(parallelize: Callable[..., Any], compiling: Any, stores: list[WeightGradStore | None]) -> Any:
    """`parallelize`, ahead of which weight gradients are put off: it puts its own forwards around those of layers."""

    def deferred(part: nn.Module, **settings: Any) -> Any:
        store = None if compiling.enable else WeightGradStore()
        stores.append(store)
        if store is not None:
            defer(part, store)
        return parallelize(part, **settings)

    return deferred


def _cut(parallelism: Any, plan: Plan | None, method: str | None, num_layers: int) -> Any:
    """The job's settings with the plan's stages, in torch's schedule that has as many per rank, in the same places.

    InputError where the plan is for another model or another number of ranks.
    """
    in_a_v = method in V_ORDERS or (plan is not None and plan.candidate.in_v)
    is_virtual = plan.layout.virtual > 1 if plan is not None else method in ("interleaved", "bfs")
    name = "ZBVZeroBubble" if in_a_v else "Interleaved1F1B" if is_virtual else "1F1B"
    changed = replace(parallelism, pipeline_parallel_schedule=name, pipeline_parallel_schedule_csv="")
    if plan is None or parallelism.module_fqns_per_model_part is not None:
        return changed
    found = {"layers": num_layers, "pipeline ranks": parallelism.pipeline_parallel_degree}
    planned = {"layers": plan.placements[-1].end_layer, "pipeline ranks": plan.layout.pipeline}
    for what, number in found.items():
        if number != planned[what]:
            raise InputError(f"the plan has {planned[what]} {what}, the job of torchtitan {number}")
    return replace(changed, module_fqns_per_model_part=_module_names(plan))


def _module_names(plan: Plan) -> list[list[str]]:
    """Names of the modules of every stage, as torchtitan's decoders have them."""
    names = [[f"layers.{layer}" for layer in range(one.first_layer, one.end_layer)] for one in plan.placements]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    return names


def _send_plain(part: nn.Module, mesh: DeviceMesh, is_first: bool, is_last: bool) -> None:
    """Let `part` take and return this process's tokens as plain tensors: its twin at the next stage has the same."""

    def wrap(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        return DTensor.from_local(x, mesh, _TOKENS, run_check=False), *rest

    def unwrap(_: nn.Module, inputs: Any, y: Any) -> Tensor:
        if not isinstance(y, DTensor):
            raise InputError("a stage returns plain tensors under tensor parallelism: enable sequence parallelism")
        if y.placements != _TOKENS:
            raise InputError(f"a stage returns a tensor divided as {y.placements}, not by tokens, {_TOKENS}")
        return y.to_local()

    if not is_first:
        part.register_forward_pre_hook(wrap)
    if not is_last:
        part.register_forward_hook(unwrap)
