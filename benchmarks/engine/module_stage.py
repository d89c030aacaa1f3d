"""Cost of stages over any module: per action, per step beside loops by hand, and at the start of a rank. Prints JSON.

    python -m benchmarks.engine.module_stage

CPU time of one thread, the least of REPEATS, interleaved. `actions`: the executor runs F, I and W of 64 microbatches on
one rank with stages of no work (`no_op`), a module that scales its input as a stage (`module`), and what that module
takes of autograd without a stage (`autograd`): microseconds per action. `steps`: four microbatches, milliseconds: F and
B (`stage_b`) or F, I and W (`stage_iw`) of a Llama of transformers as a stage, and a loop by hand over the same class
with the same recomputation (`loop`); `own_b`, `own_iw`: of farpipe's decoder. `python_calls`: of functions, for each
layer and microbatch. Limit: F and B take at most 1.02 times
the loop at width 256 and 1.1 times at width 32.
`start`: seconds until a new process has imported what a rank needs.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.shared.python_calls import python_calls

REPEATS = 8
SIZES = {"width 32, 2 layers, 16 tokens": (32, 2, 16), "width 256, 4 layers, 256 tokens": (256, 4, 256)}
NUM_ACTIONS_OF = 64
STARTS = {
    "python": "",
    "torch": "import torch",
    "a rank": "import farpipe.engine.launch.rank_main",
    "a rank, transformers": "import farpipe.engine.launch.rank_main, farpipe.engine.stages.self_check",
    "a rank, transformers, FSDP2": (
        "import farpipe.engine.launch.rank_main, farpipe.engine.site.self_check, farpipe.engine.site.shared_weights"
    ),
}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    rows = [steps(name, *size, recompute) for name, size in SIZES.items() for recompute in ("none", "full")]
    print(json.dumps({"actions": actions(), "steps": rows, "start": [start(name) for name in STARTS]}))


def least_s(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least CPU time of each, measured in turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            begin_s = time.process_time()
            run()
            found[name].append(time.process_time() - begin_s)
    return {name: min(times[1:]) for name, times in found.items()}


class Alone:
    """The one rank of a pipeline."""

    def __init__(self) -> None:
        from farpipe.engine.transport.clock import Clock

        self.rank, self.clock = 0, Clock()


def actions() -> dict[str, float]:
    """Microseconds per action."""
    import torch

    from farpipe.core.step import Action, Problem, Rank, Schedule, Stage
    from farpipe.engine.executor.executor import Executor
    from farpipe.engine.stages.stage import SleepStage

    one = Stage(rank=0, forward_s=0, input_grad_s=0, weight_grad_s=0)
    problem = Problem(num_microbatches=NUM_ACTIONS_OF, ranks=(Rank(),), stages=(one,))
    order = Schedule(NUM_ACTIONS_OF, (tuple(Action(0, kind, m) for m in range(NUM_ACTIONS_OF) for kind in "FIW"),))
    stages = {"no_op": SleepStage(problem, 0), "module": scaling()}
    executors = {name: Executor(order, {0: stage}, Alone()) for name, stage in stages.items()}
    runs = {name: lambda executor=executor: executor.run(0) for name, executor in executors.items()}
    scale, target = torch.nn.Parameter(torch.ones(())), torch.zeros(1, dtype=torch.int64)

    def autograd() -> None:
        for _ in range(NUM_ACTIONS_OF):
            logits = torch.zeros(1, 2, requires_grad=True) * scale
            torch.nn.functional.cross_entropy(logits, target, reduction="sum").backward()

    seconds = least_s(runs | {"autograd": autograd})
    return {name: round(1e6 * s / (3 * NUM_ACTIONS_OF), 1) for name, s in seconds.items()}


def scaling() -> Any:
    """A whole model that only scales: the logits are zeros times its one parameter."""
    import torch

    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages.slices import ModuleSlice, StageSlice
    from farpipe.engine.stages.stage import Boundary, TorchStage

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, 2, requires_grad=True) * self.scale

    stage = TorchStage(ModuleSlice(Scale(), StageSlice(0, 1, True, True)), Boundary((1, 1), torch.float32))
    tokens = torch.zeros(NUM_ACTIONS_OF, 1, dtype=torch.int64)
    stage.begin_step(Batch(tokens, tokens))
    return stage


def steps(name: str, width: int, num_layers: int, tokens: int, recompute: str) -> dict[str, Any]:
    """One row: milliseconds per step of four microbatches."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from farpipe.core.spec import Model, Training
    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages.hugging_face import HuggingFaceSlice
    from farpipe.engine.stages.make_stage import make_stage, numerics_of
    from farpipe.engine.stages.slices import StageSlice
    from farpipe.engine.stages.stage import Boundary, TorchStage

    heads, ffn, part = max(4, width // 64), 3 * width, StageSlice(0, num_layers, True, True)
    given = {"num_hidden_layers": num_layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    given |= {"hidden_size": width, "intermediate_size": ffn, "vocab_size": 512, "max_position_embeddings": tokens}
    config, data = AutoConfig.for_model("llama", **given), torch.randint(512, (4, 1, tokens))
    plain, cut = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    if recompute == "full":
        plain.activation_checkpointing_enable()
    plain.train()
    boundary, batch = Boundary((1, tokens, width), torch.float32), Batch(data, data.roll(-1, -1))
    stage = TorchStage(HuggingFaceSlice(cut.eval(), part, recompute), boundary)
    model = Model(
        num_layers=num_layers, hidden=width, num_heads=heads, num_kv_heads=heads, ffn_hidden=ffn, vocab_size=512
    )
    training = Training(sequence_length=tokens, global_batch=4, microbatch_size=1, precision="fp32")
    own = make_stage(model, training, part, numerics_of(training, recompute=recompute), "cpu")
    for one in (stage, own):
        one.begin_step(batch)
    runs = {"loop": lambda: loop(plain, batch)}
    runs |= {"stage_b": lambda: one_step(stage, split=False), "stage_iw": lambda: one_step(stage, split=True)}
    runs |= {"own_b": lambda: one_step(own, split=False), "own_iw": lambda: one_step(own, split=True)}
    seconds = least_s(runs)
    row = {"model": name, "recompute": recompute} | {key: round(1e3 * s, 2) for key, s in seconds.items()}
    calls = {name: round(python_calls(run) / (4 * num_layers)) for name, run in runs.items()}
    return row | {"of_the_loop": round(seconds["stage_b"] / seconds["loop"], 3), "python_calls": calls}


def one_step(stage: Any, *, split: bool) -> None:
    """Forward and backward of four microbatches."""
    for microbatch in range(4):
        stage.forward(microbatch, None, in_parts=split)
        if split:
            stage.input_grad(microbatch, None)
            stage.weight_grad(microbatch)
        else:
            stage.backward(microbatch, None)


def loop(model: Any, batch: Any) -> None:
    """The same by hand."""
    from torch.nn.functional import cross_entropy

    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        logits = model(input_ids=tokens, use_cache=False).logits
        total = cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
        (total / batch.num_target_tokens).backward()


def start(name: str) -> dict[str, Any]:
    """Seconds of CPU and wall time of a process that imports; the least of three."""
    code = f"{STARTS[name]}\nimport os, time; print(sum(os.times()[:2]))"
    times = []
    for _ in range(3):
        begin_s = time.monotonic()
        out = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
        times.append((float(out), time.monotonic() - begin_s))
    cpu_s, wall_s = (min(column) for column in zip(*times, strict=True))
    return {"imports": name, "cpu_s": round(cpu_s, 2), "wall_s": round(wall_s, 2)}


if __name__ == "__main__":
    main()
