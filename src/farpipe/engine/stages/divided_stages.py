"""Stages of a run that several processes of a site have in parts: their mesh and their sums."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from farpipe.engine.executor.peers import Peers
from farpipe.engine.replicas.collectives import Rings
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.slices import SliceModule
from farpipe.engine.stages.stage import TorchStage

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from farpipe.engine.site.context_chunks import Groups
    from farpipe.engine.site.shared_weights import SharedWeights


def mesh_of(run: RunSpec) -> "DeviceMesh | None":
    """The processes that share stages with this one; None where no stage is divided."""
    if not run.is_divided:
        return None
    from farpipe.engine.site.mesh import stage_mesh  # FSDP2 takes a second, which other runs need not wait for

    return stage_mesh(run.device, data=run.num_sharing, context=run.plan.context, tensor=run.plan.tensor)


def twins_in(mesh: "DeviceMesh | None") -> "DeviceMesh | None":
    """The mesh ``(CONTEXT, TENSOR)`` of processes that share every sequence and layer; None for one alone."""
    if mesh is None:
        return None
    from farpipe.engine.site.mesh import CONTEXT, TENSOR

    return mesh[CONTEXT, TENSOR] if mesh[CONTEXT, TENSOR].size() > 1 else None


def groups_of(run: RunSpec, mesh: "DeviceMesh | None") -> "Groups | None":
    """The groups in which processes of a stage may share chunks; None where all share all."""
    if mesh is None or not run.group_costs:
        return None
    from farpipe.engine.site.mesh import CONTEXT, longest_collective_s, process_groups

    degrees = [costs.context for costs in run.group_costs]
    return process_groups(mesh[CONTEXT], degrees, timeout_s=longest_collective_s(run.transport))


def part_of_boundary(mesh: "DeviceMesh | None") -> str:
    """The part that this process has of what its stages take and give, in words; empty where it has all."""
    if mesh is None:
        return ""
    from farpipe.engine.site.mesh import DATA

    parts = {name: mesh[name] for name in mesh.mesh_dim_names or () if name != DATA}
    return "".join(f", {name} {part.get_local_rank()} of {part.size()}" for name, part in parts.items())


def check_twins(run: RunSpec, twins: "DeviceMesh | None", *, on_chunks: bool = False) -> None:
    """InputError where twins would compute something else than the whole model; on all of them at once."""
    if twins is None:
        return
    from farpipe.engine.site.self_check import check_divided, check_divided_chunks
    from farpipe.engine.stages.hugging_face_weights import config_of_model

    assert run.plan.model is not None
    config = config_of_model(run.plan.model)
    if on_chunks:
        check_divided_chunks(config, twins)
        return
    for mode in sorted({*run.plan.recompute} or {"none"}):
        check_divided(config, twins, mode)


def divide_module(
    module: SliceModule,
    mesh: "DeviceMesh",
    compute: "torch.dtype",
    *,
    expert: int = 1,
    reshard_after_forward: bool = False,
) -> None:
    """Divide the parameters of `module` over the processes of `mesh`, in place: layers over TENSOR, the experts of each
    over `expert` processes, all by FSDP2.

    They may have no memory yet. FSDP2 also keeps the digits of weights that stages compute with (in `compute`) fewer
    of; `reshard_after_forward`: see `shard`. InputError where layers can't be divided.
    """
    from farpipe.engine.site.mesh import TENSOR, shares_in
    from farpipe.engine.site.sharding import shard

    shares = shares_in(mesh)
    if mesh[TENSOR].size() > 1:
        from farpipe.engine.site.tensor_plans import divide
        from farpipe.engine.stages.hugging_face import HuggingFaceSlice

        assert isinstance(module, HuggingFaceSlice)
        divide(module, mesh[TENSOR])
    parameters = next(module.parameters()).dtype
    narrow = None if compute == parameters else compute
    shard_over = partial(
        shard,
        param_dtype=narrow,
        reduce_dtype=None if narrow is None else parameters,
        reshard_after_forward=reshard_after_forward,
    )
    if expert > 1:
        from farpipe.engine.site.expert_exchange import SAME, divide_experts, expert_mesh, experts_of

        owners = expert_mesh(mesh, expert)
        divide_experts(module, owners)
        for experts in experts_of(module):
            shard_over(experts, [], owners[SAME])
    if mesh[TENSOR].size() > 1:
        from farpipe.engine.site.tensor_plans import expect_all_divided

        expect_all_divided(module)
    if shares.size() > 1 or narrow is not None:
        shard_over(module, module.blocks, shares)


def divided_stages(
    run: RunSpec, peers: Peers, stages: Mapping[int, TorchStage], mesh: "DeviceMesh | None"
) -> "dict[int, SharedWeights]":
    """The sums of this process's stages, which are divided over `mesh`; none without one."""
    if mesh is None:
        return {}
    from farpipe.engine.site.mesh import limit_collectives, longest_collective_s
    from farpipe.engine.site.shared_weights import SharedWeights

    limit_collectives(longest_collective_s(run.transport))
    assert run.plan.training is not None
    zero = run.plan.training.zero
    assert zero != "auto"
    across, found = Rings(run.places.ring_levels(peers.rank)[1:], peers.rank), {}
    for number, stage in stages.items():
        found[number] = SharedWeights(number, stage.module, stage.store, across, zero)
    return found
