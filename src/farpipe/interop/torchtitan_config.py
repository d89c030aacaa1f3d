"""A plan as the tables of a torchtitan job.

Its FSDP divides weights, gradients and optimizer state. In a pipeline, where gradients add up whole, and with weights
that stay whole after the forward (``never``), that takes what ZeRO-1 takes: 2 + 4 + 12 / shards bytes of a parameter.
Seen with torch 2.13 on two pipeline ranks of two shards each: I and W apart give the plain model's gradients then, no
gradients where weights are sharded again after the forward (``always``), and wrong ones under DDP.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from farpipe.core.errors import InputError
from farpipe.core.simulate import simulate
from farpipe.core.spec import operations_of
from farpipe.core.step import Action, Schedule
from farpipe.core.units import format_bytes, format_seconds
from farpipe.interop.megatron_flags import expect_plain, is_round_robin, most_recomputed
from farpipe.interop.megatron_launch import rank_notes
from farpipe.interop.shards import has_whole_optimizers, more_between_sites, more_bytes
from farpipe.planning.cost import settle

if TYPE_CHECKING:
    from farpipe.core.spec import Training
    from farpipe.planning import Plan

VERSION: Final = "0.2"
"""The last one that is configured in TOML."""
_CONVERTERS: Final = {"fp8": "float8", "fp8_rowwise": "float8", "mxfp8": "mx"}
_ZERO1: Final = "plan again with training.zero = 1"


def torchtitan_config(plan: "Plan") -> str:
    """The tables of a torchtitan job (TOML): its pipeline reads the schedule from ``schedule.csv``.

    Stages in a V are placed by the name of torch's own V schedule. InputError for what torchtitan can't run, or would
    run in more memory than there is or with wrong gradients.
    """
    training = settle(plan.job.training, plan.layout)
    _expect_runnable(plan, training)
    shards = _shards(plan, training)
    at = plan.layout
    tables = [
        f"# Tables of a torchtitan {VERSION} job; later versions are configured in Python, with the same names.",
        *rank_notes(plan, replicas_apart=False),
        *_notes(plan, training, shards),
        *_more_between_sites(plan, is_plain=not shards.fsdp),
        "[parallelism]",
        f"tensor_parallel_degree = {at.tensor}",
        *_context(plan),
        *_experts(plan),
        f"data_parallel_replicate_degree = {shards.replicate}",
        f"data_parallel_shard_degree = {shards.shard}",
        *([f'fsdp_reshard_after_forward = "{shards.reshard}"'] * shards.fsdp),
        *(_pipeline(plan) if at.pipeline > 1 else ()),
        "",
        "[training]",
        f"local_batch_size = {at.microbatch_size * (at.num_microbatches if at.pipeline > 1 else 1)}",
        f"global_batch_size = {training.global_batch}",
        f"seq_len = {training.sequence_length}",
        *(['mixed_precision_param = "float32"'] * (training.precision == "fp32")),
        "",
        *_recompute(plan),
        *_numbers(plan, training),
    ]
    return "\n".join(tables)


def torchtitan_flags(plan: "Plan") -> str:
    """Options of torchtitan 0.3's command for a job whose ``pipelining_fn`` is ``farpipe.torch.titan(plan)``.

    That cuts the model as planned, and every order is right under its FSDP. InputError for what torchtitan can't run.
    """
    training, at = settle(plan.job.training, plan.layout), plan.layout
    _expect_possible(plan, training)
    replicate = len(at.replica_sites) if has_whole_optimizers(plan) else 1
    values = {
        "parallelism.pipeline_parallel_degree": at.pipeline,
        "parallelism.tensor_parallel_degree": at.tensor,
        "parallelism.context_parallel_degree": at.context,
        "parallelism.expert_parallel_degree": at.expert,
        **({"parallelism.data_parallel_replicate_degree": replicate} if replicate > 1 else {}),
        "parallelism.data_parallel_shard_degree": at.data // replicate,
        "parallelism.fsdp_reshard_after_forward": _reshard(plan, training),
        "parallelism.pipeline_parallel_microbatch_size": at.microbatch_size,
        "training.local_batch_size": at.microbatch_size * (at.num_microbatches if at.pipeline > 1 else 1),
        "training.global_batch_size": training.global_batch,
        "training.seq_len": training.sequence_length,
        "training.mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
    }
    lines = [f"--{name} {value}" for name, value in values.items()]
    notes = [*rank_notes(plan, replicas_apart=False), *_more_between_sites(plan, is_plain=False)]
    return "\n".join([*notes, *lines, *["--training.disable_cuda_graphs"] * (at.pipeline > 1)]) + "\n"


@dataclass(frozen=True)
class _Shards:
    """Degrees of data parallelism, and FSDP's policy."""

    replicate: int
    shard: int
    fsdp: bool
    """True if torchtitan applies FSDP, which it also does where devices share sequences alone."""
    reshard: str


