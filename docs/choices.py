"""Write the table of what the planner may choose and what the engine runs into docs/status.md, by asking the gate that
`plan` and `train` share: ``python docs/choices.py``."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from farpipe.core.spec import Job, Lora, Model, load_job, parse_job
from farpipe.core.spec.local_steps import LocalSteps
from farpipe.core.spec.model import Experts
from farpipe.core.spec.recompute import operations_of, possible_operations
from farpipe.planning.planner.engine import plan_obstacle
from farpipe.planning.planner.find import find
from farpipe.planning.planner.plan import Plan

PAGE: Final = Path(__file__).parent / "status.md"
HEAD: Final = (
    "| choice | farpipe's decoder | a Llama of transformers | its Mixtral | its DeepSeek-V3 | your own module |\n"
)
LINE: Final = "|---|---|---|---|---|---|\n"
SHAPE: Final = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}
CONFIGS: Final = (
    {"model_type": "llama", **SHAPE},
    {"model_type": "mixtral", **SHAPE, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    {"model_type": "deepseek_v3", **SHAPE, "n_routed_experts": 8, "num_experts_per_tok": 2},
)
JOB: Final = """
[model]
num_layers = 4
hidden = 256
num_heads = 8
ffn_hidden = 512
vocab_size = 512
[training]
sequence_length = 256
global_batch = 16
microbatch_size = 2
precision = "bf16"
sequence_parallel = true
[[cluster.sites]]
name = "zurich"
num_devices = 8
device = "h100"
[layout]
pipeline = 2
data = 4
tensor = 1
"""
CHOICES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "pipeline, several stages a rank, replicas at and across sites": {},
    "`layout.tensor`": {"layout": {"tensor": 2}},
    "`layout.context`, by Ulysses": {"layout": {"context": 2, "context_exchange": "ulysses"}},
    "`layout.context`, by a ring": {"layout": {"context": 2, "context_exchange": "ring"}},
    "`layout.expert`": {"layout": {"expert": 2}},
    "`layout.expert` over all of data x tensor": {"layout": {"expert": 8, "tensor": 2}},
    "`training.zero` 1": {"training": {"zero": 1}},
    "`training.zero` 2 and 3": {"training": {"zero": 3}},
    "`training.zero_group_size`": {"training": {"zero": 1, "zero_group_size": 2}},
    '`precision` "bf16", "fp32"': {"training": {"precision": "fp32"}},
    '`precision` "fp16"': {"training": {"precision": "fp16"}},
    "`matmul` in 8 and 4 bit, TF32": {"training": {"matmul": "fp8"}},
    "`wire_type`": {"training": {"wire_type": "int8"}},
    '`recompute` "full"': {"training": {"recompute": "full"}},
    '`recompute` "core_attn"': {"training": {"recompute": "core_attn"}},
    '`recompute` "mlp" or "moe"': {"training": {"recompute": "mlp moe"}},
    '`recompute` "layernorm"': {"training": {"recompute": "layernorm"}},
    "`training.dropout`": {"training": {"dropout": True}},
    "`training.lora` beside attention": {"training": {"lora": Lora(rank=8, target_modules=("linear_qkv",))}},
    "`training.lora` beside MLP or experts": {"training": {"lora": Lora(rank=8, target_modules=("linear_fc1",))}},
    "`training.lora.dropout`": {"training": {"lora": Lora(rank=8, dropout=0.1, target_modules=("linear_qkv",))}},
    "`training.local_steps`": {
        "training": {"local_steps": LocalSteps()},
        "layout": {"data": 2, "replica_sites": ("zurich", "lugano")},
    },
    "`cuda_graphs`": {"training": {"cuda_graphs": True}},
    "`cpu_offloading_num_layers`": {"training": {"cpu_offloading_num_layers": 1}},
    "`grad_reduce_in_fp32 = false`": {"training": {"grad_reduce_in_fp32": False}},
    "`moe_router_bias_update_rate`": {"training": {"moe_router_bias_update_rate": 0.001}},
    "`data.packing`": {"data": {"packing": "elastic"}},
    "`data.packing` with `layout.tensor`": {"data": {"packing": "elastic"}, "layout": {"tensor": 2}},
    "`model.experts` by numbers": {"model": {"experts": Experts(num_experts=8, per_token=2, ffn_hidden=128)}},
}
"""Choices, and what each of them changes in a plan."""


def changed(plan: Plan, model: Model, choice: Mapping[str, Mapping[str, Any]]) -> Plan:
    """The plan of `model` with a choice made."""
    job = plan.job.model_copy(update={"model": model})
    parts = {name: getattr(job, name).model_copy(update=choice[name]) for name in choice if name != "layout"}
    pins = {"layout": job.layout.model_copy(update=choice.get("layout", {}))}
    layout = replace(plan.layout, **choice.get("layout", {}))
    return plan.model_copy(update={"job": job.model_copy(update=parts | pins), "layout": layout})


def models(job: Job, folder: Path) -> Iterator[Model]:
    """One model for each column."""
    yield job.model
    for config in CONFIGS:
        place = folder / str(config["model_type"])
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        experts = Experts(num_experts=8, per_token=2, ffn_hidden=512) if "num_experts_per_tok" in config else None
        yield job.model.model_copy(update={"hugging_face": str(place), "experts": experts})
    yield job.model.model_copy(update={"module": "stages:build"})


def cell(plan: Plan, model: Model, choice: Mapping[str, Mapping[str, Any]]) -> str:
    """Entry of the table of a choice for `model`; ``-`` where its job can't be written."""
    has_shape = model.hugging_face is not None or model.module is not None
    wanted = operations_of(choice.get("training", {}).get("recompute", "none"))
    if ("model" in choice and has_shape) or (wanted and not {*wanted} & {*possible_operations(model)}):
        return "-"
    return "export" if plan_obstacle(changed(plan, model, choice))[0] else "train"


def table() -> str:
    """All rows: ``train`` where the engine runs a choice, ``export`` where only other programs do."""
    plan, rows = find(load_job(parse_job(JOB, "docs/choices.py")))[0].plan, []
    with tempfile.TemporaryDirectory() as folder:
        every = list(models(plan.job, Path(folder)))
        for name, choice in CHOICES.items():
            cells = [cell(plan, model, choice) for model in every]
            rows.append(f"| {name} | {' | '.join(cells)} |\n")
    return HEAD + LINE + "".join(rows)


def page(text: str) -> str:
    """`text` of the page with the table written anew."""
    before, _, rest = text.partition(HEAD)
    behind = rest.partition("\n\n")[2]
    return f"{before}{table()}\n{behind}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
