"""Every row of published tables of measured steps against the cost model: FARPIPE_DATA=folder python
benchmarks/cost_model/published_steps.py; exit code 5 outside tolerance.

A folder may have any of ``measured/vtrain_*.csv`` (VIA-Research/vTrain), ``published/megatron_a100.csv``,
``published/trainings.csv`` and ``published/b200.csv`` (figures of papers and READMEs, a row each), those of
narrow_steps.py, and
``sailor/validation/clariden`` (plans of eth-easl/sailor). What a table leaves open stands here, once for each source.
"""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.cost_model.narrow_steps import NARROW
from benchmarks.shared.data import data_folder
from farpipe.core.errors import InputError, ToleranceError
from farpipe.core.spec import preset_model
from farpipe.core.strict import parse_json, read_text, validate
from farpipe.planning.planner.reference_points import ReferenceGroup, ReferencePoint
from farpipe.planning.planner.validation import validate_groups

SELENE: Final = {"site_link_latency": "14 us", "site_link_bandwidth": "200 Gbit/s"}
"""DGX A100 with an HDR InfiniBand port for each device."""
EOS: Final = {"site_link_latency": "14 us", "site_link_bandwidth": "400 Gbit/s"}
"""DGX H100 with an NDR port for each device."""
ERA_2021: Final = {"flash_attention": False, "dropout": True, "overlap": False, "precision": "fp16"}
"""Megatron-LM as SC21 and Korthikanti et al. used it."""
SIZES: Final = (1, 2, 4, 8)
"""Microbatch sizes to try where a table has none."""
VIRTUALS: Final = (1, 2, 3, 4, 6, 8)
Row = Mapping[str, str]


def load_published(folder: Path | str) -> tuple[ReferenceGroup, ...]:
    """Every row of the tables in `folder` that can be predicted; InputError where there is none, or one is damaged."""
    base, found = Path(folder), []
    for name, (tolerance, memory_tolerance, source, read) in SOURCES.items():
        points = tuple(validate(ReferencePoint, point, f"{base}: {name}") for point in read(base))
        if points:
            found.append(ReferenceGroup(name, tolerance, source, points, memory_tolerance, LEFT_OUT.get(name)))
    if not found:
        raise InputError(f"{folder}: none of the tables {', '.join(SOURCES)} is in it")
    return tuple(found)


def _rows(path: Path) -> Iterator[Row]:
    if path.is_file():
        yield from csv.DictReader(read_text(path).splitlines())


def _vtrain(path: str, recompute: str) -> Callable[[Path], Iterator[dict[str, Any]]]:
    def read(base: Path) -> Iterator[dict[str, Any]]:
        for row in _rows(base / path):
            values = [float(cell) for cell in list(row.values())]
            size, _, batch, micro, hidden, heads, layers, length, tensor, data, pipeline, step_ms = values
            yield {
                "model": f"GPT-{size:g}B" if path.endswith("multi_node.csv") else f"GPT-{layers:g}x{hidden:g}",
                **_counts(num_layers=layers, hidden=hidden, num_heads=heads, sequence_length=length),
                **_counts(global_batch=batch, microbatch_size=micro, tensor=tensor, data=data, pipeline=pipeline),
                **(ERA_2021 | SELENE | {"vocab_size": 51200, "recompute": recompute, "device": "a100-80gb"}),
                "step_s": step_ms / 1000,
            }

    return read


def _single_node(base: Path) -> Iterator[dict[str, Any]]:
    """Its table has no size of the model in front; taken without recomputation, see docs/reference/cost-model.md."""
    for row in _rows(base / "measured" / "vtrain_a100_single_node.csv"):
        values = [float(cell) for cell in row.values()]
        _, batch, micro, hidden, heads, layers, length, tensor, data, pipeline, step_ms = values
        yield {
            "model": f"GPT-{layers:g}x{hidden:g}",
            **_counts(num_layers=layers, hidden=hidden, num_heads=heads, sequence_length=length),
            **_counts(global_batch=batch, microbatch_size=micro, tensor=tensor, data=data, pipeline=pipeline),
            **(ERA_2021 | SELENE | {"vocab_size": 51200, "recompute": "none", "device": "a100-80gb"}),
            "step_s": step_ms / 1000,
        }


def _counts(**values: float) -> dict[str, int]:
    return {name: int(value) for name, value in values.items()}


