"""A few thousand short training steps under random faults, beside the same steps undisturbed. Prints JSON.

Two ranks (or replicas of them) over loopback, all connections within TLS. While they train, each rank now and then
shuts one of its connections, or all of them for a third of a second in which none can be made; some times a rank is
killed (SIGKILL) and the run is started again from its newest checkpoint. What is drawn follows from the seed, when it
happens from the clock. Exit code 1 if a limit is not kept.

Limits: losses and gradient norms of all steps, and the final weights and moments, are those of the undisturbed run, bit
for bit. Memory, threads and file descriptors of the ranks don't grow: the slope is that of a line through what was seen
within each attempt and rank, without an attempt's first part.
"""

import argparse
import json
import os
import random
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("memory_MiB", "threads", "descriptors")
KILLS = (0.04, 0.1, 0.16, 0.25)
"""Times at which a rank is killed, as parts of the run; the last attempt is the longest."""
MEAN_PAUSE_S, OUTAGE_S, OUTAGES = 0.5, 0.3, 0.15
"""Between two faults of a rank; how long an outage is; what part of the faults are outages."""
SAMPLES_S = 0.4
SKIPPED_STEPS = 1000
"""Of an attempt, in which memory is still being laid out: 1 MiB in these, 0.7 in six thousand more."""
MOST = {"memory_MiB": 2.0, "threads": 3.0, "descriptors": 3.0}
"""Growth per 1000 steps that counts as none: what an allocator's noise may look like."""
NUM_ROWS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--replicas", type=int, default=1, choices=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=len(KILLS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.steps, options.replicas, options.seed, KILLS[: options.kills])
    print(json.dumps(result))
    sys.exit(0 if all(result["equal to the undisturbed run"].values()) and not result["grew"] else 1)


