"""A small training of two sites with two processes each, which share layers (tensor 2), weights (FSDP 2), sequences
(context 2) or experts (expert 2, also beside layers), or with one each (alone)."""

from pathlib import Path
from typing import Any

from benchmarks.shared.jobs import two_sites

SITES = ("west", "east")
SHARES = {
    "tensor 2": "tensor = 2\ndata = 1",
    "FSDP 2": 'tensor = 1\ndata = 2\nreplicas = "inside"',
    "context 2": 'tensor = 1\ndata = 1\ncontext = 2\ncontext_exchange = "ulysses"',
    "expert 2": 'tensor = 1\ndata = 2\nexpert = 2\nreplicas = "inside"',
    "tensor 2, expert 2": "tensor = 2\ndata = 1\nexpert = 2",
    "alone": "tensor = 1\ndata = 1",
}
"""Ways to share, and the degrees of a job."""
REPLICAS = ("FSDP 2", "expert 2")
"""Ways for which both processes of a site are replicas."""
OF_FOUR = tuple(way for way in SHARES if way != "alone")
"""Ways of four processes."""
OF_EXPERTS = ("expert 2", "tensor 2, expert 2", "alone")
"""Ways for models with experts."""
EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "router_aux_loss_coef": 0.0,
    "decoder_sparse_step": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "num_key_value_heads": 4,
}
"""Sizes of models with experts, by transformers' names; of each class those that it has."""
JOB = """\
[model]
hugging_face = "{model}"

[data]
source = "{text}"

[training]
sequence_length = {length}
global_batch = {batch}
microbatch_size = {size}
precision = "fp32"
kernels = "eager"
zero = {zero}
{training}

{sites}
[layout]
pipeline = 2
sites = ["west", "east"]
{layout}
"""


def write_model(folder: Path, num_layers: int = 6, kind: str = "qwen3", **sizes: int) -> Path:
    """A small model of transformers' type `kind` with its own head, as transformers writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {"hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": False, "max_position_embeddings": 512}
    layers = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    if kind != "qwen3":
        known = AutoConfig.for_model(kind).to_dict()
        layers, small = {}, {key: value for key, value in (small | layers | EXPERTS).items() if key in known}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small | layers | sizes)).save_pretrained(folder)
    return folder


def plan_of(model: Path, shares: str, shape: tuple[int, int, int], method: str = "1f1b", training: str = "") -> Any:
    """Plan of a training on `shape`, (global batch, microbatch, tokens), of the model in the folder `model`."""
    from farpipe import planning
    from farpipe.core.spec import parse_job

    text = model.parent / "text.txt"
    text.write_text("many hands make light work, and many sites a long way. " * 2000)
    batch, size, length = shape
    job = parse_job(
        JOB.format(
            model=model,
            text=text,
            length=length,
            batch=batch,
            size=size,
            zero=3 if shares == "FSDP 2" else 1,
            training=training,
            sites=two_sites(*SITES, 1 if shares == "alone" else 2),
            layout=SHARES[shares],
        )
    )
    return planning.plan(job.model_copy(update={"schedule": method}))