def _megatron(row: Row) -> dict[str, Any]:
    """Keys that rows of Megatron's publications have in common."""
    layers, hidden, heads, length = (int(row[key]) for key in ("layers", "hidden", "heads", "seq"))
    virtual = int(row["VPP"]) if row["VPP"].isdigit() else None
    size = int(row["mbs"]) if row["mbs"].isdigit() else None
    pipeline = int(row["PP"])
    return {
        "model": row["model"],
        **_counts(num_layers=layers, hidden=hidden, num_heads=heads, sequence_length=length),
        "vocab_size": int(row["vocab"] or 51200),
        **_counts(tensor=int(row["TP"]), pipeline=pipeline, data=int(row["DP"]), global_batch=int(row["gbs"])),
        "microbatch_size": size or SIZES,
        "virtual": virtual or ([1] if pipeline == 1 else [v for v in VIRTUALS if not layers % (v * pipeline)] or [1]),
        "step_s": float(row["iter_s"]),
    }


def _a100(word: str) -> Callable[[Path], Iterator[dict[str, Any]]]:
    """Rows on A100 whose source has `word`."""

    def read(base: Path) -> Iterator[dict[str, Any]]:
        seen = set()
        for name in ("megatron_a100.csv", "trainings.csv"):
            for row in _rows(base / "published" / name):
                if word in row["source"] and tuple(row.values()) not in seen:
                    seen.add(tuple(row.values()))
                    selective = row["recompute"].startswith("selective")
                    how = {"recompute": "selective" if selective else "full", "sequence_parallel": selective}
                    yield _megatron(row) | ERA_2021 | SELENE | how | {"device": "a100-80gb"}

    return read


def _h100(base: Path) -> Iterator[dict[str, Any]]:
    """Megatron-LM's README: flash attention, sequence parallelism, distributed optimizer, everything overlapped."""
    for row in _rows(base / "published" / "trainings.csv"):
        if row["source"].startswith("Megatron-LM README"):
            how = {"flash_attention": True, "sequence_parallel": True, "zero": 1, "recompute": "none"}
            how["cross_entropy_loss_fusion"] = False  # a switch that is off unless it is given
            yield _megatron(row) | EOS | how | {"device": "h100-sxm"}


def _llama(row: Row, name: str, **more: Any) -> dict[str, Any]:
    model = preset_model(name)
    shape = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn_hidden", "gated_mlp", "vocab_size")
    return {
        "model": row["model"].split()[0],
        **{key: getattr(model, key) for key in (*shape, "tied_embeddings")},
        "sequence_length": int(row["seq"]),
        **_counts(tensor=int(row["TP"]), pipeline=int(row["PP"]), context=int(row["CP"] or 1)),
        "flash_attention": True,
        "sequence_parallel": True,
        "step_s": float(row["iter_s"]),
        "device": "h100-sxm",
        **EOS,
        **more,
    }


def _llama_3(base: Path) -> Iterator[dict[str, Any]]:
    """Llama 3's own training (arXiv 2407.21783, table 4): gradients and optimizer divided, no recomputation."""
    for row in _rows(base / "published" / "trainings.csv"):
        if row["source"].startswith("Llama3"):
            data, each = int(row["DP"]), int(row["gbs"].removesuffix("/DP"))
            batch = {"data": data, "global_batch": data * each, "microbatch_size": 1}
            yield _llama(row, "llama-3-405b", **batch, virtual=VIRTUALS, zero=1, recompute="none")


