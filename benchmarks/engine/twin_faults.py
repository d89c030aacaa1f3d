"""Every process of two sites of two, killed (SIGKILL) and stopped (SIGSTOP), in a collective and outside. Prints JSON.

    python -m benchmarks.engine.twin_faults [--shares "tensor 2"] [--faults 0:KILL:collective,3:STOP:forward]

Processes share layers (tensor 2) or weights (FSDP 2, ZeRO-3). One run per way to share, broken once by each fault in
the third step of an attempt, and started again from its newest checkpoint; the survivors are left to end by themselves
for six seconds, as at another site. `ended_s` is from the fault to the end of the last survivor, `named_by` the number
of the three survivors whose last words name the process, `is_named` whether the reason of the restart does. In a
collective: the process waits there for its neighbour, which comes half a second late. Then a link of the kernel is cut
for five seconds. Limits: `ended_s` at most 10 s, for a stopped process beyond the outage limit of 5 s; the reason names
it; losses, norms, weights and moments of the run are bit for bit those of an undisturbed one. Exit code 1 if a limit is
not kept.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

if __package__ is None or __package__ == "":  # a rank is started by its path
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.engine.soak import result_of
from benchmarks.shared.twins import OF_EXPERTS, OF_FOUR, REPLICAS, SITES, plan_of, write_model

RANK_WORD, FAULT = "--as-a-rank", "FARPIPE_TWIN_FAULT"
OUTAGE_S, LIMIT_S, LEFT_S = 5.0, 10.0, 6.0
"""Outage limit of the runs; time to end beyond it; time that survivors are left to end by themselves."""
BROKEN_STEP, STEPS_PER_FAULT = 3, 3
CUT_S = 5.0


class Fault(NamedTuple):
    """Signal to a process, and what it does then."""

    process: int
    signal: str
    where: str


FAULTS = tuple(Fault(p, s, where) for where in ("forward", "collective") for s in ("KILL", "STOP") for p in range(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", choices=OF_FOUR)
    parser.add_argument("--faults", default="", help="PROCESS:SIGNAL:WHERE, ...; all by default")
    parser.add_argument("--no-cut", action="store_true", help="leave the cut link out, which needs root")
    given = parser.parse_args()
    words = [word.split(":") for word in given.faults.split(",") if word]
    faults = [Fault(int(process), kind, where) for process, kind, where in words] or FAULTS
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        write_model(Path(folder) / "experts", kind="mixtral")
        found = [break_all(Path(folder), shares, faults) for shares in ([given.shares] if given.shares else OF_FOUR)]
        cuts = [] if given.no_cut else [cut(Path(folder), shares) for shares in OF_FOUR]
    rows = [row for rows, _ in found for row in rows]
    equal = {shares: same for shares, (_, same) in zip(OF_FOUR, found, strict=False)}
    print(json.dumps({"faults": rows, "equal to the undisturbed run": equal, "cuts": cuts}))
    is_kept = all(row["kept"] for row in rows) and all(equal.values()) and all(c["equal"] for c in cuts)
    sys.exit(0 if is_kept else 1)


def break_all(folder: Path, shares: str, faults: Sequence[Fault]) -> tuple[list[dict[str, Any]], bool]:
    """A row for each fault, and whether the run came to what an undisturbed one does."""
    from farpipe.engine.launch.run import run

    spec, run_dir, rows = spec_of(folder, shares, STEPS_PER_FAULT * (len(faults) + 1)), folder / shares, []

    def arm(number: int) -> None:
        os.environ[FAULT] = json.dumps(faults[number] if number < len(faults) else None)

    def on_restart(reason: str) -> None:
        rows.append(row_of(run_dir, shares, faults[len(rows)], len(rows), reason))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        arm(len(rows))

    arm(0)
    program = (str(Path(__file__).resolve()), RANK_WORD)
    try:
        with patch("farpipe.engine.launch.launcher.SETTLE_S", LEFT_S):
            run(spec, run_dir, max_restarts=len(faults), on_restart=on_restart, rank_program=program)
    finally:
        del os.environ[FAULT]
    run(spec, folder / f"{shares} undisturbed")
    return rows, result_of(run_dir) == result_of(folder / f"{shares} undisturbed")


def spec_of(folder: Path, shares: str, num_steps: int, outage_s: float = OUTAGE_S, *, emulate: bool = False) -> Any:
    """The run: four microbatches of two sequences of 16 tokens, a checkpoint after every step."""
    from farpipe.engine.launch.runs import run_spec_of
    from farpipe.engine.run_settings import TransportSettings

    keys = f"checkpoint_every_steps = 1\ncheckpoint_every_minutes = 0\nkeep_checkpoints = {num_steps}"
    model = folder / ("experts" if shares in OF_EXPERTS else "model")
    plan = plan_of(model, shares, (8, 1 if shares in REPLICAS else 2, 16), "zb-h1", keys)
    transport = TransportSettings(timeout_s=60, outage_s=outage_s)
    return run_spec_of(plan, num_steps=num_steps, emulate_links=emulate, transport=transport)


def row_of(run_dir: Path, shares: str, fault: Fault, attempt: int, reason: str) -> dict[str, Any]:
    """What came of a fault."""
    broken_s = (run_dir / "broken").stat().st_mtime
    logs = run_dir / "logs" / (f"restart-{attempt}" if attempt else "")
    survivors = [logs / f"rank-{process}.log" for process in range(4) if process != fault.process]
    ended_s = max(log.stat().st_mtime for log in survivors) - broken_s
    lost = re.compile(rf"rank {fault.process}\b.*(is lost|gave up)")
    others = [words for log in survivors if not lost.search(words := log.read_text())]
    named_by = len(survivors) - len(others)
    print(*others, sep="\n", end="", file=sys.stderr)
    limit_s = LIMIT_S + (OUTAGE_S if fault.signal == "STOP" else 0.0)
    row = {"shares": shares, "signal": fault.signal, "process": fault.process, "where": fault.where}
    found = {"is_named": f"rank {fault.process} " in reason, "named_by": named_by, "ended_s": round(ended_s, 1)}
    kept = ended_s <= limit_s and found["is_named"]
    return row | found | {"limit_s": limit_s, "kept": kept}


def cut(folder: Path, shares: str) -> dict[str, Any]:
    """A run over the kernel's links, cut for a while in its third step."""
    from farpipe.engine.launch.run import run
    from farpipe.engine.links import Wan, links_of_problem

    spec, run_dir, cuts = spec_of(folder, shares, 8, outage_s=30.0), folder / f"{shares} cut", []
    with Wan.up(SITES, links_of_problem(spec.plan.problem), name=f"twins{os.getpid()}") as wan:

        def on_step(line: dict[str, Any]) -> None:
            if line["step"] == 2 and not cuts:
                cuts.append(line["step"])
                wan.cut("west<>east")
                threading.Timer(CUT_S, lambda: wan.mend("west<>east")).start()

        summary = run(spec, run_dir, on_step=on_step, wan=wan, allow_plaintext=True)
    run(spec, folder / f"{shares} uncut")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    same = result_of(run_dir) == result_of(folder / f"{shares} uncut")
    longest_s = round(max(line["step_s"] for line in lines), 1)
    return {
        "shares": shares,
        "cut_s": CUT_S,
        "longest_step_s": longest_s,
        "attempts": summary.num_attempts,
        "equal": same,
    }