def _shards(plan: "Plan", training: "Training") -> _Shards:
    """All replicas divide, or those of each site; plain ones (DDP) torchtitan has only without any other degree."""
    at = plan.layout
    plain = training.zero == 0 and at.pipeline * at.tensor * at.context * at.expert == 1
    replicate = at.data if plain else len(at.replica_sites) if has_whole_optimizers(plan) else 1
    shard = at.data // replicate
    return _Shards(replicate, shard, shard * at.context > 1, _reshard(plan, training))


def _reshard(plan: "Plan", training: "Training") -> str:
    """Weights are gathered again for the backward where the plan does that, and never over several sites."""
    over_sites = plan.layout.replica_sites and not has_whole_optimizers(plan)
    return "always" if training.zero == 3 and not over_sites else "never"


def _expect_runnable(plan: "Plan", training: "Training") -> None:
    """InputError for what torchtitan refuses when it starts, and for what it would run otherwise than planned."""
    at = plan.layout
    _expect_possible(plan, training)
    if at.pipeline > 1 and _shards(plan, training).fsdp and training.zero in (2, 3):
        _expect_whole_backwards(plan, training)
        _expect_memory(plan, training)


def _expect_possible(plan: "Plan", training: "Training") -> None:
    """InputError for what torchtitan does not have."""
    at = plan.layout
    expect_plain(plan, "torchtitan")
    if at.context > 1 and at.context_exchange == "ulysses":
        raise InputError('torchtitan has no Ulysses; plan again with layout.context_exchange = "ring"')
    if training.precision == "fp16":
        raise InputError('torchtitan has no fp16; plan again with training.precision = "bf16"')
    divisor = 2 * at.tensor * at.context
    if training.sequence_length % divisor:
        raise InputError(
            f"torchtitan divides sequences into 2 x tensor x context = {divisor} parts; training.sequence_length is "
            f"{training.sequence_length}"
        )


def _expect_whole_backwards(plan: "Plan", training: "Training") -> None:
    """InputError for I and W apart where weights are sharded again after the forward."""
    if training.zero != 3 or all(action.kind in "FB" for order in plan.schedule.ranks for action in order):
        return
    expected = plan.prediction
    whole_s = simulate(plan.problem, _whole_backwards(plan.schedule)).makespan_s + expected.overhead_s
    raise InputError(
        f"torch loses gradients where I and W are apart (schedule {plan.schedule.method}) and FSDP shards weights "
        f"again after the forward (training.zero = 3); {_ZERO1}, or with whole backwards, as in schedule.method = "
        f'"1f1b": with them this order takes {format_seconds(whole_s)} instead of {format_seconds(expected.step_s)}'
    )


def _whole_backwards(schedule: Schedule) -> Schedule:
    """The same order with B in place of I, and no W."""
    ranks = [
        [Action(a.stage, "B", a.microbatch) if a.kind == "I" else a for a in order if a.kind != "W"]
        for order in schedule.ranks
    ]
    return Schedule(schedule.num_microbatches, ranks, schedule.method)


def _expect_memory(plan: "Plan", training: "Training") -> None:
    """InputError where a device has too little memory for whole weights and gradients of its stages."""
    for rank, more in enumerate(more_bytes(plan)):
        limit, needed = plan.problem.ranks[rank].memory_bytes, plan.prediction.peak_memory_bytes[rank] + more
        if limit is not None and needed > limit:
            raise InputError(
                f"torch's pipeline keeps weights and gradients whole between backwards, also with training.zero = "
                f"{training.zero}: rank {rank} then needs {format_bytes(needed)} of {format_bytes(limit)}; {_ZERO1}"
            )