def _bridge(base: Path) -> Iterator[dict[str, Any]]:
    """Megatron-Bridge's dense fp8 rows; those without tensor and pipeline parallelism are FSDP."""
    for row in _rows(base / "published" / "trainings.csv"):
        if row["source"].startswith("Megatron-Bridge") and "FP8" in row["reported"]:
            name = "llama-3-8b" if "8B" in row["model"] else "llama-3-405b"
            degrees = int(row["TP"]) * int(row["PP"]) * int(row["CP"] or 1)
            batch = {"data": int(row["GPUs"]) // degrees, "global_batch": int(row["gbs"])}
            virtual = int(row["VPP"]) if row["VPP"].isdigit() else 1
            how = {"zero": 3 if degrees == 1 else 1, "recompute": "none", "matmul": "fp8", "tp_comm_overlap": True}
            how["framework"] = "megatron"
            yield _llama(row, name, **batch, **how, microbatch_size=int(row["mbs"]), virtual=virtual)


def _all_h100(base: Path) -> Iterator[dict[str, Any]]:
    yield from _h100(base)
    yield from _llama_3(base)
    yield from _bridge(base)


def _torchtitan(base: Path) -> Iterator[dict[str, Any]]:
    """FSDP2 on H100s held to 500 W, 8B with recomputation by operation."""
    for row in _rows(base / "published" / "trainings.csv"):
        if row["source"].startswith("torchtitan"):
            how: dict[str, Any] = {"recompute": "full" if "8B" not in row["model"] else "op", "zero": 3}
            how["cross_entropy_loss_fusion"] = False  # torch.compile took the layers alone then
            narrow = "float8" in row["schedule"] or "8B" not in row["model"]  # the long 405B rows continue a float8 one
            if int(row["PP"]) > 1:  # weights are not gathered again for each microbatch then
                how |= {"zero": 1, "framework": "pytorch"}
            how["matmul"] = "fp8" if narrow else "same"
            how["kernels"] = "fused" if narrow or "compile" in row["schedule"] else "eager"
            name = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3-405b"}[row["model"].split("-")[1]]
            data, batch = int(row["DP"]), int(row["gbs"])
            # as many microbatches as ranks, torchtitan's default then
            batches = {"data": data, "global_batch": batch, "microbatch_size": batch // data // int(row["PP"])}
            yield _llama(row, name, **how, **batches) | {"device": "h100-96gb-500w"}


def _b200(base: Path) -> Iterator[dict[str, Any]]:
    for row in _rows(base / "published" / "b200.csv"):
        data, count, size = (int(row[key]) for key in ("DP", "microbatches", "mbs"))
        shape = {"num_layers": "layers", "hidden": "hidden", "num_heads": "heads", "num_kv_heads": "kv_heads"}
        rest = {"ffn_hidden": "ffn", "vocab_size": "vocab", "sequence_length": "seq", "tensor": "TP", "pipeline": "PP"}
        yield {
            "model": row["model"].replace(" cut to ", "/").replace(" layers", ""),
            **{ours: int(row[theirs]) for ours, theirs in (shape | rest).items()},
            "data": data,
            "microbatch_size": size,
            "global_batch": data * count * size,
            "gated_mlp": True,
            "tied_embeddings": False,
            "zero": 1,
            "recompute": "none",
            "flash_attention": True,
            **(EOS | {"sequence_parallel": True, "overlap": False, "device": "b200"}),
            "step_s": float(row["step_ms"]) / 1000,
            "memory_bytes": float(row["max_memory_gib"]) * 2**30,
        }


ZERO_BUBBLE_ORDERS: Final = {"1F1B": None, "1F1B-I": "interleaved", "ZB-1p": "zb-1p", "ZB-2p": "zb-2p"}


def _zero_bubble_times(base: Path) -> Iterator[dict[str, Any]]:
    """With the published times of F, I and W, so that the orders and what is around them are tested alone."""
    for point, row in zip(_zero_bubble(base), _zero_bubble_rows(base), strict=True):
        times = row["reported"].split(" ms ")[1].split("/")[:3]
        yield point | {"rank_s": [float(time) / 1000 for time in times]}


def _zero_bubble_rows(base: Path) -> Iterator[Row]:
    rows = _rows(base / "published" / "trainings.csv")
    return (row for row in rows if row["source"].startswith("Qi ICLR24"))


def _zero_bubble(base: Path) -> Iterator[dict[str, Any]]:
    """The first and the last rank have a layer less, for embedding and head (arXiv 2401.10241, section 5); a vocabulary
    of 32,000 is what its numbers of parameters leave room for."""
    for row in _zero_bubble_rows(base):
        pipeline, layers = int(row["PP"]), int(row["layers"])
        interleaved = row["schedule"] == "1F1B-I"
        each = (layers + 2) // pipeline
        inner = [1] * layers if interleaved else [each] * (pipeline - 2)
        ends = [0] if interleaved else [each - 1]
        yield (
            _megatron(row)
            | ERA_2021
            | {
                **(SELENE | {"recompute": "none", "device": "a100-80gb", "vocab_size": 32000}),
                "virtual": each if interleaved else 1,
                "schedule": ZERO_BUBBLE_ORDERS[row["schedule"]],
                "layers": ends + inner + ends,
            }
        )


def _sailor_gh200(base: Path) -> Iterator[dict[str, Any]]:
    """OPT-350M in 32 bit with TF32, four GH200 to a machine, 200 Gbit/s for each between machines (Alps)."""
    for path in sorted((base / "sailor" / "validation" / "clariden").rglob("*.json")):
        plan = parse_json(read_text(path), str(path))
        pipeline = plan["pipeline_list"][0]
        layers = [len(stage) for stage in pipeline["layers_per_stage"]]
        layers[0] -= 1  # the embedding and the head count as layers there
        layers[-1] -= 1
        yield {
            "model": f"OPT-350M {path.stem.removeprefix('plan_config_')}",
            "num_layers": 24,
            "hidden": 1024,
            "num_heads": 16,
            "vocab_size": 50272,
            "sequence_length": 2048,
            "tied_embeddings": False,
            "flash_attention": False,
            "recompute": "none",
            "overlap": False,
            "precision": "fp32",
            "matmul": "tf32",
            "cross_entropy_loss_fusion": False,
            "device": "gh200",
            "devices_per_machine": 4,
            "tensor": 4,
            **(SELENE | {"pipeline": len(layers), "data": pipeline["dp"][0], "layers": layers}),
            "global_batch": plan["gbs"],
            "microbatch_size": plan["mbs"],
            "step_s": plan["real"],
            "memory_bytes": float(plan["max_mem"]),
            "context_bytes": GH200_CONTEXT_BYTES,
        }


LEFT_OUT: Final[dict[str, float]] = {
    "korthikanti-2022": 0.033,
    "vtrain-multi-node": 0.069,
    "narayanan-sc21": 0.075,
    "zero-bubble": 0.059,
    "zero-bubble-shapes": 0.143,
    "h100": 0.085,
    "mlperf-hopper": 0.093,
    "mlperf-blackwell": 0.061,
    "lora": 0.085,
    "bridge-dense": 0.045,
    "bridge-experts": 0.079,
    "b200": 0.027,
    "b200-experts": 0.025,
    "b200-context": 0.024,
    "sailor-opt-350-gh200": 0.081,
}
"""Mean error when the constants were fitted to other sources alone (fit_efficiency.py). SC21 and the
GH200 plans never were fitted, of zero-bubble one constant was (`stage_change_s`)."""
GH200_CONTEXT_BYTES: Final = 4.3 * 2**30
"""Median over the 15 plans of what was measured beyond the model's bytes: driver, NCCL, allocator. Fitted to them."""
SOURCES: Final[dict[str, tuple[float, float | None, str, Callable[[Path], Iterator[dict[str, Any]]]]]] = {
    "korthikanti-2022": (0.04, None, "arXiv 2205.05198, tables 3 and 5", _a100("Korthikanti")),
    "vtrain-multi-node": (0.08, None, "VIA-Research/vTrain", _vtrain("measured/vtrain_a100_multi_node.csv", "full")),
    "vtrain-single-node": (0.08, None, "VIA-Research/vTrain", _single_node),
    "narayanan-sc21": (0.08, None, "arXiv 2104.04473, tables 1 and 2", _a100("SC21")),
    "zero-bubble": (0.08, None, "arXiv 2401.10241, tables 4 and 9, with its times of F, I and W", _zero_bubble_times),
    "zero-bubble-shapes": (0.17, None, "arXiv 2401.10241, table 4, from the models' shapes alone", _zero_bubble),
    "h100": (0.08, None, "Megatron-LM's README, arXiv 2407.21783 table 4, Megatron-Bridge (fp8)", _all_h100),
    "torchtitan-h100": (0.25, None, "torchtitan, benchmarks/llama3_h100_202412", _torchtitan),
    "b200": (0.08, 0.04, "SimuMax's public table", _b200),
    "sailor-opt-350-gh200": (0.10, 0.08, "eth-easl/sailor, validation/clariden (MIT licence)", _sailor_gh200),
    **NARROW,
}
"""By the name of its group: tolerances of time and memory, where it is from, and how it is read."""


def main() -> None:
    """Print every row, measured and predicted."""
    report = validate_groups(load_published(data_folder("measured/ and published/")))
    print(report.table())
    if not report.passed:
        sys.exit(ToleranceError.exit_code)


if __name__ == "__main__":
    main()
