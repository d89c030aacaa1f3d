"""torchtitan's Trainer with `farpipe.torch.titan` on a CPU: losses and gradient norms in several orders, beside those
of a run without a pipeline; all start from one seed checkpoint of torchtitan's. Prints JSON. Needs torchtitan 0.3 with
its packages.

    python -m benchmarks.engine.titan [MODEL] [--fsdp 2] [--tensor 2] [--stages 2] [--bf16] [--steps 20]
        [--recompute full] [--orders none,1f1b] [--resume] [--kill 1]

Two pipeline ranks, each of as many processes as FSDP times tensor parallelism (with sequence parallelism) say; with
--stages a rank has several stages. `none` is the run without a pipeline, which adds up the gradients of the same
microbatches. With --resume the last order is run again in two halves, the second from the checkpoint of the
first. With --kill nothing is compared: this process of the last order is killed in its second step, and the seconds
until each of the others has raised are printed, with its error. What torchtitan lacks on a CPU is helped in `help_cpu`;
none of it is farpipe's.
"""

import argparse
import collections
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NUM_MICROBATCHES, NUM_PIPELINE_RANKS = 4, 2
LIMIT_S, LONGEST_END_S = 600.0, 120.0
NEVER = 10_000
"""Steps of a run that does not end by itself."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="llama3", choices=("llama3", "qwen3", "deepseek_v3", "gpt_oss"))
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--orders", default="")
    parser.add_argument("--kill", type=int, help="the process that is killed in its second step")
    parser.add_argument("--order", help=argparse.SUPPRESS)  # of this process, with the folder of its run
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(asked: argparse.Namespace) -> None:
    orders = {1: "none,gpipe,1f1b,zb-h1,zb-2p", 2: "none,interleaved,zbv"}[asked.stages]
    with tempfile.TemporaryDirectory() as name:
        measure(asked, "seed", Path(name) / "seed", asked.steps)
        rows = {}
        if asked.kill is not None:
            order = (asked.orders or orders).split(",")[-1]
            print(json.dumps({"killed": asked.kill, "order": order, "others": raised_after(asked, order, Path(name))}))
            return
        for order in (asked.orders or orders).split(","):
            rows[order] = measure(asked, order, begun(Path(name), order), asked.steps)
        if asked.resume:
            folder = begun(Path(name), "resumed")
            measure(asked, order, folder, asked.steps // 2)
            rows[f"{order}, resumed"] = measure(asked, order, folder, asked.steps)
    settings = {key: value for key, value in vars(asked).items() if key not in ("orders", "order", "folder")}
    first = next(iter(rows.values()))
    print(json.dumps({**settings, "steps": rows, "worst": {order: worst(first, row) for order, row in rows.items()}}))


def begun(folder: Path, name: str) -> Path:
    """A folder for a run of this name, with the seed checkpoint."""
    return Path(shutil.copytree(folder / "seed", folder / name))


def worst(first: list[list[float]], others: list[list[float]]) -> float:
    """Largest relative difference of a figure; runs that went on from a checkpoint have the later steps."""
    ones, others = ([figure for row in rows[-len(others) :] for figure in row] for rows in (first, others))
    return float(f"{max(abs(b / a - 1) for a, b in zip(ones, others, strict=True)):.2g}")


def started(asked: argparse.Namespace, order: str, folder: Path, num_steps: int) -> list[subprocess.Popen[bytes]]:
    """The processes of a run."""
    inside = asked.fsdp * asked.tensor
    num_processes = {"seed": 1, "none": inside}.get(order, inside * NUM_PIPELINE_RANKS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    own = ["--order", order, "--folder", str(folder), "--steps", str(num_steps)]
    command = [sys.executable, __file__, *sys.argv[1:], *own]
    common = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [os.environ | common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(num_processes)]
    return [subprocess.Popen(command, env=env, stdout=sys.stderr) for env in environments]


def measure(asked: argparse.Namespace, order: str, folder: Path, num_steps: int) -> list[list[float]]:
    """Loss and gradient norm of every step; of the seed none, which leaves a checkpoint."""
    processes = started(asked, order, folder, num_steps)
    try:
        if sum(process.wait(LIMIT_S) != 0 for process in processes):
            raise SystemExit(f"{asked.model}, {order}: a process ended with an error")
    finally:
        for process in processes:
            process.kill()
    # in a V the last stage, which has the loss, is on the first rank; without it torchtitan shows a negative one
    found: list[list[list[float]]] = [json.loads(path.read_text()) for path in sorted(folder.glob("steps-*.json"))]
    return max(found)


def raised_after(asked: argparse.Namespace, order: str, folder: Path) -> dict[int, Any]:
    """Seconds from the death of the killed process to each other one's error, and the error; None where none came."""
    folder = begun(folder, order)
    processes = started(asked, order, folder, NEVER)
    try:
        processes[asked.kill].wait(LIMIT_S)
        dead_s = time.monotonic()  # the same clock in all processes
        others = [rank for rank in range(len(processes)) if rank != asked.kill]
        for rank in others:
            with suppress(subprocess.TimeoutExpired):
                processes[rank].wait(max(0.0, dead_s + LONGEST_END_S - time.monotonic()))
        return {rank: heard(folder / f"raised-{rank}.json", dead_s) for rank in others}
    finally:
        for process in processes:
            process.kill()


