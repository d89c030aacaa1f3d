"""Readers of steps that no constant was fitted to when they came: rows of turn4_rows.csv and of torchtitan's pages.

A row becomes a point by what its source says of all its runs, which stands here once for each source.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.cost_model.narrow_steps import MATMULS, MEGATRON, NVIDIA_FP8, network, rows, slots
from farpipe.core.spec import preset_model

Row = Mapping[str, str]

PRESETS: Final = {
    "Qwen3-30B": "qwen3-30b-a3b",
    "Q30": "qwen3-30b-a3b",
    "Qwen3-235B": "qwen3-235b-a22b",
    "Q235": "qwen3-235b-a22b",
    "GPT-OSS-120B": "gpt-oss-120b",
    "OSS120": "gpt-oss-120b",
    "DeepSeek-V3": "deepseek-v3",
    "DSV3": "deepseek-v3",
    "Llama3-8B": "llama-3-8b",
    "Llama3-70B": "llama-3-70b",
    "Llama-3.1-8B": "llama-3-8b",
    "Llama-3.1-70B": "llama-3-70b",
    "8B 25": "llama-3-8b",
    "70B 25": "llama-3-70b",
    "405B 25": "llama-3-405b",
}
DEGREES: Final = {"tensor": "TP", "pipeline": "PP", "context": "CP", "data": "DP", "expert": "EP"}
KIMI_K2: Final[dict[str, Any]] = {
    "hidden": 7168,
    "num_layers": 61,
    "num_heads": 64,
    "head_dim": 192,
    "ffn_hidden": 18432,
    "vocab_size": 163840,
    "gated_mlp": True,
    "tied_embeddings": False,
    "latent_attention": {"query_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
    "experts": {
        "num_experts": 384,
        "per_token": 8,
        "ffn_hidden": 2048,
        "shared_ffn_hidden": 2048,
        "router_bias": 1,
        "num_dense_layers": 1,
    },
}
"""Shape of moonshotai/Kimi-K2-Base, by its config.json."""


def _shape(row: Row) -> dict[str, Any]:
    """The model of a row: a preset, or the row's own sizes."""
    if "Kimi" in row["model"]:
        return KIMI_K2
    preset = next((name for word, name in PRESETS.items() if word in row["model"]), None)
    if preset is not None:
        return {"preset": preset}
    sizes = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads", "ffn_hidden": "ffn"}
    return {ours: int(row[theirs]) for ours, theirs in (sizes | {"hidden": "hidden"}).items()} | {
        "vocab_size": int(row["vocab"] or 256),  # a classification has no head to speak of
        "gated_mlp": row["model"].startswith("InternLM"),
        "tied_embeddings": row["model"].startswith("MPT"),
    }


