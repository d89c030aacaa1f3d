"""A training of sites that leave and return, and what befalls them. See benchmarks/engine/leave_and_return.py."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import phases
from benchmarks.shared.phases import PACE_VARIABLE, SKEWED_VARIABLE, Ambush

LATENCY_S, BYTES_PER_S = 0.010, 100e6 / 8
FOREVER = 10**6
"""Steps of a run that ends when it is told to."""
LAST_STEPS = 20
"""Steps after that, in which all sites meet."""
CHECKPOINT_STEPS = 50
LIMIT_S = 180.0


class Layout(NamedTuple):
    """What one site is."""

    ranks: int
    """Processes."""
    fsdp: bool = False
    """They share the weights of one stage (FSDP2, a Hugging Face model); else they are a pipeline."""


def run_spec(sites: Sequence[str], layout: Layout, num_steps: int, folder: Path, *, emulate: bool) -> Any:
    """A replica at each site, in which weight gradients are actions of their own; in `folder` is the model."""
    from farpipe.core.schedule.library import order
    from farpipe.core.spec import Data, Training
    from farpipe.core.step import Hop, Link, Problem, Rank, Stage
    from farpipe.engine.run_settings import TransportSettings
    from farpipe.engine.run_spec import RunSpec

    num_stages, per_site = (1, layout.ranks) if layout.fsdp else (layout.ranks, 1)
    link = Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S)
    problem = Problem(
        num_microbatches=2,
        ranks=(Rank(),) * num_stages,
        stages=tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(num_stages)),
        hops=(Hop(),) * (num_stages - 1),
        links={f"{a}>{b}": link for a in sites for b in sites if a != b},
    )
    model = model_in(folder, fsdp=layout.fsdp)
    training = Training(
        sequence_length=64,
        global_batch=8 * len(sites) * per_site,
        microbatch_size=4,
        precision="fp32",
        learning_rate=2e-3,
        checkpoint_every_minutes=0,
        checkpoint_every_steps=CHECKPOINT_STEPS,
        elastic=True,
        zero=3 if layout.fsdp else 0,
    )
    cuts = [round(stage * model.num_layers / num_stages) for stage in range(num_stages + 1)]
    return RunSpec.bare(
        problem=problem,
        schedule=order("zb-h1", problem),
        sites=(sites[0],) * num_stages,
        replicas=tuple((site,) * num_stages for site in sites for _ in range(per_site)),
        num_steps=num_steps,
        model=model,
        training=training,
        data=Data(held_out=0.02),
        partition=tuple(pairwise(cuts)),
        emulate_links=emulate,
        transport=TransportSettings(timeout_s=60),
    )


def model_in(folder: Path, *, fsdp: bool) -> Any:
    """The engine's own decoder, or a small one that transformers has written."""
    from farpipe.core.spec import Model
    from farpipe.core.spec.hugging_face import read_model

    if not fsdp:
        sizes = {"hidden": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden": 176, "vocab_size": 256}
        return Model(name="small", num_layers=2, **sizes)
    from benchmarks.shared.twins import write_model

    place = folder / "model"
    return read_model(place if place.exists() else write_model(place, num_layers=2))


class Disturbed:
    """One training, and what befalls its sites."""

    def __init__(
        self, folder: Path, sites: Sequence[str], layout: Layout, *, emulates: bool = True, pace_s: float = 0.0
    ) -> None:
        """`emulates`: its links have their distance, without a WAN; emulated links have one clock for all sites.

        `pace_s`: shortest time between the beginnings of two steps until it is told to leave.
        """
        self.folder, self.sites, self.layout, self._emulates = folder, tuple(sites), layout, emulates
        self._pace_s = pace_s
        self.run_dir, self.num_steps = folder / "disturbed", 0
        self.lines: dict[str, list[tuple[float, dict[str, Any]]]] = {site: [] for site in sites}
        """What each site has recorded, and when it was seen."""
        self.wan: Any = None
        self.ended = threading.Event()
        self.exits: list[int] = []
        """Exit codes that the runs would have ended with."""

    def train(self, disturb: Callable[[], None], *, wan: bool) -> None:
        """Train while `disturb` runs, leave as by SIGTERM, and go on together for some steps more."""
        from farpipe.core.spec import SiteLink
        from farpipe.engine.links import Wan

        def disturb_and_leave() -> None:
            try:
                disturb()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        with ExitStack() as stack:
            if wan:
                figures = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": BYTES_PER_S}
                links = [SiteLink(source=a, target=b, **figures) for a in self.sites for b in self.sites if a != b]
                self.wan = stack.enter_context(Wan.up(self.sites, links, name=f"elastic{os.getpid()}"))
            for site in self.sites:
                threading.Thread(target=self._watch, args=(site,), daemon=True).start()
            threading.Thread(target=disturb_and_leave, daemon=True).start()
            with environment(PACE_VARIABLE, str(self._pace_s)):
                self._run(FOREVER, self.run_dir)
            self.ended.set()
            self.num_steps = max(line["step"] for lines in self.lines.values() for _, line in lines) + 1 + LAST_STEPS
            self._run(self.num_steps, self.run_dir, resume=True)

    def train_undisturbed(self) -> "Disturbed":
        """The same steps without anything."""
        calm = Disturbed(self.folder, self.sites, self.layout, emulates=self._emulates)
        calm.run_dir, calm.num_steps = self.folder / "calm", self.num_steps
        calm._run(self.num_steps, calm.run_dir)
        return calm

    def spec(self, num_steps: int) -> Any:
        """What all sites run."""
        return run_spec(self.sites, self.layout, num_steps, self.folder, emulate=self._emulates and self.wan is None)

    def _run(self, num_steps: int, run_dir: Path, *, resume: bool = False) -> None:
        from farpipe.core.errors import FarpipeError
        from farpipe.engine.launch.run import run

        options = {"wan": self.wan, "allow_plaintext": True, "resume": resume, "rank_program": (phases.__file__,)}
        try:
            run(self.spec(num_steps), run_dir, on_notice=say, **options)
            self.exits.append(0)
        except FarpipeError as error:
            say(f"{type(error).__name__}: {error}")
            self.exits.append(error.exit_code)

    def _watch(self, site: str) -> None:
        """Take the time of every line of a site's metrics."""
        path, position, number = self.run_dir / "sites" / site / "metrics.jsonl", 0, -1
        while not self.ended.is_set():
            time.sleep(0.01)
            with suppress(OSError), path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != number:
                    number, position = os.fstat(file.fileno()).st_ino, 0
                file.seek(position)
                whole = file.read().rpartition(b"\n")[0]
                position += len(whole) + bool(whole)
                known = self.lines[site]
                newest = known[-1][1]["step"] if known else -1
                found = [json.loads(text) for text in whole.splitlines()]
                known += [(time.monotonic(), line) for line in found if line["step"] > newest or not known]

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """True when it holds, False if the run ends before or nothing happens for LIMIT_S."""
        deadline_s = time.monotonic() + LIMIT_S
        while not self.ended.is_set() and time.monotonic() < deadline_s:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def num_together(self, site: str) -> int:
        """Steps of all sites together since the last one that some did without the others."""
        count = 0
        for _, line in reversed(self.lines[site]):
            if len(line["sites"]) < len(self.sites):
                break
            count += 1
        return count

    def without_since(self, site: str, lost: str, at_s: float) -> list[tuple[float, dict[str, Any]]]:
        """Steps of `site` after `at_s` that it did without the `lost` one."""
        return [(when, line) for when, line in self.lines[site] if when > at_s and lost not in line["sites"]]

    def ambush(self, site: str, rank: int) -> Ambush:
        """The phases of one rank."""
        return Ambush(self.run_dir, site, rank)

    def befall(self, kind: str, victim: str) -> Callable[[], None]:
        """Let it happen; what mends it."""
        processes = processes_of(self.run_dir, victim)
        if kind in ("cut", "dark"):
            self._on_links(self.wan.cut, victim)
        if kind == "stop":
            signal_all(processes, signal.SIGSTOP)
            return lambda: signal_all(processes, signal.SIGCONT)
        if kind == "disk":
            return fill(self.run_dir / "sites" / victim)
        if kind != "cut":
            signal_all([one for one in processes if kind != "ranks" or is_rank(one)], signal.SIGKILL)
        return (lambda: self._on_links(self.wan.mend, victim)) if self.wan is not None else (lambda: None)

    def _on_links(self, act: Callable[[str], None], site: str) -> None:
        for other in self.sites:
            if other != site:
                act(f"{site}<>{other}")

    def figures(self) -> dict[int, tuple[Any, Any]]:
        """Loss and norm of every step, as the run has recorded them."""
        lines = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}

    def digests(self) -> list[str]:
        """Of the last checkpoint of each site."""
        found = []
        for site in self.sites:
            folder = self.run_dir / "sites" / site / "checkpoints" / f"step-{self.num_steps}"
            files = sorted(folder.glob("*.safetensors"))
            found.append(hashlib.sha256(b"".join(map(body_of, files))).hexdigest() if files else "none")
        return found


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable for the processes that are started in the context."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def surroundings(disturbed: Disturbed, small_disk_site: str | None, skewed_site: str | None) -> Iterator[None]:
    """A disk of its own for one site, and clocks an hour ahead for another; needs root."""
    with ExitStack() as stack:
        if skewed_site is not None:
            stack.enter_context(environment(SKEWED_VARIABLE, skewed_site))
        if small_disk_site is not None:
            place = disturbed.run_dir / "sites" / small_disk_site
            place.mkdir(parents=True)
            disturbed.spec(FOREVER).save(disturbed.run_dir / "run.json")  # else the folder is somebody else's
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
        yield


def fill(place: Path) -> Callable[[], None]:
    """Leave no byte on the disk of `place`; what makes room again."""
    filler = place / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    return lambda: filler.unlink(missing_ok=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def body_of(path: Path) -> bytes:
    """The tensors of a safetensors file; its header names their digests in any order."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def processes_of(run_dir: Path, site: str = "") -> list[int]:
    """The agent of a site, its ranks and their guards; without a site those of all."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
            is_there = not site or site.encode() in words or f"FARPIPE_SITE={site}".encode() in environment
            if str(run_dir).encode() in words and is_there:
                found.append(int(process.name))
    return found


def is_rank(process: int) -> bool:
    """True for a rank, False for its guard and for an agent."""
    with suppress(OSError):
        line = Path(f"/proc/{process}/cmdline").read_bytes()
        return b"farpipe.engine.outer.agent" not in line and b"guard.py" not in line
    return False


def signal_all(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)