def _notes(plan: "Plan", training: "Training", shards: _Shards) -> list[str]:
    """Comments on what torchtitan does otherwise than the plan."""
    at, notes = plan.layout, []
    if training.zero == 0 and shards.fsdp:
        notes.append(
            "beside other degrees torchtitan has no DDP; FSDP divides what the plan keeps whole on each device."
        )
    if training.zero in (2, 3) and shards.fsdp and at.pipeline > 1:
        more = format_bytes(max(more_bytes(plan)))
        notes.append(
            f"torch's pipeline keeps weights and gradients whole between backwards: up to {more} more a device."
        )
    if training.zero == 1 and shards.fsdp and at.pipeline == 1 and at.num_microbatches > 1:
        notes.append("torchtitan gathers weights and reduces gradients in every microbatch, the plan once a step.")
    if training.precision == "bf16" and not shards.fsdp and at.pipeline * at.tensor > 1:
        notes.append('without FSDP torchtitan computes in float32; with training.dtype = "bfloat16" all is in 16 bit.')
    if training.grad_reduce_in_fp32 is False and shards.fsdp:
        notes.append("torchtitan reduces gradients in float32, the plan in 16 bit.")
    if training.cuda_graphs:
        notes.append("torchtitan has no setting for CUDA graphs, with which the plan counts.")
    return [f"# Not as planned: {note}" for note in notes]


def _more_between_sites(plan: "Plan", is_plain: bool) -> list[str]:
    """FSDP of each site sums over sites whole; without a pipeline it sums in every microbatch."""
    is_whole = has_whole_optimizers(plan) and not is_plain
    sums = plan.layout.num_microbatches if plan.layout.pipeline == 1 else 1
    return more_between_sites(
        plan, "torchtitan", is_flat=not is_whole, divides=not is_whole and not is_plain, sums_per_step=sums
    )


def _context(plan: "Plan") -> list[str]:
    if plan.layout.context == 1:
        return []
    return [
        f"context_parallel_degree = {plan.layout.context}",
        'context_parallel_rotate_method = "alltoall"  # round a ring',
    ]


def _experts(plan: "Plan") -> list[str]:
    if plan.layout.expert == 1:
        return []
    return [
        f"expert_parallel_degree = {plan.layout.expert}",
        f"expert_tensor_parallel_degree = {plan.layout.tensor}",
    ]


def _pipeline(plan: "Plan") -> list[str]:
    name = "PipelineScheduleMulti" if is_round_robin(plan) else "ZBVZeroBubble"
    stages = [_modules(plan, index) for index in range(plan.layout.num_stages)]
    shown = ",\n".join("  [" + ", ".join(f'"{module}"' for module in modules) + "]" for modules in stages)
    return [
        f"pipeline_parallel_degree = {plan.layout.pipeline}",
        f'pipeline_parallel_schedule = "{name}"',
        'pipeline_parallel_schedule_csv = "schedule.csv"  # farpipe export PLAN -o schedule.csv',
        f"pipeline_parallel_microbatch_size = {plan.layout.microbatch_size}",
        f"module_fqns_per_model_part = [\n{shown},\n]",
    ]


def _modules(plan: "Plan", stage: int) -> list[str]:
    """The modules of a stage by the names of torchtitan's Llama."""
    place = plan.placements[stage]
    first = ["tok_embeddings"] if stage == 0 else []
    last = ["norm", "output"] if stage == plan.layout.num_stages - 1 else []
    return [*first, *(f"layers.{index}" for index in range(place.first_layer, place.end_layer)), *last]


def _recompute(plan: "Plan") -> list[str]:
    """Its selective checkpointing keeps the results of every second matrix product and of attention, and no list."""
    comments, mode = most_recomputed(plan, "torchtitan")
    heavy = mode == "full" or bool({"mlp", "moe", "shared_experts"} & set(operations_of(mode)))
    if mode not in ("none", "full", "op"):
        comments.append(
            f"# The plan recomputes {mode}; torchtitan chooses operations itself, here so that memory is enough."
        )
    lines = ["[activation_checkpoint]", f'mode = "{"full" if heavy else "none" if mode == "none" else "selective"}"']
    return [*comments, *lines, *(['selective_ac_option = "op"'] if lines[1].endswith('"selective"') else ()), ""]


def _numbers(plan: "Plan", training: "Training") -> list[str]:
    """Narrow numbers in matrix products, also in those of experts."""
    if training.matmul not in _CONVERTERS:
        return []
    name = _CONVERTERS[training.matmul]
    kinds = ["linear", "grouped_mm"] if plan.job.model.experts else ["linear"]
    names = ", ".join(f'"quantize.{kind}.{name}"' for kind in kinds)
    recipes = [f'[quantize.{kind}.{name}]\nrecipe_name = "rowwise"\n' for kind in kinds]
    rowwise = recipes if training.matmul == "fp8_rowwise" else []
    return ["[model]", f"converters = [{names}]", "", *rowwise]
