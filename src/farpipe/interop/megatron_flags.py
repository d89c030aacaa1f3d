"""A plan as the flags of Megatron-LM, and what the settings of all frameworks have in common."""

from itertools import groupby
from typing import TYPE_CHECKING, Final

from farpipe.core.errors import InputError
from farpipe.core.spec import operations_of
from farpipe.core.spec.recompute import spelled
from farpipe.interop.megatron_launch import launch_notes
from farpipe.interop.shards import has_whole_optimizers, more_between_sites
from farpipe.planning.cost import settle

if TYPE_CHECKING:
    from farpipe.core.spec import Model, Training
    from farpipe.planning import Plan

_MEGATRON_SCHEDULES = ("1f1b", "interleaved")
_MEGATRON_NARROW = {
    "fp8": ["--fp8-format hybrid --fp8-recipe tensorwise"],
    "mxfp8": ["--fp8-format e4m3 --fp8-recipe mxfp8"],
    "nvfp4": ["--fp4-format e2m1 --fp4-recipe nvfp4"],
}
"""Flags of narrow products; delayed scaling, Megatron-LM's default, can't recompute norms and nonlinearities."""
_FSDP: Final[dict[object, list[str]]] = {
    stage: [f"--use-megatron-fsdp --data-parallel-sharding-strategy {shared} --ckpt-format fsdp_dtensor"]
    for stage, shared in ((2, "optim_grads"), (3, "optim_grads_params"))
}
"""Flags of ZeRO-2 and 3: the distributed optimizer alone is ZeRO-1. FSDP asks for its own format of checkpoints."""


def megatron_flags(plan: "Plan") -> str:
    """Flags of Megatron-LM (core 0.13 or newer, for ``--pipeline-model-parallel-layout``), one a line.

    InputError for what its pipelines can't be: stages in a V.
    """
    _expect_round_robin(plan)
    expect_plain(plan, "Megatron-LM")
    if plan.job.training.matmul == "fp8_rowwise":
        raise InputError('Megatron-LM has no scale for every row; plan again with training.matmul = "fp8" or "mxfp8"')
    at, training = plan.layout, settle(plan.job.training, plan.layout)
    flags = _degrees_and_batch(plan, training)
    flags += _training(training)
    flags += _model(plan.job.model)
    if plan.job.model.positions == "rotary":  # its parser wants a number all the same
        rows = max(plan.job.model.max_sequence_length or 0, training.sequence_length)
        flags.append(f"--max-position-embeddings {rows}")
    flags += _megatron_experts(plan)
    flags += _latent_attention(plan.job.model)
    flags += _windows(plan.job.model)
    flags += [f"--mtp-num-layers {plan.job.model.mtp_num_layers}"] * (plan.job.model.mtp_num_layers > 0)
    flags += _megatron_recompute(plan)
    flags += _replicas_at_sites(plan)
    method = plan.schedule.method
    if at.pipeline > 1 and method not in _MEGATRON_SCHEDULES:
        runs = "interleaved 1F1B" if at.virtual > 1 else "1F1B"
        flags.insert(0, f"# Megatron-LM runs {runs}; the plan's step time is that of the schedule {method}.")
    return "\n".join([*launch_notes(plan), *flags]) + "\n"


def _degrees_and_batch(plan: "Plan", training: "Training") -> list[str]:
    at = plan.layout
    exchange = "a2a" if at.context_exchange == "ulysses" else "p2p"
    return [
        f"--tensor-model-parallel-size {at.tensor}",
        f"--pipeline-model-parallel-size {at.pipeline}",
        *([f'--pipeline-model-parallel-layout "{_megatron_layout(plan)}"'] * (at.num_stages > 1)),
        f"--micro-batch-size {at.microbatch_size}",
        f"--global-batch-size {training.global_batch}",
        f"--seq-length {training.sequence_length}",
        *([f"--context-parallel-size {at.context}", f"--cp-comm-type {exchange}"] * (at.context > 1)),
    ]


