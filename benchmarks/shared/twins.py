"""A small training of two sites with two processes each, which share layers (tensor 2), weights (FSDP 2), sequences
(context 2) or experts (expert 2)."""

from pathlib import Path
from typing import Any

from benchmarks.shared.jobs import two_sites

SITES = ("west", "east")
SHARES = {
    "tensor 2": "tensor = 2\ndata = 1",
    "FSDP 2": 'tensor = 1\ndata = 2\nreplicas = "inside"',
    "context 2": 'tensor = 1\ndata = 1\ncontext = 2\ncontext_exchange = "ulysses"',
    "expert 2": 'tensor = 1\ndata = 2\nexpert = 2\nreplicas = "inside"',
}
"""Ways to share, and the degrees of a job."""
ZERO = {"tensor 2": 1, "FSDP 2": 3, "context 2": 1, "expert 2": 1}
REPLICAS = ("FSDP 2", "expert 2")
"""Ways for which both processes of a site are replicas."""
WITH_EXPERTS = """\
num_layers = 2
hidden = 64
num_heads = 4
num_kv_heads = 2
ffn_hidden = 128
vocab_size = 256
experts = {num_experts = 8, per_token = 2, ffn_hidden = 64}
"""
JOB = (
    """\
[model]
{model}

[data]
source = "{text}"

[training]
sequence_length = {length}
global_batch = {batch}
microbatch_size = {size}
precision = "fp32"
zero = {zero}
{training}

"""
    + two_sites("west", "east", 2)
    + """\
[layout]
pipeline = 2
sites = ["west", "east"]
{layout}
"""
)


def write_model(folder: Path, num_layers: int = 6, **sizes: int) -> Path:
    """A small Qwen3 with its own head, as transformers writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {"hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": False, "max_position_embeddings": 512}
    layers = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **small | layers | sizes)).save_pretrained(folder)
    return folder


def plan_of(folder: Path, shares: str, shape: tuple[int, int, int], method: str = "1f1b", training: str = "") -> Any:
    """Plan of a training on `shape`, (global batch, microbatch, tokens), of the model that is in ``folder/model``."""
    from farpipe import planning
    from farpipe.core.spec import parse_job

    text = folder / "text.txt"
    text.write_text("many hands make light work, and many sites a long way. " * 2000)
    batch, size, length = shape
    job = parse_job(
        JOB.format(
            model=WITH_EXPERTS if shares == "expert 2" else f'hugging_face = "{folder / "model"}"',
            text=text,
            length=length,
            batch=batch,
            size=size,
            zero=ZERO[shares],
            training=training,
            layout=SHARES[shares],
        )
    )
    return planning.plan(job.model_copy(update={"schedule": method}))
