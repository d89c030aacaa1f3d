"""Models with experts of transformers in stages: largest difference of a gradient from the whole model's in float64,
and CPU time of F, I and W. Prints JSON.

    python -m benchmarks.engine.expert_gradients

Small models of each class (six layers of width 32; experts balanced by transformers' loss with a coefficient of 0.5,
where the class has one) on four microbatches: all forwards, then I and W of each in reverse. `worst`: relative to the
largest element of the gradient; `of`: whose. CPU milliseconds are of one microbatch of 256 tokens in float32 in a stage
of four layers of width 256 with 8 experts of width 512, medians of nine.
"""

import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

CLASSES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
LAYOUTS = ((2, "none"), (4, "full"))
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
WIDE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
}
NUM_SKIPPED, NUM_REPEATS = 1, 9


def main() -> None:
    import torch

    torch.set_num_threads(1)
    print(json.dumps({"classes": [row for name in CLASSES for row in rows(name)]}, indent=1))


def rows(name: str) -> Iterator[dict[str, Any]]:
    """One row for each layout, the times with the first."""
    for number, (num_stages, recompute) in enumerate(LAYOUTS):
        worst, of = difference(name, num_stages, recompute)
        row = {"class": name, "stages": num_stages, "recompute": recompute, "worst": worst, "of": of}
        yield row | ({} if number else cpu_ms(name))


def difference(name: str, num_stages: int, recompute: Any) -> tuple[float, str]:
    """The largest relative difference of a gradient, and whose it is."""
    import torch
    from transformers import AutoConfig

    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages import self_check

    torch.manual_seed(0)
    balanced = {} if name == "deepseek_v3" else BALANCED
    whole = self_check.random_model(self_check.shrunk(AutoConfig.for_model(name, **balanced)), torch.float64)
    tokens = torch.randint(64, (4, 2, 16))
    batch = Batch(tokens, tokens.roll(-1, -1))
    stages = self_check.make_stages(whole, batch, recompute, num_stages)
    self_check.run_in_turn(stages, len(tokens))
    self_check.reference_loss(whole, batch)
    return self_check.worst_error(stages, whole, 1.0, 1.0)


def cpu_ms(name: str) -> dict[str, float]:
    """CPU milliseconds of F, I and W of a microbatch."""
    import torch
    from transformers import AutoConfig

    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages.hugging_face import HuggingFaceSlice
    from farpipe.engine.stages.self_check import random_model
    from farpipe.engine.stages.slices import StageSlice
    from farpipe.engine.stages.stage import Boundary, TorchStage

    config = AutoConfig.for_model(name)
    known = config.to_dict()
    experts = {key: 8 for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in known}
    more = {"layer_types": ["full_attention"] * 4} if known.get("layer_types") else {}
    more |= {
        key: value for key, value in (("first_k_dense_replace", 0), ("n_group", 1), ("topk_group", 1)) if key in known
    }
    config = AutoConfig.for_model(name, **{key: value for key, value in WIDE.items() if key in known} | experts | more)
    tokens = torch.randint(256, (1, 2, 128))
    boundary = Boundary((2, 128, 256), torch.float32)
    stage = TorchStage(HuggingFaceSlice(random_model(config, torch.float32), StageSlice(0, 4, True, True)), boundary)
    stage.begin_step(Batch(tokens, tokens.roll(-1, -1)))
    calls = {
        "F": lambda: stage.forward(0, None),
        "I": lambda: stage.input_grad(0, None),
        "W": lambda: stage.weight_grad(0),
    }
    found: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(NUM_SKIPPED + NUM_REPEATS):
        for kind, call in calls.items():
            begin_s = time.process_time()
            call()
            found[kind].append(1e3 * (time.process_time() - begin_s))
    return {f"{kind}_ms": round(median(times[NUM_SKIPPED:]), 1) for kind, times in found.items()}


if __name__ == "__main__":
    main()
