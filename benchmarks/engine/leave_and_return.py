"""A site leaves and returns, again and again, beside the same training undisturbed. Prints JSON.

Two sites of exact replicas (each a pipeline of --ranks processes), 10 ms and 100 Mbit/s apart, train a small model. In
every round something befalls one of them, at a moment of a step that moves on by a sixth of a step from round to round:

    kill    SIGKILL to its agent and its ranks
    ranks   SIGKILL to its ranks alone; its agent starts them again
    stop    SIGSTOP to all of its processes, and SIGCONT after --away seconds
    cut     both directions of the link drop everything for --away seconds (only with --wan, as root)

The next round begins when the site is back. Exit code 1 unless losses and gradient norms of all steps, and weights and
moments at the end at both sites, are those of the undisturbed run, bit for bit, and no process is left.

    python -m benchmarks.engine.leave_and_return --rounds 20
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

SITES = ("zurich", "lugano")
LATENCY_S, BYTES_PER_S = 0.010, 100e6 / 8
STEPS_BETWEEN = 8
"""Steps of both sites together before the next round."""
LIMIT_S = 180.0
PHASES = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--away", type=float, default=6.0)
    parser.add_argument("--wan", action="store_true")
    options = parser.parse_args()
    kinds = ["cut"] if options.wan else ["kill", "ranks", "stop"]
    with tempfile.TemporaryDirectory() as folder:
        disturbed = Disturbed(
            Path(folder) / "disturbed", options.ranks, options.steps, options.rounds, kinds, options.away
        )
        disturbed.train(wan=options.wan)
        num_steps = disturbed.num_steps
        calm = Disturbed(Path(folder) / "calm", options.ranks, num_steps, 0, kinds, 0.0)
        calm.train()
        result = report(disturbed, calm)
    print(json.dumps(result, indent=1))
    sys.exit(0 if all(result["equal to the undisturbed run"].values()) and not result["processes left"] else 1)


def run_spec(num_ranks: int, num_steps: int, *, emulate: bool) -> Any:
    """A replica of `num_ranks` stages at each site."""
    from farpipe.core.schedule.library import order
    from farpipe.core.spec import Data, Model, Training
    from farpipe.core.step import Hop, Link, Problem, Rank, Stage
    from farpipe.engine.run_spec import RunSpec

    names = [f"{a}>{b}" for a, b in (SITES, SITES[::-1])]
    problem = Problem(
        num_microbatches=2,
        ranks=(Rank(),) * num_ranks,
        stages=tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(num_ranks)),
        hops=(Hop(),) * (num_ranks - 1),
        links={name: Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S) for name in names},
    )
    model = Model(name="small", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, ffn_hidden=176, vocab_size=256)
    training = Training(
        sequence_length=64,
        global_batch=16,
        microbatch_size=4,
        precision="fp32",
        learning_rate=2e-3,
        checkpoint_every_minutes=0,
        elastic=True,
    )
    cuts = [round(stage * model.num_layers / num_ranks) for stage in range(num_ranks + 1)]
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=(SITES[0],) * num_ranks,
        replicas=tuple((site,) * num_ranks for site in SITES),
        num_steps=num_steps,
        model=model,
        training=training,
        data=Data(held_out=0.02),
        partition=tuple(pairwise(cuts)),
        emulate_links=emulate,
    )


class Disturbed:
    """One training, and what befalls its sites."""

    def __init__(
        self, run_dir: Path, num_ranks: int, num_steps: int, rounds: int, kinds: list[str], away_s: float
    ) -> None:
        self.run_dir, self.num_ranks, self.num_steps = run_dir, num_ranks, num_steps
        self.kinds, self.num_rounds, self.away_s = kinds, rounds, away_s
        self.lines: dict[str, list[tuple[float, dict[str, Any]]]] = {site: [] for site in SITES}
        self.rounds: list[dict[str, Any]] = []
        self.wan: Any = None
        self._ended = threading.Event()
        self._stopped: list[int] = []

    def train(self, *, wan: bool = False) -> None:
        """Train all steps, with the rounds beside it."""
        from farpipe.core.spec import SiteLink
        from farpipe.engine.launch.run import run
        from farpipe.engine.links import Wan

        watching = [threading.Thread(target=self._watch, args=(site,), daemon=True) for site in SITES]
        watching += [threading.Thread(target=self._disturb, daemon=True)] if self.num_rounds else []
        with ExitStack() as stack:
            if wan:
                figures = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": BYTES_PER_S}
                links = [SiteLink(source=a, target=b, **figures) for a, b in (SITES, SITES[::-1])]
                self.wan = stack.enter_context(Wan.up(SITES, links, name=f"elastic{os.getpid()}"))
            for thread in watching:
                thread.start()
            run(
                run_spec(self.num_ranks, self.num_steps, emulate=not wan),
                self.run_dir,
                wan=self.wan,
                allow_plaintext=wan,
                on_notice=lambda text: print(text, file=sys.stderr, flush=True),
            )
            self._ended.set()

    def _watch(self, site: str) -> None:
        """Take the time of every line of a site's metrics."""
        path, position, number = self.run_dir / "sites" / site / "metrics.jsonl", 0, -1
        while not self._ended.is_set():
            time.sleep(0.01)
            with suppress(FileNotFoundError), path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != number:
                    number, position = os.fstat(file.fileno()).st_ino, 0
                file.seek(position)
                whole = file.read().rpartition(b"\n")[0]
                position += len(whole) + bool(whole)
                known = self.lines[site]
                newest = known[-1][1]["step"] if known else -1
                found = [json.loads(text) for text in whole.splitlines()]
                known += [(time.monotonic(), line) for line in found if line["step"] > newest or not known]

    def _disturb(self) -> None:
        for number in range(self.num_rounds):
            victim, survivor = SITES[(number + 1) % 2], SITES[number % 2]
            found = self._round(self.kinds[number // 2 % len(self.kinds)], victim, survivor, number % PHASES)
            if found is None:
                return
            self.rounds.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)

    def _round(self, kind: str, victim: str, survivor: str, phase: int) -> dict[str, Any] | None:
        """One round; None where the run ends, or nothing happens for LIMIT_S."""
        if not self._await(lambda: self._num_together(survivor) >= STEPS_BETWEEN):
            return None
        step_s = median(line["step_s"] for _, line in self.lines[survivor][-STEPS_BETWEEN:])
        time.sleep(step_s * phase / PHASES)
        at_s = time.monotonic()
        self._befall(kind, victim)
        if not self._await(lambda: bool(self._alone_since(survivor, at_s))):
            return None
        first_s, _ = self._alone_since(survivor, at_s)[0]
        self._mend(kind)
        mended_s = time.monotonic()
        if not self._await(lambda: self._num_together(survivor) >= 1 and self.lines[survivor][-1][0] > first_s):
            return None
        events = [event for _, line in self.lines[survivor] for event in line.get("site_events", ())]
        entered = [event for event in events if event["kind"] == "entered"]
        return {
            "kind": kind,
            "site": victim,
            "phase": phase,
            "step_s": step_s,
            "next step completed after, s": first_s - at_s,
            "back after, s": time.monotonic() - mended_s,
            "bytes": entered[-1].get("sent_bytes", 0),
        }

    def _await(self, condition: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + LIMIT_S
        while not self._ended.is_set() and time.monotonic() < deadline_s:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def _num_together(self, site: str) -> int:
        """Steps of both sites together since the last one that this site did alone."""
        count = 0
        for _, line in reversed(self.lines[site]):
            if len(line["sites"]) < len(SITES):
                break
            count += 1
        return count

    def _alone_since(self, site: str, at_s: float) -> list[tuple[float, dict[str, Any]]]:
        return [(when, line) for when, line in self.lines[site] if when > at_s and line["sites"] == [site]]

    def _befall(self, kind: str, victim: str) -> None:
        processes = processes_of(self.run_dir, victim)
        if kind == "cut":
            self.wan.cut("<>".join(SITES))
        elif kind == "stop":
            self._stopped = processes
            signal_all(processes, signal.SIGSTOP)
        else:
            chosen = [one for one in processes if kind == "kill" or is_rank(one)]
            signal_all(chosen, signal.SIGKILL)

    def _mend(self, kind: str) -> None:
        if kind in ("cut", "stop"):
            time.sleep(self.away_s)
        if kind == "cut":
            self.wan.mend("<>".join(SITES))
        if kind == "stop":
            signal_all(self._stopped, signal.SIGCONT)

    def figures(self) -> dict[int, tuple[Any, Any]]:
        """Loss and norm of every step, as the run has recorded them."""
        lines = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}

    def digests(self) -> list[str]:
        """Of the last checkpoint of each site."""
        found = []
        for site in SITES:
            folder = self.run_dir / "sites" / site / "checkpoints" / f"step-{self.num_steps}"
            files = sorted(folder.glob("*.safetensors"))
            found.append(hashlib.sha256(b"".join(map(body_of, files))).hexdigest() if files else "none")
        return found


def body_of(path: Path) -> bytes:
    """The tensors of a safetensors file; its header names their digests in any order."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def processes_of(run_dir: Path, site: str) -> list[int]:
    """The agent of a site, its ranks and their guards."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
            if str(run_dir).encode() in words and (
                site.encode() in words or f"FARPIPE_SITE={site}".encode() in environment
            ):
                found.append(int(process.name))
    return found


def is_rank(process: int) -> bool:
    with suppress(OSError):
        return b"farpipe.engine.launch.rank_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def signal_all(processes: list[int], number: int) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, number)


def report(disturbed: Disturbed, calm: Disturbed) -> dict[str, Any]:
    """What came of both."""
    one, other = disturbed.figures(), calm.figures()
    digests = {*disturbed.digests(), *calm.digests()}
    of_kind = {
        kind: [found for found in disturbed.rounds if found["kind"] == kind]
        for kind in dict.fromkeys(found["kind"] for found in disturbed.rounds)
    }
    return {
        "ranks": disturbed.num_ranks,
        "steps": disturbed.num_steps,
        "rounds": {
            kind: {
                "number": len(found),
                **{
                    f"{name}, {how}": round(choose(one[name] for one in found), 2)
                    for name in ("next step completed after, s", "back after, s", "bytes", "step_s")
                    for how, choose in (("median", median), ("most", max))
                },
            }
            for kind, found in of_kind.items()
        },
        "equal to the undisturbed run": {
            "losses and norms": one == other and len(one) == disturbed.num_steps,
            "weights and moments of both sites": len(digests) == 1 and "none" not in digests,
            "all rounds": len(disturbed.rounds) == disturbed.num_rounds,
        },
        "processes left": sum(len(processes_of(d.run_dir, site)) for d in (disturbed, calm) for site in SITES),
    }


if __name__ == "__main__":
    main()
