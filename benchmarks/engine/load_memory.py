"""Memory of the host while processes of a site read their parts of a model's weights. Prints JSON.

    python -m benchmarks.engine.load_memory

A Llama of 217M random parameters, stored in bf16, is loaded as one stage in float32, as a rank of a training does:
whole by one process, by four with tensor 2 times FSDP 2, and by four with FSDP 4. Of each process: `share_bytes`, its
part of the parameters; `peak`, by how many shares its anonymous memory and its memory with the pages of mapped files
(`resident`) grew at most; `seconds` until it is ready; the most of all processes.
Limit: `peak` of both at most 1.2 shares. Exit code 1 if it is not kept.
"""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

DIVISIONS: Final = {"one process": (1, 1), "tensor 2 x FSDP 2": (2, 2), "FSDP 4": (4, 1)}
"""Replicas that share weights, and tensor-parallel processes."""
SIZES: Final = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32000}
LIMIT: Final = 1.2


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        rows = [row(Path(folder), label) for label in DIVISIONS]
    print(json.dumps({"loads": rows}))
    sys.exit(0 if all(max(one["peak"].values()) <= LIMIT for one in rows) else 1)


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", num_attention_heads=16, num_key_value_heads=8, **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def row(folder: Path, label: str) -> dict[str, Any]:
    """The figures of one division, the most of all processes."""
    data, tensor = DIVISIONS[label]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [sys.executable, "-m", "benchmarks.engine.load_memory", str(folder), str(port), str(data), str(tensor)]
    processes = [subprocess.Popen([*words, str(n)], stdout=subprocess.PIPE) for n in range(data * tensor)]
    found = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    peaks = {kind: round(max(one[kind] / one["share_bytes"] for one in found), 2) for kind in ("anonymous", "resident")}
    share_bytes = max(one["share_bytes"] for one in found)
    return {"division": label, "share_bytes": share_bytes, "peak": peaks, "seconds": max(o["seconds"] for o in found)}


class Watch(threading.Thread):
    """The growth of this process's memory at most while it runs, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._left, self._before = threading.Event(), memory_bytes()
        self.most = dict.fromkeys(self._before, 0)

    def run(self) -> None:
        while not self._left.wait(0.001):
            self._look()

    def _look(self) -> None:
        now = memory_bytes()
        self.most = {kind: max(most, now[kind] - self._before[kind]) for kind, most in self.most.items()}

    def end(self) -> dict[str, int]:
        """The growth."""
        self._left.set()
        self.join()
        self._look()
        return self.most


def memory_bytes() -> dict[str, int]:
    """This process's memory, without and with pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    size = {key: int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "RssShmem")}
    return {"anonymous": size["RssAnon"], "resident": sum(size.values())}


def load(folder: Path, port: int, data: int, tensor: int, process: int) -> None:
    """One process: join the others, make the stage, print what it took."""
    import torch
    import torch.distributed as dist

    import farpipe.engine.site.tensor_plans
    import farpipe.engine.stages.hugging_face_weights  # noqa: F401  (what is imported later would be counted)
    from farpipe.core.spec import Training
    from farpipe.core.spec.hugging_face import read_model
    from farpipe.engine.site.mesh import join_site, stage_mesh
    from farpipe.engine.stages.make_stage import make_stage, numerics_of
    from farpipe.engine.stages.slices import StageSlice

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=process == 0, wait_for_workers=False)
    join_site(store, "west", process, data * tensor, device="cpu", timeout_s=120)
    model, part = read_model(folder), StageSlice(0, SIZES["num_hidden_layers"], True, True)
    training = Training(sequence_length=64, global_batch=data, microbatch_size=1, precision="fp32", zero=3)
    mesh = stage_mesh("cpu", data=data, tensor=tensor) if data * tensor > 1 else None
    dist.barrier()
    watch, begin_s = Watch(), time.monotonic()
    watch.start()
    stage = make_stage(model, training, part, numerics_of(training), "cpu", mesh=mesh)
    seconds = time.monotonic() - begin_s
    most = watch.end()
    share_bytes = sum(getattr(p, "_local_tensor", p).nbytes for p in stage.module.parameters())
    print(json.dumps({"share_bytes": share_bytes, "seconds": round(seconds, 1), **most}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        main()
