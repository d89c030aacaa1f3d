"""A plan as the settings of other training frameworks: degrees of parallelism and layers per stage."""

from itertools import groupby
from typing import TYPE_CHECKING

from farpipe.errors import InputError

if TYPE_CHECKING:
    from farpipe.plan import Plan

_MEGATRON_SCHEDULES = ("1f1b", "interleaved")


def megatron_flags(plan: "Plan") -> str:
    """Flags of Megatron-LM (core 0.13 or newer, for ``--pipeline-model-parallel-layout``), one a line.

    InputError for what its pipelines can't be: stages in a V, replicas of unlike pipelines.
    """
    _expect_round_robin(plan, "Megatron-LM")
    at, training = plan.layout, plan.job.training
    flags = [
        f"--tensor-model-parallel-size {at.tensor}",
        f"--pipeline-model-parallel-size {at.pipeline}",
        f"--micro-batch-size {at.microbatch_size}",
        f"--global-batch-size {training.global_batch}",
        f"--seq-length {training.sequence_length}",
        f"--num-layers {plan.job.model.num_layers}",
    ]
    if at.num_stages > 1:
        flags.insert(2, f'--pipeline-model-parallel-layout "{_megatron_layout(plan)}"')
    if at.context > 1:
        flags.append(f"--context-parallel-size {at.context}")
        flags.append(f"--cp-comm-type {'a2a' if at.context_exchange == 'ulysses' else 'p2p'}")
    flags += ["--use-distributed-optimizer"] * (training.zero1 is True)
    flags += ["--sequence-parallel"] * (training.sequence_parallel is True)
    flags += _megatron_recompute(plan)
    method = plan.schedule.method
    if at.pipeline > 1 and method not in _MEGATRON_SCHEDULES:
        runs = "interleaved 1F1B" if at.virtual > 1 else "1F1B"
        flags.insert(0, f"# Megatron-LM runs {runs}; the plan's step time is that of the schedule {method}.")
    return "\n".join(flags) + "\n"


def _megatron_layout(plan: "Plan") -> str:
    """``Et*9|t*9|t*9|t*5L``: E the embedding, t a layer, L the loss; stages in the order of the layers."""
    stages = [f"t*{p.num_layers}" if p.num_layers > 1 else "t" * p.num_layers for p in plan.placements]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)


def _megatron_recompute(plan: "Plan") -> list[str]:
    modes = set(plan.recompute)
    if modes == {"none"}:
        return []
    if modes == {"full"}:
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    told = ", ".join(f"stages {_spans(plan, mode)} {mode}" for mode in sorted(modes))
    return [f"# recomputation differs between stages ({told}), for which Megatron-LM has no flag"]


def _spans(plan: "Plan", mode: str) -> str:
    indices = [index for index, found in enumerate(plan.recompute) if found == mode]
    runs = [[*run] for _, run in groupby(indices, key=lambda index: index - indices.index(index))]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def torchtitan_config(plan: "Plan") -> str:
    """The tables of a torchtitan job (TOML): its pipeline reads the schedule from ``schedule.csv``.

    Stages in a V are placed by the name of torch's own V schedule. InputError for replicas of unlike pipelines and for
    Ulysses.
    """
    _expect_one_pipeline(plan, "torchtitan")
    if plan.layout.context > 1 and plan.layout.context_exchange == "ulysses":
        raise InputError('torchtitan has no Ulysses; plan again with layout.context_exchange = "ring"')
    name = "PipelineScheduleMulti" if _is_round_robin(plan) else "ZBVZeroBubble"
    at, training = plan.layout, plan.job.training
    stages = [_modules(plan, index) for index in range(at.num_stages)]
    shown = ",\n".join("  [" + ", ".join(f'"{name}"' for name in names) + "]" for names in stages)
    pipeline = [
        f"pipeline_parallel_degree = {at.pipeline}",
        f'pipeline_parallel_schedule = "{name}"',
        'pipeline_parallel_schedule_csv = "schedule.csv"  # farpipe export PLAN -o schedule.csv',
        f"pipeline_parallel_microbatch_size = {at.microbatch_size}",
        f"module_fqns_per_model_part = [\n{shown},\n]",
    ]
    return "\n".join(
        [
            "[parallelism]",
            f"tensor_parallel_degree = {at.tensor}",
            *([f"context_parallel_degree = {at.context}"] if at.context > 1 else ()),
            f"data_parallel_replicate_degree = {at.data}",
            "data_parallel_shard_degree = 1",
            *(pipeline if at.num_stages > 1 else ()),
            "",
            "[training]",
            f"local_batch_size = {at.microbatch_size * at.num_microbatches}",
            f"global_batch_size = {training.global_batch}",
            f"seq_len = {training.sequence_length}",
            "",
        ]
    )


def _modules(plan: "Plan", stage: int) -> list[str]:
    """The modules of a stage by the names of torchtitan's Llama."""
    place = plan.placements[stage]
    first = ["tok_embeddings"] if stage == 0 else []
    last = ["norm", "output"] if stage == plan.layout.num_stages - 1 else []
    return [*first, *(f"layers.{index}" for index in range(place.first_layer, place.end_layer)), *last]


def _expect_one_pipeline(plan: "Plan", framework: str) -> None:
    if plan.unlike:
        raise InputError(f"{framework} has no ranks or replicas that differ; plan again without layout.groups")
    if len(set(plan.replicas)) > 1:
        raise InputError(f"{framework} has no pipelines of unlike sites; plan with one site, or a pipeline over all")


def _is_round_robin(plan: "Plan") -> bool:
    return all(place.rank == index % plan.layout.pipeline for index, place in enumerate(plan.placements))


def _expect_round_robin(plan: "Plan", framework: str) -> None:
    _expect_one_pipeline(plan, framework)
    if not _is_round_robin(plan):
        raise InputError(f"{framework} has no stages in a V; plan again with layout.virtual = 1")