def _replicas_at_sites(plan: "Plan") -> list[str]:
    """Ranks of one replica after those of the other; with ZeRO-1 a whole optimizer at every site that can have one."""
    num_sites, divides = len(plan.layout.replica_sites), settle(plan.job.training, plan.layout).zero1
    if not num_sites:
        return []
    is_whole = divides and has_whole_optimizers(plan)
    return [
        *more_between_sites(plan, "Megatron-LM", is_flat=not is_whole, divides=divides and not is_whole),
        "--use-tp-pp-dp-mapping",
        *([f"--num-distributed-optimizer-instances {num_sites}"] * is_whole),
    ]


def _megatron_layout(plan: "Plan") -> str:
    """``Et*9|t*9|t*9|t*5L``: E the embedding, t a layer, L the loss; stages in the order of the layers."""
    stages = [f"t*{p.num_layers}" if p.num_layers > 1 else "t" * p.num_layers for p in plan.placements]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)


def _training(training: "Training") -> list[str]:
    """Precision, optimizer and what is divided or hidden."""
    dropout = 0.1 if training.dropout else 0.0
    return [
        *([f"--{training.precision}"] * (training.precision != "fp32")),
        *_MEGATRON_NARROW.get(training.matmul, []),
        *(["--fp8-param-gather"] * training.fp8_param_gather),
        *(["--grad-reduce-in-bf16"] * (training.precision == "bf16" and training.grad_reduce_in_fp32 is False)),
        *(["--use-distributed-optimizer"] * training.zero1),
        *_FSDP.get(training.zero, []),
        *(["--sequence-parallel"] * (training.sequence_parallel is True)),
        *(["--tp-comm-overlap"] * training.tp_comm_overlap),
        *(["--overlap-moe-expert-parallel-comm"] * training.overlap_moe_expert_parallel_comm),
        *(["--cross-entropy-loss-fusion"] * bool(training.cross_entropy_loss_fusion)),
        *(["--fp8-dot-product-attention"] * training.fp8_dot_product_attention),
        *(["--activation-func-fp8-input-store"] * training.activation_func_fp8_input_store),
        *(["--overlap-grad-reduce"] * training.overlap),
        *(
            ["--overlap-param-gather"]
            * (training.overlap and training.zero1 and training.overlap_param_gather is not False)
        ),
        *(["--attention-backend unfused"] * (not training.flash_attention)),
        *(["--cuda-graph-impl local"] * (training.cuda_graphs is True)),
        *(
            ["--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn moe_router"]
            * (training.cuda_graphs == "part")
        ),
        *(
            [f"--cpu-offloading-num-layers {training.cpu_offloading_num_layers}"]
            * (training.cpu_offloading_num_layers > 0)
        ),
        f"--train-iters {training.num_steps}",
        f"--lr {training.learning_rate!r}",
        f"--weight-decay {training.weight_decay!r}",
        f"--clip-grad {training.clip_norm or 0.0!r}",
        f"--adam-beta1 {training.betas[0]!r}",
        f"--adam-beta2 {training.betas[1]!r}",
        f"--hidden-dropout {dropout}",
        f"--attention-dropout {dropout}",
    ]


