"""A plan as the settings of other training frameworks: degrees of parallelism and layers per stage."""

from itertools import groupby
from typing import TYPE_CHECKING

from farpipe.cost import settle
from farpipe.errors import InputError
from farpipe.spec import operations_of
from farpipe.spec.recompute import spelled

if TYPE_CHECKING:
    from farpipe.plan import Plan
    from farpipe.spec import Training

_MEGATRON_SCHEDULES = ("1f1b", "interleaved")
_MEGATRON_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
"""Delayed scaling, Megatron-LM's default, can't recompute norms and nonlinearities."""
_MEGATRON_MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"
_TITAN_CONVERTERS = {"fp8": "float8", "mxfp8": "mx"}


def megatron_flags(plan: "Plan") -> str:
    """Flags of Megatron-LM (core 0.13 or newer, for ``--pipeline-model-parallel-layout``), one a line.

    InputError for what its pipelines can't be: stages in a V, replicas of unlike pipelines.
    """
    _expect_round_robin(plan, "Megatron-LM")
    at, training = plan.layout, settle(plan.job.training, plan.layout)
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
    flags += [f"--{training.precision}"] * (training.precision != "fp32")
    flags += _megatron_experts(plan)
    flags += {"fp8": [_MEGATRON_FP8], "mxfp8": [_MEGATRON_MXFP8]}.get(training.matmul, [])
    flags += ["--cuda-graph-impl local"] * training.cuda_graphs
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


def _megatron_experts(plan: "Plan") -> list[str]:
    experts = plan.job.model.experts
    if experts is None:
        return []
    flags = [f"--num-experts {experts.num_experts}", f"--moe-router-topk {experts.per_token}", "--moe-grouped-gemm"]
    return [*flags, *([f"--expert-model-parallel-size {plan.layout.expert}"] if plan.layout.expert > 1 else ())]


def _megatron_recompute(plan: "Plan") -> list[str]:
    told, mode = _most_recomputed(plan, "Megatron-LM")
    if mode == "full":
        return [*told, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    modules = " ".join(operations_of(mode))
    return [*told, f"--recompute-granularity selective --recompute-modules {modules}"] if modules else []


def _most_recomputed(plan: "Plan", framework: str) -> tuple[list[str], str]:
    """The operations that a framework with one setting for all stages must recompute so that they fit, with a comment
    where those of the plan differ."""
    modes = set(plan.recompute)
    most = "full" if "full" in modes else spelled(operation for mode in modes for operation in operations_of(mode))
    if len(modes) == 1:
        return [], most
    told = ", ".join(f"stages {_spans(plan, mode)} {mode}" for mode in sorted(modes))
    return [f"# The plan's stages recompute differently ({told}); {framework} has one setting for all of them."], most


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
    at, training = plan.layout, settle(plan.job.training, plan.layout)
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
            *([f"expert_parallel_degree = {at.expert}"] if at.expert > 1 else ()),
            f"data_parallel_replicate_degree = {at.data}",
            "data_parallel_shard_degree = 1",
            *(pipeline if at.num_stages > 1 else ()),
            "",
            "[training]",
            f"local_batch_size = {at.microbatch_size * at.num_microbatches}",
            f"global_batch_size = {training.global_batch}",
            f"seq_len = {training.sequence_length}",
            "",
            *_titan_recompute(plan),
            *_titan_numbers(plan, training),
        ]
    )


def _titan_recompute(plan: "Plan") -> list[str]:
    """Its selective checkpointing keeps the results of every second matrix product and of attention, and no list."""
    told, mode = _most_recomputed(plan, "torchtitan")
    heavy = mode == "full" or bool({"mlp", "moe", "shared_experts"} & set(operations_of(mode)))
    if mode not in ("none", "full"):
        told.append(
            f"# The plan recomputes {mode}; torchtitan chooses operations itself, here so that memory is enough."
        )
    lines = ["[activation_checkpoint]", f'mode = "{"full" if heavy else "none" if mode == "none" else "selective"}"']
    return [*told, *lines, *(['selective_ac_option = "op"'] if lines[1].endswith('"selective"') else ()), ""]


def _titan_numbers(plan: "Plan", training: "Training") -> list[str]:
    """Narrow numbers in matrix products, also in those of experts; it has no CUDA graphs."""
    told = ["# torchtitan has no setting for CUDA graphs, with which the plan counts."] * training.cuda_graphs
    if training.matmul not in _TITAN_CONVERTERS:
        return told
    name = _TITAN_CONVERTERS[training.matmul]
    kinds = ["linear", "grouped_mm"] if plan.job.model.experts else ["linear"]
    names = ", ".join(f'"quantize.{kind}.{name}"' for kind in kinds)
    return [*told, "[model]", f"converters = [{names}]", ""]


def _modules(plan: "Plan", stage: int) -> list[str]:
    """The modules of a stage by the names of torchtitan's Llama."""
    place = plan.placements[stage]
    first = ["tok_embeddings"] if stage == 0 else []
    last = ["norm", "output"] if stage == plan.layout.num_stages - 1 else []
    return [*first, *(f"layers.{index}" for index in range(place.first_layer, place.end_layer)), *last]


def expect_alike(plan: "Plan", framework: str) -> None:
    """InputError where ranks or replicas of the plan differ."""
    if plan.unlike:
        pin = 'layout.replicas = "unlike"' if plan.job.layout.replicas == "unlike" else "layout.groups"
        raise InputError(
            f"{framework} has no ranks or replicas that differ ({'; '.join(plan.unlike)}); plan again without {pin}"
        )


def _expect_one_pipeline(plan: "Plan", framework: str) -> None:
    expect_alike(plan, framework)
    if len(set(plan.replicas)) > 1:
        raise InputError(f"{framework} has no pipelines of unlike sites; plan with one site, or a pipeline over all")


def _is_round_robin(plan: "Plan") -> bool:
    return all(place.rank == index % plan.layout.pipeline for index, place in enumerate(plan.placements))


def _expect_round_robin(plan: "Plan", framework: str) -> None:
    _expect_one_pipeline(plan, framework)
    if not _is_round_robin(plan):
        raise InputError(f"{framework} has no stages in a V; plan again with layout.virtual = 1")