def _preset_experts(shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """The experts of a shape's preset."""
    model = preset_model(shape["preset"]) if "preset" in shape else None
    return None if model is None or model.experts is None else model.experts.model_dump()


def _point(row: Row) -> dict[str, Any]:
    """What every table says in the same words."""
    note = row["note"]
    return {
        **_shape(row),
        "model": row["model"],
        "sequence_length": int(row["seq"]),
        **{ours: int(row[theirs] or 1) for ours, theirs in DEGREES.items()},
        "virtual": int(row["VPP"] or 1),
        "microbatch_size": int(row["mbs"]),
        "global_batch": int(row["gbs"]),
        "precision": {"fp32": "fp32", "fp16": "fp16"}.get(row["precision"], "bf16"),
        "matmul": MATMULS.get(row["precision"], "same"),
        "recompute": row["recompute"],
        "zero": int(row["zero"]),
        "moe_token_dispatcher_type": "flex" if "DeepEP" in note else "alltoall",
        "overlap_moe_expert_parallel_comm": "expert exchange overlapped" in note,
        "flash_attention": True,
        "step_s": float(row["step_s"]),
        **network(row["gpu"], int(row["GPUs"])),
        "devices_per_machine": int(row["gpus_per_node"]),
    }


def _automodel(row: Row) -> dict[str, Any]:
    """PyTorch with Transformer Engine's layers; the table's LoRA of all linear maps.

    Its benchmarks route with FakeBalancedGate, which gives each token neighbouring experts, k of them beginning at a
    multiple of k: one of so many groups.
    """
    more: dict[str, Any] = {"framework": "pytorch"}
    if "LoRA" in row["model"]:
        more |= {"lora": {"rank": 16}}
    shape = _shape(row)
    if (experts := shape.get("experts") or _preset_experts(shape)) is not None:
        more["experts"] = experts | {"num_groups": experts["num_experts"] // experts["per_token"], "group_topk": 1}
    return more | {"sequence_parallel": int(row["TP"]) > 1}


def _megatron(row: Row) -> dict[str, Any]:
    """Megatron-LM and Megatron-Bridge as their performance recipes set them; graphs hold all but the experts."""
    narrow = row["precision"] != "bf16"
    more: dict[str, Any] = dict(MEGATRON) | {"recompute": row["recompute"], "tp_comm_overlap": True}
    more |= NVIDIA_FP8 if narrow else {"grad_reduce_in_fp32": False}
    more["cuda_graphs"] = "part" if "CUDA graphs" in row["note"] else False
    if "offloaded" in row["note"]:
        more |= {"cpu_offloading_num_layers": 40}
    virtual, pipeline = int(row["VPP"] or 1), int(row["PP"])
    if "405B" in row["model"]:
        more["layers"] = slots(126, pipeline * virtual)
    if "DSV3" in row["model"]:
        more |= {"mtp_num_layers": 1, "layers": _deepseek_layers(pipeline * virtual)}
    return more


def _deepseek_layers(num_stages: int) -> list[int]:
    """Layers of DeepSeek-V3's stages; the last one has the further token's layer and the loss (Megatron-Bridge)."""
    if num_stages == 32:
        return [2] * 30 + [1, 0]
    return [64 // num_stages] * (num_stages - 1) + [64 // num_stages - 3]


def _primus(row: Row) -> dict[str, Any]:
    return {"sequence_parallel": True, "tp_comm_overlap": False}


def _internevo(row: Row) -> dict[str, Any]:
    """Four ports of 100 Gbit/s for eight devices; gradients are summed in 16 bit.

    PyTorch 1.13 without a compiler and FlashAttention 1.0.5 (InternLM's doc/en/install.md); parameters are not gathered
    beside computing (``overlap_sync_param=False`` in configs/7B_sft.py).
    """
    inside = "in machine" in row["model"]
    how = {"site_link_bandwidth": "50 Gbit/s", "grad_reduce_in_fp32": False, "zero": 1, "kernels": "eager"}
    how |= {"attention_kernel": "flash-1", "overlap_param_gather": False}
    return how | ({"zero_group_size": 8 // int(row["TP"])} if inside else {})


def _foundry(row: Row) -> dict[str, Any]:
    """PyTorch's FSDP without torch.compile; sweep.sh of the benchmark takes attention in Triton for long sequences."""
    port = "400 Gbit/s" if row["gpu"] == "h100-sxm" else "200 Gbit/s"
    return {"kernels": "eager", "attention_kernel": "flash-1", "site_link_bandwidth": port}


def _deepseek(row: Row) -> dict[str, Any]:
    layers = _deepseek_layers(int(row["PP"]) * int(row["VPP"] or 1))
    return NVIDIA_FP8 | {"mtp_num_layers": 1, "schedule": row["schedule"], "layers": layers}


def _dtfm(row: Row) -> dict[str, Any]:
    """Megatron-LM of 2020 on one machine of V100s: no flash attention, nothing overlapped."""
    how = {"flash_attention": False, "overlap": False, "cross_entropy_loss_fusion": False, "dropout": True}
    return how | {"device": "v100-16gb"}


READERS: Final = {
    "automodel": _automodel,
    "modelzoo": _megatron,
    "bridge25-dense": _megatron,
    "bridge25-experts": _megatron,
    "primus": _primus,
    "internevo": _internevo,
    "foundry-h100": _foundry,
    "foundry-a100": _foundry,
    "deepseek-v3-report": _deepseek,
    "dtfm-megatron": _dtfm,
}
"""By the name of the benchmark; pipelines over slow links are compared elsewhere: their links are not one site's."""


def strangers(name: str, base: Path) -> Iterator[dict[str, Any]]:
    """Points of one benchmark of turn4_rows.csv."""
    for row in rows(base / "published" / "turn4_rows.csv"):
        if row["benchmark"] == name:
            yield _point(row) | READERS[name](row)


def async_tp(base: Path) -> Iterator[dict[str, Any]]:
    """torchtitan's pages of 2025: tensor parallelism over a machine, and 8B on H200."""
    for row in rows(base / "published" / "torchtitan_benchmarks.csv"):
        if "202412" in row["source"]:
            continue
        batch, tokens = int(row["global_batch"]), int(row["seq"]) * int(row["global_batch"])
        yield {
            "preset": {"8B": "llama-3-8b", "70B": "llama-3-70b"}[row["model"].split("-")[-1]],
            "model": f"{row['model']} {row['GPUs']} {row['precision']}",
            "sequence_length": int(row["seq"]),
            "microbatch_size": int(row["local_batch"]),
            "global_batch": batch,
            "data": int(row["FSDP"]),
            "tensor": int(row["TP"]),
            "pipeline": 1,
            "zero": 3,
            "recompute": "full" if row["activation_checkpointing"] == "full" else "op",
            "matmul": {"bf16": "same", "fp8 rowwise": "fp8_rowwise"}.get(row["precision"], "fp8"),
            "sequence_parallel": True,
            "flash_attention": True,
            "cross_entropy_loss_fusion": False,
            **network("h200" if row["gpu"] == "H200" else "h100-sxm", int(row["GPUs"])),
            "device": "h200" if row["gpu"] == "H200" else "h100-96gb-500w",
            "step_s": tokens / float(row["tokens_per_s_per_gpu"]) / int(row["GPUs"]),
        }