def soak(folder: Path, num_steps: int, num_replicas: int, seed: int, kills: tuple[float, ...]) -> dict[str, Any]:
    """Both runs, and what came of them."""
    from farpipe.engine.launch.run import RANK_PROGRAM, run
    from farpipe.engine.transport.security.authority import init, issue

    init(folder / "certs")
    for site in SITES:
        issue(folder / "certs", site)
    spec, certs = make_run(folder, num_steps, num_replicas), ("--certs", str(folder / "certs"))
    draw, moments = random.Random(seed), [int(part * num_steps) for part in kills]
    os.environ["FARPIPE_SOAK_SEED"] = str(seed)
    programs = {"undisturbed": RANK_PROGRAM, "disturbed": (str(Path(__file__).resolve()), RANK_WORD)}
    skipped_steps = min(SKIPPED_STEPS, num_steps // 8)
    observers = {
        name: Observer(folder / name, draw, moments if name == "disturbed" else [], skipped_steps) for name in programs
    }
    took_s = {}
    for name, program in programs.items():
        start_s = time.monotonic()
        options = {"on_step": observers[name], "max_restarts": len(observers[name].kills), "on_restart": tell}
        run(spec, folder / name, rank_program=(*program, *certs), **options)
        took_s[name] = round(time.monotonic() - start_s, 1)
    undisturbed, disturbed = (result_of(folder / name) for name in programs)
    slopes = {name: {kind: slope(observer.samples, kind) for kind in KINDS} for name, observer in observers.items()}
    return {
        "steps": num_steps,
        "seconds": took_s,
        "faults": faults(folder / "disturbed") | {"kills": observers["disturbed"].num_kills},
        "equal to the undisturbed run": {key: found == disturbed[key] for key, found in undisturbed.items()},
        "growth per 1000 steps": slopes,
        "grew": [kind for kind, found in slopes["disturbed"].items() if found > MOST[kind]],
        "largest of all ranks": rows(observers["disturbed"].samples),
    }


def tell(reason: str) -> None:
    print(f"started again: {reason.splitlines()[0]}", file=sys.stderr)


SITES = ("east", "west")


def make_run(folder: Path, num_steps: int, num_replicas: int) -> Any:
    """A small model on two stages."""
    from farpipe.core.schedule.library import order
    from farpipe.core.spec import Data, Model, Training
    from farpipe.core.step import Hop, Problem, Rank, Stage
    from farpipe.engine.run_settings import TransportSettings
    from farpipe.engine.run_spec import RunSpec

    (folder / "text.txt").write_text("a stitch in time saves nine, and a soak saves a night. " * 200)
    model = Model(name="soaked", num_layers=2, hidden=16, num_heads=2, num_kv_heads=2, ffn_hidden=32, vocab_size=256)
    stages = tuple(Stage(rank=rank, forward_s=1, input_grad_s=1, weight_grad_s=1) for rank in range(2))
    problem = Problem(num_microbatches=4 // num_replicas, ranks=(Rank(),) * 2, stages=stages, hops=(Hop(),))
    training = Training(
        sequence_length=16,
        global_batch=8,
        microbatch_size=2,
        precision="fp32",
        learning_rate=3e-3,
        warmup_steps=20,
        decay="cosine",
        zero1=num_replicas > 1,
        checkpoint_every_steps=50,
        checkpoint_every_minutes=0,
    )
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=SITES,
        replicas=(SITES,) * num_replicas,
        num_steps=num_steps,
        emulate_links=False,
        transport=TransportSettings(timeout_s=30, outage_s=30),
        model=model,
        training=training,
        data=Data(source=str(folder / "text.txt")),
        partition=((0, 1), (1, 2)),
    )


def result_of(run_dir: Path) -> dict[str, Any]:
    """Loss and gradient norm of every step, and the last checkpoint's digest of every tensor."""
    from safetensors import safe_open

    from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, folder_of, whole_checkpoints

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = whole_checkpoints(run_dir / CHECKPOINTS_NAME)[0]
    tensors = {}
    for path in sorted(folder_of(run_dir / CHECKPOINTS_NAME, last).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors[path.name] = file.metadata()
    steps = [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
    return {"steps": steps, "last": last, "tensors": tensors}


class Sample(NamedTuple):
    """Resources of the machine that one rank holds."""

    seconds: float
    step: int
    attempt: int
    rank: int
    figures: dict[str, float]


class Observer:
    """`on_step` of the disturbed run: takes samples, and kills a rank when it is time to."""

    def __init__(self, run_dir: Path, draw: random.Random, kills: list[int], skipped_steps: int) -> None:
        self.run_dir, self.draw, self.kills, self.skipped_steps = run_dir, draw, kills, skipped_steps
        self.samples: list[Sample] = []
        self.num_kills, self.attempt, self.first_step = 0, -1, 0
        self.ranks: dict[int, int] = {}
        self.begin_s = self.last_s = time.monotonic()

    def __call__(self, line: dict[str, Any]) -> None:
        if line["attempt"] != self.attempt:
            self.attempt, self.first_step, self.ranks = line["attempt"], line["step"], ranks_of(self.run_dir)
        if self.kills and line["step"] >= self.kills[0]:
            del self.kills[0]
            self.num_kills += 1
            with suppress(ProcessLookupError):
                os.kill(self.ranks[self.draw.choice(sorted(self.ranks))], signal.SIGKILL)
        now_s = time.monotonic()
        if now_s > self.last_s + SAMPLES_S and line["step"] >= self.first_step + self.skipped_steps:
            self.last_s = now_s
            for rank, process_id in self.ranks.items():
                with suppress(OSError):
                    sample = (now_s - self.begin_s, line["step"], self.attempt, rank, figures(process_id))
                    self.samples.append(Sample(*sample))


def ranks_of(run_dir: Path) -> dict[int, int]:
    """Process ids of the ranks that run now, by rank; not those of their guards."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if str(run_dir) in words and words[1] in ("-m", str(Path(__file__).resolve())):
                environment = dict(item.partition("=")[::2] for item in (process / "environ").read_text().split("\0"))
                found[int(environment["RANK"])] = int(process.name)
    return found


def figures(process_id: int) -> dict[str, float]:
    place = Path("/proc") / str(process_id)
    resident_pages = int((place / "statm").read_text().split()[1])
    counts = (resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len([*(place / "task").iterdir()]))
    return dict(zip(KINDS, (*counts, len([*(place / "fd").iterdir()])), strict=True))


def slope(samples: list[Sample], kind: str) -> float:
    """Growth per 1000 steps: least squares, with a level of its own for every attempt and rank."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.attempt, sample.rank].append((sample.step, sample.figures[kind]))
    above = below = 0.0
    for points in groups.values():
        x_mean, y_mean = (sum(values) / len(points) for values in zip(*points, strict=True))
        above += sum((x - x_mean) * (y - y_mean) for x, y in points)
        below += sum((x - x_mean) ** 2 for x, _ in points)
    return round(1000 * above / below, 3) if below else 0.0


def rows(samples: list[Sample]) -> list[dict[str, Any]]:
    """Samples over time: some moments, the largest of all ranks."""
    moments = sorted({(sample.seconds, sample.step, sample.attempt) for sample in samples})
    chosen = moments[:: -(-len(moments) // NUM_ROWS) or 1]
    return [
        {"second": round(seconds), "step": step, "attempt": attempt}
        | {
            kind: round(max(s.figures[kind] for s in samples if (s.seconds, s.step) == (seconds, step)), 1)
            for kind in KINDS
        }
        for seconds, step, attempt in chosen
    ]


def faults(run_dir: Path) -> dict[str, int]:
    """Faults that the ranks caused themselves, as their own files say."""
    found: dict[str, int] = defaultdict(int)
    for record in run_dir.glob("faults-*"):
        for word in record.read_text().split():
            found[word] += 1
    return dict(found)


RANK_WORD = "--as-a-rank"


class Trouble(threading.Thread):
    """In a rank: shuts its connections now and then."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        super().__init__(name="trouble", daemon=True)
        records = [*run_dir.glob(f"faults-*-{rank}")]
        self.record = run_dir / f"faults-{len(records)}-{rank}"
        self.draw = random.Random(f"{os.environ['FARPIPE_SOAK_SEED']} {len(records)} {rank}")
        self.until_s = 0.0

    def run(self) -> None:
        while True:
            time.sleep(self.draw.expovariate(1 / MEAN_PAUSE_S))
            is_outage = self.draw.random() < OUTAGES
            with self.record.open("a") as record:
                record.write("outages\n" if is_outage else "breaks\n")
            if is_outage:
                self.until_s = time.monotonic() + OUTAGE_S
                while time.monotonic() < self.until_s:
                    self.shut(connections())
                    time.sleep(0.02)
            else:
                found = connections()
                self.shut(self.draw.sample(found, min(1, len(found))))

    def shut(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            with suppress(OSError), opened(descriptor) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def connections() -> list[int]:
    """Descriptors of this process's connections to other ranks; not of those to the meeting point."""
    found = []
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError), opened(int(place.name)) as sock:
            ports = sock.getpeername()[1], sock.getsockname()[1]
            if int(os.environ["MASTER_PORT"]) not in ports:
                found.append(int(place.name))
    return sorted(found)


def opened(descriptor: int) -> socket.socket:
    """The socket of a descriptor once more; OSError when it is none."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError
    return socket.socket(fileno=os.dup(descriptor))


def rank() -> None:
    """One rank, with trouble; the program knows nothing of it."""
    import typer

    from farpipe.engine.launch import rank_main
    from farpipe.engine.transport.dialler import Dialler

    sys.argv.remove(RANK_WORD)
    trouble, dial = Trouble(Path(sys.argv[-1]), int(os.environ["RANK"])), Dialler.dial

    def dial_unless_cut(self: Any, *arguments: Any) -> Any:
        if time.monotonic() < trouble.until_s:
            raise ConnectionResetError("cut for a moment")
        return dial(self, *arguments)

    Dialler.dial = dial_unless_cut  # type: ignore[method-assign]
    trouble.start()
    typer.run(rank_main.main)


if __name__ == "__main__":
    rank() if RANK_WORD in sys.argv else main()