def rank() -> None:
    """One rank with the fault of this attempt; the program knows nothing of it."""
    import typer

    from farpipe.engine.launch import rank_main
    from farpipe.engine.site.sharding import StepReduction
    from farpipe.engine.stages.stage import TorchStage

    sys.argv.remove(RANK_WORD)
    number, fault, run_dir = int(os.environ["RANK"]), json.loads(os.environ[FAULT]), Path(sys.argv[-1])
    if fault is not None:
        process, kind, where = fault

        def strike() -> None:
            (run_dir / "broken").touch()
            os.kill(os.getpid(), signal.Signals[f"SIG{kind}"])

        steps = before_call(StepReduction, "begin", lambda number: None)
        is_its_step = lambda: steps[0] == BROKEN_STEP  # noqa: E731
        if where == "forward" and number == process:
            before_call(TorchStage, "forward", lambda count: strike() if is_its_step() else None)
        if where == "collective" and number == process:
            in_a_moment = lambda: threading.Timer(0.25, strike).start()  # noqa: E731
            before_call(StepReduction, "end", lambda count: in_a_moment() if is_its_step() else None)
        if where == "collective" and number == process ^ 1:
            before_call(StepReduction, "end", lambda count: time.sleep(0.5) if is_its_step() else None)
    typer.run(rank_main.main)


def before_call(owner: Any, name: str, call: Callable[[int], None]) -> list[int]:
    """Let ``call(count)`` come before every call of a method; the count, in a list."""
    original, count = getattr(owner, name), [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        call(count[0])
        return original(*arguments, **options)

    setattr(owner, name, wrapped)
    return count


if __name__ == "__main__":
    rank() if RANK_WORD in sys.argv else main()
