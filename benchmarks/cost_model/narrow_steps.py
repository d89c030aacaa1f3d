"""Readers of published steps in FP8 and FP4, with experts and with context parallelism, for published_steps.py.

MLPerf Training's logs, Megatron-Bridge's performance pages and SimuMax's second table, a point for each row. What a
table leaves open stands here, once for each source.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from farpipe.core.spec import preset_model
from farpipe.core.strict import read_text

Row = Mapping[str, str]
Reader = Callable[[Path], Iterator[dict[str, Any]]]

PORTS: Final = {"h100": 400, "h200": 400, "b200": 400, "gb200": 400, "b300": 800, "gb300": 800}
"""Gbit/s of the network port of each device; AMD's rows have one machine each."""
NVLINK_DOMAIN: Final = 64
"""Devices of a GB200 or GB300 NVL72 rack that jobs in powers of two use."""
DEVICES: Final = {
    "H100-SXM5-80GB": "h100-sxm",
    "H200-SXM5-141GB": "h200",
    "(B200-SXM-180GB)": "b200",
    "(GB200)": "gb200",
}
DEVICES_2025: Final = {"(B300-SXM-270GB)": "b300", "(GB300)": "gb300", "MI350X": "mi350x", "MI355X": "mi355x"}
MATMULS: Final = {"fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "bf16": "same"}
MEGATRON: Final = {"framework": "megatron", "flash_attention": True, "sequence_parallel": True, "recompute": "none"}
MLPERF: Final = {"GPT-3 175B": "gpt3-175b", "Llama-3.1-405B": "llama-3-405b", "Llama-3.1-8B": "llama-3-8b"}
NVIDIA_FP8: Final = {"fp8_param_gather": True, "grad_reduce_in_fp32": False}
"""As MLPerf's implementations (FP8_PARAMS, grad_reduce_in_fp32=False) and Megatron-Bridge's performance recipes say."""


def rows(path: Path) -> Iterator[Row]:
    """Rows of a table; none where the folder lacks it."""
    if path.is_file():
        yield from csv.DictReader(read_text(path).splitlines())


def network(device: str, num_devices: int) -> dict[str, Any]:
    family = device.removesuffix("-sxm")
    inside = {72: 72}.get(num_devices, NVLINK_DOMAIN) if family.startswith("gb") else 8
    port = f"{PORTS.get(family, 400)} Gbit/s"
    return {"device": device, "devices_per_machine": inside, "site_link_latency": "14 us", "site_link_bandwidth": port}


def slots(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage where embedding and loss count as a layer each when layers are dealt (Megatron-Core)."""
    if num_stages == 1:
        return [num_layers]
    each = (num_layers + 2) // num_stages
    return [each - 1, *[each] * (num_stages - 2), each - 1]


def mlperf(wanted: Callable[[str, str], bool], base: Path) -> Iterator[dict[str, Any]]:
    """Rows of MLPerf Training whose device and model are `wanted`; those of unknown precision are left out."""
    for row in rows(base / "published" / "mlperf_pretraining_steps.csv"):
        words = row["gpu"].split()
        device = next((name for word, name in (DEVICES | DEVICES_2025).items() if word in words), "")
        if not wanted(device, row["model"]) or row["precision"] not in MATMULS:
            continue
        degrees = {"tensor": "TP", "pipeline": "PP", "context": "CP", "data": "DP"}
        virtual = int(row["VPP"] or 1)
        yield {
            "preset": MLPERF[row["model"]],
            "model": f"{row['model']} {row['GPUs']} {device} {row['precision']}",
            "vocab_size": int(row["vocab"]),
            "sequence_length": int(row["seq"]),
            **{ours: int(row[theirs] or 1) for ours, theirs in degrees.items()},
            "virtual": virtual,
            "layers": slots(126, int(row["PP"]) * virtual) if "405B" in row["model"] else None,
            "microbatch_size": int(row["mbs"]),
            "global_batch": int(row["gbs"]),
            "zero": 1,
            "matmul": MATMULS[row["precision"]],
            **MEGATRON,
            **network(device, int(row["GPUs"])),
            "step_s": float(row["step_s"]),
            **(NVIDIA_FP8 if device[:2] != "mi" else {}),
            "tp_comm_overlap": device[:2] != "mi",
            "cuda_graphs": replays_graphs(row, device),
            **_logged_memory(row["max_memory_gb"]),
        }


LORA: Final = {"rank": 16, "target_modules": ["linear_qkv", "linear_proj"], "dropout": 0.1, "base_weights": "fp8"}
"""As megatron_gpt_peft_tuning_config.yaml of training_results_v4.0 says: adapter_dim, target_modules ['attention'],
adapter_dropout, fp8_params with disable_parameter_transpose_cache."""
LORA_DEVICES: Final = {"H200-NVL-141GB": "h200-nvl", "H100-SXM-80GB": "h100-sxm", "L40S": "l40s"}
LORA_DEVICES |= {"MI300X": "mi300x", "MI325X": "mi325x"}


def mlperf_lora(base: Path) -> Iterator[dict[str, Any]]:
    """Rows of MLPerf's LoRA of Llama-2-70B; those of unknown precision are left out."""
    known = DEVICES | DEVICES_2025 | LORA_DEVICES
    for row in rows(base / "published" / "mlperf_llama2_70b_lora_steps.csv"):
        device = next((name for word, name in known.items() if word in row["gpu"].split()), "")
        if row["precision"] not in MATMULS or not device:
            continue
        degrees = {"tensor": "TP", "pipeline": "PP", "context": "CP", "data": "DP"}
        release = row["source"].partition("training_results_v")[2][:3]
        yield {
            "preset": "llama-2-70b",
            "model": f"LoRA v{release} {row['GPUs']} {device} {row['precision']}",
            "sequence_length": int(row["seq"]),
            **{ours: int(row[theirs]) for ours, theirs in degrees.items()},
            "microbatch_size": int(row["mbs"]),
            "global_batch": int(row["gbs"]),
            "zero": 1,
            "matmul": MATMULS[row["precision"]],
            "lora": LORA,
            "cross_entropy_loss_fusion": False,  # train.py of training_results_v5.0 and v5.1
            "tp_comm_overlap": device[:2] != "mi",
            "fp8_dot_product_attention": device[:2] != "mi",
            # FP8_ACT of the submissions' configurations: set with few context-parallel devices, not with eight
            "activation_func_fp8_input_store": int(row["CP"]) < 8,
            **MEGATRON,
            **network(device, int(row["GPUs"])),
            "devices_per_machine": 4 if device in ("l40s", "h200-nvl") else network(device, 8)["devices_per_machine"],
            "step_s": float(row["step_s"]),
            "cuda_graphs": device[:2] != "mi" and release >= "4.1",
            **_logged_memory(row["max_memory_gb"]),
        }


def replays_graphs(row: Row, device: str) -> bool:
    """True if a submission of NVIDIA replays CUDA graphs: those of 8B, and where the configuration says so."""
    return row["config_file"].endswith(("_cg.sh", "_8b.sh", "_fp4.sh")) and device[:2] != "mi"


def _logged_memory(cell: str) -> dict[str, Any]:
    """The log's figure is PyTorch's peak on the first rank, which alone writes it, in GiB.

    The unit was settled by the rows themselves: five of 405B on three devices, whose weights, gradients and state
    follow from the submission's settings, are met within 2.4 % in GiB on the first rank, and not by any other reading.
    """
    return {"memory_bytes": float(cell) * 2**30, "memory_rank": 0} if cell else {}


BRIDGE: Final = {
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3-405b",
    "DeepSeekV3": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
}


WHOLE_ITERATION: Final = ("overlap_moe_expert_parallel_comm", "cuda_graphs", "fp8_dot_product_attention")
"""Switches of the recipes that replay a whole iteration."""


def _recipe(model: str, device: str, expert: int, release: str, precision: str) -> dict[str, Any]:
    """What Megatron-Bridge's recipes say of a row with experts beside its degrees: scripts/performance/configs of
    v0.3.1 (26.02), v0.4.0 (26.04), v0.4.1 (26.04.01) and v0.5.0 (26.06), src/megatron/bridge/perf_recipes since.

    Graphs of a router alone are taken for none; those of a whole iteration came with 26.06, in MXFP8, on B300 for
    Qwen3-30B alone and on B200 for no model before 26.08.
    """
    flex, overlapped = {"moe_token_dispatcher_type": "flex"}, {"overlap_moe_expert_parallel_comm": True}
    early = device == "b200" or (device == "b300" and model != "qwen3-30b-a3b")
    whole = precision == "MXFP8" and release >= ("26.08" if early else "26.06")
    if model == "gpt-oss-120b":
        return _recipe_of_gpt_oss(device, expert, release, precision)
    if model.startswith("qwen3") and whole:
        return flex | dict.fromkeys(WHOLE_ITERATION, True)
    if model == "qwen3-30b-a3b":
        return flex | {"cuda_graphs": False}
    if model == "qwen3-235b-a22b" and device.startswith("gb"):
        return flex | {"cuda_graphs": "part"}
    if model == "qwen3-235b-a22b":
        # 26.02 names DeepEP, and is no faster than 26.04 with the all-to-all
        inside = overlapped if device.startswith("h") else {}
        return inside | {"cuda_graphs": False} | (flex if device == "b300" and release >= "26.06" else {})
    if model != "deepseek-v3":
        return {}
    # 26.04 computes the MLP of the three dense layers again on GB200, which is next to nothing
    none = device == "gb300" if whole else device == "gb200" and release.startswith("26.04")
    more: dict[str, Any] = {"recompute": "none" if none else "mla_up_proj", "mtp_num_layers": 1}
    if whole:
        more |= dict.fromkeys(WHOLE_ITERATION, True) | {"fp8_output_proj": True}
        return flex | more | {"fp8_dot_product_attention": device != "gb200"}
    if device == "b200" and expert == 32:
        return flex | more | overlapped | {"cuda_graphs": "part"}
    replayed = device == "gb200" or (device == "b300" and release >= "26.06")
    return flex | more | {"cuda_graphs": "part" if replayed else False}


def _recipe_of_gpt_oss(device: str, expert: int, release: str, precision: str) -> dict[str, Any]:
    """The same for GPT-OSS 120B."""
    flex = {"moe_token_dispatcher_type": "flex"}
    if precision == "MXFP8" and device.startswith("gb"):
        return flex | dict.fromkeys((*WHOLE_ITERATION, "fp8_output_proj"), True)
    if device.endswith("300"):
        return flex if device == "b300" and expert == 8 else {}
    again = {"recompute": "layernorm moe_act", "cuda_graphs": False}
    if device.startswith("h") or release < "26.04":
        return again
    dispatcher = flex if release.startswith("26.04") else {}
    return again | dispatcher | {"overlap_moe_expert_parallel_comm": device == "gb200"}


OFFLOADED: Final = {
    "gb200": {"cpu_offloading_num_layers": 40, "cuda_graphs": False},
    "gb300": {"cpu_offloading_num_layers": 20, "cuda_graphs": False},
}
"""Of the fully sharded rows, all of Llama-3-70B: src/megatron/bridge/perf_recipes/llama in 8 bit."""


def _dealt(model: str, num_layers: int, num_stages: int) -> list[int] | None:
    """Layers of each stage, where the recipe says them; DeepSeek's last stage has three fewer, for it predicts two
    tokens (src/megatron/bridge/recipes/deepseek/deepseek_v3.py)."""
    if model == "deepseek-v3":
        return [64 // num_stages] * (num_stages - 1) + [64 // num_stages - 3]
    return slots(num_layers, num_stages) if num_layers == 126 else None


def bridge(wanted: Callable[[str, str], bool], base: Path) -> Iterator[dict[str, Any]]:
    """Pre-training rows of Megatron-Bridge's pages whose device and model are `wanted`."""
    for row in rows(base / "published" / "megatron_bridge_performance.csv"):
        device = row["system"].removeprefix("DGX-").lower().replace("h100", "h100-sxm")
        if not row["kind"].startswith("Pre-Training") or row["model"] not in BRIDGE or not wanted(device, row["model"]):
            continue
        name = BRIDGE[row["model"]]
        tensor, pipeline, context = (int(row[key]) for key in ("TP", "PP", "CP"))
        virtual = int(row["VPP"]) if row["VPP"].isdigit() else 1
        layers, expert = preset_model(name).num_layers, int(row["EP"]) if row["EP"].isdigit() else 1
        data = int(row["GPUs"]) // (tensor * pipeline * context)
        yield {
            "preset": name,
            "model": f"{row['model']} {row['container'].split()[0]} {row['GPUs']} {device} {row['precision']}",
            "sequence_length": int(row["seq"]),
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context,
            "data": data,
            "expert": expert,
            "virtual": virtual,
            "layers": _dealt(name, layers, pipeline * virtual),
            "microbatch_size": int(row["mbs"]),
            "global_batch": int(row["gbs"]),
            "zero": 3 if row["FSDP"] not in ("", "0") else 1,
            "matmul": MATMULS[row["precision"].lower()],
            **(NVIDIA_FP8 if row["precision"] != "BF16" else {"grad_reduce_in_fp32": False}),
            "tp_comm_overlap": True,
            "cuda_graphs": not device.startswith("h"),
            **(OFFLOADED.get(device, {}) if row["FSDP"] not in ("", "0") else {}),
            **MEGATRON,
            **_recipe(name, device, expert, row["container"].split()[0], row["precision"]),
            **network(device, int(row["GPUs"])),
            "step_s": float(row["iter_s_derived"]),
        }


_MLA: Final = {"query_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
_V2: Final = {"num_experts": 160, "per_token": 6, "ffn_hidden": 1536, "shared_ffn_hidden": 3072}
_V3: Final = {"num_experts": 256, "per_token": 8, "ffn_hidden": 2048, "shared_ffn_hidden": 2048, "router_bias": 1}
_V2_SIZES: Final = {"hidden": 5120, "num_heads": 128, "head_dim": 192, "ffn_hidden": 12288, "vocab_size": 102400}
CUT: Final[dict[str, dict[str, Any]]] = {
    "DeepSeek-V2": {
        **_V2_SIZES,
        "gated_mlp": True,
        "tied_embeddings": False,
        "latent_attention": _MLA,
        "experts": _V2 | {"num_dense_layers": 1},
    },
    "DeepSeek-V3": {"preset": "deepseek-v3", "experts": _V3 | {"num_dense_layers": 1}},
    "Llama-3-70B": {"preset": "llama-3-70b"},
    "Llama-3-405B": {"preset": "llama-3-405b", "num_kv_heads": 16},
}
"""Shapes of SimuMax's models: DeepSeek-V2 as in arXiv 2405.04434, section 3.1.2; Llama 405B has 16 key heads there."""


def simumax(word: str, base: Path) -> Iterator[dict[str, Any]]:
    """Rows whose model has `word`: nothing overlapped.

    One of the four layers of a cut DeepSeek is dense: only so the state of the experts fits in both models' memory.
    """
    for row in rows(base / "published" / "simumax_b200_moe_cp.csv"):
        if word not in row["model"]:
            continue
        count, data, size = (int(row[key]) for key in ("microbatches", "DP", "mbs"))
        name = row["model"].split(" cut")[0]
        degrees = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}
        yield {
            **CUT[name],
            "num_layers": int(row["layers"]),
            "model": f"{name}/{row['layers']}",
            "sequence_length": int(row["seq"]),
            **{ours: int(row[theirs]) for ours, theirs in degrees.items()},
            "data": data,
            "microbatch_size": size,
            "global_batch": data * count * size,
            **(MEGATRON | {"zero": 1, "overlap": False}),
            **network("b200", 8),
            "step_s": float(row["step_ms"]) / 1000,
            "memory_bytes": float(row["max_memory_gib"]) * 2**30,
        }


def _hopper(device: str, _model: str) -> bool:
    return device in ("h100-sxm", "h200")


def _blackwell(device: str, _model: str) -> bool:
    return device in ("b200", "gb200", "b300", "gb300")


def _dense(device: str, model: str) -> bool:
    return "LLAMA" in model


def _experts(device: str, model: str) -> bool:
    return "LLAMA" not in model


NARROW: Final[dict[str, tuple[float, float | None, str, Reader]]] = {
    "mlperf-hopper": (0.05, 0.05, "MLPerf Training v4.1 and v5.0, H100 and H200, FP8", partial(mlperf, _hopper)),
    "mlperf-blackwell": (0.08, 0.05, "MLPerf Training v4.1 to v5.1, B200 to GB300", partial(mlperf, _blackwell)),
    "mlperf-amd": (0.12, None, "MLPerf Training v5.1, MI350X and MI355X", partial(mlperf, lambda d, m: d[:2] == "mi")),
    "lora": (0.10, 0.06, "MLPerf Training v4.0 to v5.1, LoRA of Llama-2-70B", mlperf_lora),
    "bridge-dense": (0.10, None, "Megatron-Bridge's performance pages, Llama", partial(bridge, _dense)),
    "bridge-experts": (0.10, None, "Megatron-Bridge's performance pages, experts", partial(bridge, _experts)),
    "b200-experts": (0.10, 0.06, "SimuMax's public table, DeepSeek cut to 4 layers", partial(simumax, "DeepSeek")),
    "b200-context": (0.06, 0.05, "SimuMax's public table, context parallelism", partial(simumax, "Llama")),
}
"""By the name of its group: tolerances of time and memory, where it is from, and how it is read."""