def heard(file: Path, dead_s: float) -> Any:
    """Seconds and words of a process's error."""
    if not file.exists():
        return None
    at_s, words = json.loads(file.read_text())
    return [round(at_s - dead_s, 1), words]


@contextmanager
def noting_errors(file: Path) -> Iterator[None]:
    """Inside, an error is noted in `file` with the time at which it came."""
    try:
        yield
    except Exception as error:
        file.write_text(json.dumps([time.monotonic(), f"{type(error).__name__}: {error}"[:160]]))
        raise


def help_cpu() -> None:
    """Before torchtitan is imported: it looks for a GPU, and for functions of newer torch."""
    import torch
    import torch.distributed as dist

    torch._utils._get_available_device_type = lambda: "cpu"
    memory = types.SimpleNamespace(total_memory=1 << 34)
    for name, value in {
        "memory_stats": lambda *_: collections.defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "cpu",
        "memory_allocated": lambda *_: 0,
        "get_device_properties": lambda *_: memory,
    }.items():
        setattr(torch.cpu, name, value)
    if not hasattr(torch.cpu, "set_device"):
        torch.cpu.set_device = lambda *_: None
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_, **__: None


def plain_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: float | None, **_: Any) -> Any:
    """flex_attention's output and log of the sum of exponentials; torch's own has no backward on a CPU."""
    import torch
    from torch.nn.attention.flex_attention import create_mask

    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    scores = (q @ k.mT).float() * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, float("-inf"))
    output = torch.softmax(scores, -1).to(v.dtype) @ v
    return output, types.SimpleNamespace(lse=scores.logsumexp(-1))


def help_torchtitan() -> None:
    """After it is imported: a barrier of devices with numbers, compiled attention, text from the net.

    gpt_oss's experts return bf16 in float32 as well, and adding that up ends with an error.
    """
    import torchtitan.models.common.attention as attention
    import torchtitan.models.common.token_dispatcher as dispatcher
    from datasets import Dataset
    from torchtitan.distributed import utils
    from torchtitan.hf_datasets import text_datasets

    utils.set_pg_timeouts = lambda *_, **__: None
    attention.FlexAttention._compiled_flex_attn = plain_attention
    add_up = dispatcher.deterministic_scatter_add
    dispatcher.deterministic_scatter_add = lambda out, index, src: add_up(out, index, src.to(out.dtype))
    lines = [" ".join(str(number * k % 997) for k in range(200)) for number in range(500)]
    text_datasets.DATASETS["c4_test"].loader = lambda _: Dataset.from_dict({"text": lines})