def _model(model: "Model") -> list[str]:
    """The shape of the model; the vocabulary is its padded one."""
    rotary = [f"--position-embedding-type rope --rotary-base {model.rotary_base:.0f}"]
    learned = [f"--position-embedding-type learned_absolute --max-position-embeddings {model.max_sequence_length}"]
    return [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.num_heads}",
        *(
            [f"--group-query-attention --num-query-groups {model.num_kv_heads}"]
            * (model.num_kv_heads < model.num_heads)
        ),
        f"--kv-channels {model.head_dim}",
        f"--ffn-hidden-size {model.ffn_hidden}",
        *(["--swiglu"] * model.gated_mlp),
        *(["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)),
        *(["--normalization RMSNorm"] * (model.norm == "rmsnorm")),
        *(["--disable-bias-linear"] * (not model.bias)),
        *(["--add-qkv-bias"] * model.qkv_bias),
        *(["--qk-layernorm"] * model.qk_norm),
        *(rotary if model.positions == "rotary" else learned),
        f"--vocab-size {model.vocab_size} --make-vocab-size-divisible-by 1",
    ]


def _megatron_experts(plan: "Plan") -> list[str]:
    experts, at = plan.job.model.experts, plan.layout
    if experts is None:
        return []
    dense, num_layers = experts.num_dense_layers, plan.job.model.num_layers
    return [
        f"--num-experts {experts.num_experts}",
        f"--moe-router-topk {experts.per_token}",
        f"--moe-ffn-hidden-size {experts.ffn_hidden}",
        *([f"--moe-shared-expert-intermediate-size {experts.shared_ffn_hidden}"] * (experts.shared_ffn_hidden > 0)),
        *([f'--moe-layer-freq "([0]*{dense}+[1]*{num_layers - dense})"'] * (dense > 0)),
        f"--moe-token-dispatcher-type {plan.job.training.moe_token_dispatcher_type}",
        *(["--moe-router-enable-expert-bias --moe-router-score-function sigmoid"] * experts.router_bias),
        *([f"--moe-router-num-groups {experts.num_groups}"] * (experts.num_groups > 1)),
        *([f"--moe-router-group-topk {experts.group_topk}"] * (experts.num_groups > 1)),
        "--moe-grouped-gemm",
        *([f"--expert-model-parallel-size {at.expert}"] * (at.expert > 1)),
    ]


def _latent_attention(model: "Model") -> list[str]:
    at = model.latent_attention
    if at is None:
        return []
    return [
        "--multi-latent-attention",
        *([f"--q-lora-rank {at.query_rank}"] * (at.query_rank > 0)),
        f"--kv-lora-rank {at.kv_rank}",
        f"--qk-head-dim {at.nope_dim}",
        f"--qk-pos-emb-head-dim {at.rope_dim}",
        f"--v-head-dim {at.value_dim}",
    ]


def _windows(model: "Model") -> list[str]:
    """The tokens before a token that it attends to, and which layers attend to all."""
    if model.sliding_window is None:
        return []
    pattern = model.window_attn_skip_freq
    spelled_out = f'"{list(pattern)}"'.replace(" ", "") if isinstance(pattern, tuple) else pattern
    return [
        f"--window-size {model.sliding_window - 1},0",
        *([f"--window-attn-skip-freq {spelled_out}"] * (pattern is not None)),
    ]


def _megatron_recompute(plan: "Plan") -> list[str]:
    comments, mode = most_recomputed(plan, "Megatron-LM")
    if mode == "op":
        comments.append("# The plan recomputes every second product as torchtitan does; Megatron-LM can't.")
    if mode in ("full", "op"):
        return [*comments, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    modules = " ".join(operations_of(mode))
    return [*comments, f"--recompute-granularity selective --recompute-modules {modules}"] if modules else []


def most_recomputed(plan: "Plan", framework: str) -> tuple[list[str], str]:
    """The operations that a framework with one setting for all stages must recompute so that they fit, with a comment
    where those of the plan differ."""
    modes = set(plan.recompute)
    some = spelled(operation for mode in modes for operation in operations_of(mode))
    most = next((whole for whole in ("full", "op") if whole in modes), some)
    if len(modes) == 1:
        return [], most
    each = ", ".join(f"stages {_spans(plan, mode)} {mode}" for mode in sorted(modes))
    return [f"# The plan's stages recompute differently ({each}); {framework} has one setting for all of them."], most


def _spans(plan: "Plan", mode: str) -> str:
    indices = [index for index, found in enumerate(plan.recompute) if found == mode]
    runs = [[*run] for _, run in groupby(indices, key=lambda index: index - indices.index(index))]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def expect_plain(plan: "Plan", framework: str) -> None:
    """InputError where the plan has frozen weights or trains on chunks of documents."""
    if plan.job.data.packing is not None:
        raise InputError(
            f"{framework} has no settings for chunks of documents (data.packing): every step has its own plan; "
            "train it with `farpipe train`, or plan without packing"
        )
    if plan.job.training.lora is not None:
        raise InputError(f"{framework} itself has no LoRA; plan again without training.lora")


def is_round_robin(plan: "Plan") -> bool:
    """True if the stages go round the ranks, and not down and up again in a V."""
    return all(place.rank == index % plan.layout.pipeline for index, place in enumerate(plan.placements))


def _expect_round_robin(plan: "Plan") -> None:
    if not is_round_robin(plan):
        raise InputError(
            f"Megatron-LM can't run stages in a V, which this plan has ({plan.layout.virtual} per rank); plan again "
            "with --set schedule.method=interleaved"
        )
