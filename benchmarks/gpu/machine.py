"""The machine that is checked, and trainings on it by farpipe's own commands."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MAX_RANKS: Final = 8
RUN_LIMIT_S: Final = 240.0
POLL_S: Final = 0.5
BIG: Final = {
    "num_layers": 16, "hidden": 2048, "num_heads": 16, "num_kv_heads": 8, "ffn_hidden": 5632, "vocab_size": 32000,
}  # fmt: skip
"""About 1B parameters."""
SMALL: Final = {
    "num_layers": 8, "hidden": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden": 176, "vocab_size": 512,
}  # fmt: skip
"""For a machine that plays a GPU on its CPU."""


@dataclass(frozen=True)
class Run:
    """A training that has ended."""

    folder: Path
    exit_code: int
    seconds: float
    output: str
    ended_after_s: float | None = None
    """From the signal that one of its ranks was sent to its end."""
    gpus_by_process: dict[int, set[str]] = field(default_factory=dict)

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return found


class Machine:
    """One host with GPUs, or its CPU in their place (`device`)."""

    def __init__(self, folder: Path, device: str, num_gpus: int) -> None:
        self.folder, self.device, self.num_gpus = folder, device, num_gpus
        self.num_ranks = min(MAX_RANKS, max(2, num_gpus))
        self.model = SMALL if device == "cpu" else BIG
        self.env = dict(os.environ)
        if num_gpus == 1:  # its only GPU, shown to every rank, which then may share it
            self.env.setdefault("CUDA_VISIBLE_DEVICES", "0")

    def job(self, name: str, tables: str, **training: Any) -> Path:
        """A job of this machine's model; `tables` are all but model and training."""
        length, size = (1024, 2) if self.device == "cuda" else (32, 2)
        keys = {"sequence_length": length, "microbatch_size": size, "global_batch": 4 * size, "precision": "fp32"}
        keys |= {"checkpoint_every_minutes": 0, "zero": 0} | training
        text = "".join(
            f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in figures.items())
            for table, figures in (("model", self.model), ("training", keys))
        )
        path = self.folder / f"{name}.toml"
        path.write_text(text + tables)
        return path

    def tables(self, num_ranks: int, *, method: str = "1f1b", sites: int = 1, link: str = "", layout: str = "") -> str:
        """Sites with so many ranks in all, one pipeline through them unless `layout` says otherwise."""
        device = "h100" if self.device == "cuda" else "cpu"
        text = "".join(
            f'[[cluster.sites]]\nname = "s{site}"\ndevice = "{device}"\nnum_devices = {num_ranks // sites}\n'
            for site in range(sites)
        )
        text += f'[[cluster.links]]\nbetween = ["s0", "s1"]\n{link}\n' if sites == 2 else ""
        return f'{text}[layout]\n{layout or f"pipeline = {num_ranks}"}\n[schedule]\nmethod = "{method}"\n'

    def train(
        self, job: Path, name: str, *options: object, device: str = "", kill: int | None = None, pause_s: float = 0.0
    ) -> Run:
        """Train `job`; `kill`: a signal for its last rank after the third step, taken back after `pause_s`."""
        folder = self.folder / name
        command = [sys.executable, "-m", "farpipe", "train", str(job), "--device", device or self.device]
        command += ["--run-dir", str(folder)] if "--resume" not in options else []
        begin_s, ended_after_s, found = time.monotonic(), None, {}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*command, *map(str, options)], stdout=output, stderr=subprocess.STDOUT, env=self.env
            )
            sent_s = None
            try:
                while process.poll() is None and time.monotonic() < begin_s + RUN_LIMIT_S:
                    time.sleep(POLL_S)
                    for pid, gpu in gpu_processes() if self.device == "cuda" else ():
                        found.setdefault(pid, set()).add(gpu)
                    if kill is not None and sent_s is None and num_steps_of(folder) >= 3:
                        sent_s = time.monotonic()
                        signal_rank(folder, kill, pause_s)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(30)
            if sent_s is not None:
                ended_after_s = time.monotonic() - sent_s
            output.seek(0)
            text = output.read()
        return Run(folder, process.returncode, time.monotonic() - begin_s, text, ended_after_s, found)


def num_steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def signal_rank(folder: Path, number: int, pause_s: float) -> None:
    """Send a signal to the last rank of the run in `folder`, and SIGCONT after `pause_s` if that is not 0."""
    ranks = ranks_of(folder)
    if not ranks:
        return
    os.kill(ranks[-1], number)
    if pause_s:
        threading.Timer(pause_s, os.kill, (ranks[-1], signal.SIGCONT)).start()


def ranks_of(folder: Path) -> list[int]:
    """Processes of the ranks of the run in `folder`, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
            environ = (path.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder) in words and any("rank_main" in word for word in words):
            rank = next((int(line[5:]) for line in environ if line.startswith(b"RANK=")), None)
            if rank is not None:
                found[rank] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]


def gpu_processes() -> list[tuple[int, str]]:
    """(process, GPU) of all that computes on this machine's GPUs."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [(int(pid), gpu.strip()) for pid, _, gpu in (line.partition(",") for line in text.splitlines() if line)]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference; infinite where there is nothing to compare."""
    if not one or len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