def write_tokenizer(folder: Path) -> str:
    """A tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *map(str, range(1000))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def specification(asked: argparse.Namespace) -> Any:
    """The debug model, whose attention runs on a CPU; gloo sums and knows no averages."""
    from importlib import import_module

    import torch
    import torchtitan.models.common.attention as attention
    from torch.distributed.fsdp import FSDPModule

    further = {"attn_backend": "flex"} if asked.model in ("gpt_oss", "deepseek_v3") else {}
    spec = import_module(f"torchtitan.models.{asked.model}").model_registry("debugmodel", **further)
    if spec.model.enable_weight_tying:  # torchtitan has no pipelines of tied models
        spec.model.enable_weight_tying = False
        spec.model.tok_embeddings.param_init = {"weight": torch.nn.init.normal_}
    for layer in spec.model.layers if asked.model != "gpt_oss" else ():
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    parallelize = spec.parallelize_fn

    def summed(part: Any, **settings: Any) -> Any:
        made = parallelize(part, **settings)
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return made

    return dataclasses.replace(spec, parallelize_fn=summed)


def configuration(asked: argparse.Namespace) -> Any:
    """torchtitan's configuration of this run."""
    from importlib import import_module

    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.config_utils import decoder_vocab_size

    import farpipe.torch

    registry = import_module(f"torchtitan.models.{asked.model}.config_registry")
    config = getattr(registry, f"{asked.model}_debugmodel")()
    spec, has_pipeline = specification(asked), asked.order not in ("seed", "none")
    config.model_spec = dataclasses.replace(spec, pipelining_fn=farpipe.torch.titan(method=asked.order))
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    kinds = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    config.activation_checkpoint = kinds[asked.recompute]
    training, parallelism, checkpoint = config.training, config.parallelism, config.checkpoint
    training.local_batch_size = NUM_MICROBATCHES if has_pipeline else 1
    twins = 1 if asked.order == "seed" else asked.fsdp
    training.global_batch_size, training.seq_len, training.steps = NUM_MICROBATCHES * twins, 64, asked.steps
    training.mixed_precision_param = "bfloat16" if asked.bf16 else "float32"
    training.disable_cuda_graphs, config.debug.seed = True, 0
    parallelism.pipeline_parallel_degree = NUM_PIPELINE_RANKS if has_pipeline else 1
    parallelism.pipeline_parallel_microbatch_size = 1
    parallelism.tensor_parallel_degree = 1 if asked.order == "seed" else asked.tensor
    parallelism.data_parallel_shard_degree, parallelism.spmd_backend = -1, "partial_dtensor"
    config.dump_folder, config.validator.enable = str(asked.folder), False
    checkpoint.enable, checkpoint.interval, checkpoint.last_save_model_only = True, 1000, False
    checkpoint.create_seed_checkpoint = asked.order == "seed"
    config.hf_assets_path = write_tokenizer(asked.folder / f"tokenizer-{os.environ['RANK']}")
    return config


def run_rank(asked: argparse.Namespace) -> None:
    """One process; the last one leaves the figures."""
    help_cpu()
    import torch.distributed as dist

    help_torchtitan()
    trainer = configuration(asked).build()
    found: list[list[float]] = []
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, most: float, norm: float, *more: Any, **further: Any) -> None:
        found.append([float(f"{loss:.8g}"), float(f"{norm:.8g}")])
        log(step, loss, most, norm, *more, **further)
        if dist.get_rank() == asked.kill and asked.order != "seed" and len(found) == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()  # somewhere in the next step

    trainer.metrics_processor.log = keep
    if asked.order == "seed":
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        with noting_errors(asked.folder / f"raised-{dist.get_rank()}.json"):
            trainer.train()
    if dist.get_rank() in (0, dist.get_world_size() - 1):
        (asked.folder / f"steps-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    found = arguments()
    run_rank(found) if found.order else main(found)
