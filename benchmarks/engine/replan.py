"""A link that changes during a run, with and without planning anew. Prints JSON.

Four sleeping ranks at two sites (F = I = W = 20 ms, messages of 0.5 MB, 16 microbatches). The link between them
has 200 Mbit/s and 10 ms one way, then 50 Mbit/s and 60 ms, then 200 Mbit/s and 10 ms again. Both runs begin with the
best order for the link as it is at first, or with the one that --first names. Each takes one to two minutes.

    python -m benchmarks.engine.replan                    both runs
    python -m benchmarks.engine.replan --only without     one of them; --only with is the other
    python -m benchmarks.engine.replan --scale 0.4        the same with times and messages 0.4 times as long
    python -m benchmarks.engine.replan --steps 10,10,10   other lengths of the three phases
    python -m benchmarks.engine.replan --first 1f1b       another order to begin with
    python -m benchmarks.engine.replan --wan              over the kernel's TCP (root and /dev/net/tun needed)

Emulated links change exactly between two steps, those of the kernel when rank 0 has told of the step before, somewhere
in the next one.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.sleeping_ranks import SITES, two_by_two

NUM_MICROBATCHES = 16
LINKS = ("200 Mbit/s, 10 ms", "50 Mbit/s, 60 ms", "200 Mbit/s, 10 ms again")
GOOD, BAD = (0.010, 25e6), (0.060, 6.25e6)
"""Latency in seconds, bytes per second."""
ACTION_S, MESSAGE_BYTES = 0.020, 500_000
LAST_STEPS = 6
"""Of a phase, whose median is what steps take when all has settled."""
SEARCH_S = 5.0


def main() -> None:
    options = parse()
    found = {name: run(options, replan=name == "with") for name in ("without", "with") if options.only in (None, name)}
    phases = [
        {"link": link, **{f"{name}_s": result["settled_s"][phase] for name, result in found.items()}}
        for phase, link in enumerate(LINKS)
    ]
    totals = {f"all steps {name}_s": result["total_s"] for name, result in found.items()}
    watched = found.get("with", {})
    told = {key: watched[key] for key in ("steps until the new order", "what happened") if key in watched}
    each = {f"every step {name}_s": result["steps_s"] for name, result in found.items()}
    print(json.dumps({"steps": phases, **totals, **told, **each}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("without", "with"))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--steps", type=lambda text: [int(part) for part in text.split(",")], default=[10, 30, 30])
    parser.add_argument("--first", default="auto", help="the order that both runs begin with")
    parser.add_argument("--wan", action="store_true", help="links of the kernel instead of emulated ones")
    options = parser.parse_args()
    if len(options.steps) != len(LINKS):
        parser.error(f"--steps: expected {len(LINKS)} numbers, found {len(options.steps)}")
    return options


def run(options: argparse.Namespace, *, replan: bool) -> dict[str, Any]:
    """Time of the steps in every phase and in all, and the changes of order."""
    from farpipe.core.spec.run_keys import ReplanSettings
    from farpipe.engine.control.watch import LOG_NAME
    from farpipe.engine.launch import run as runner
    from farpipe.engine.links.wan import Wan, links_of_problem
    from farpipe.engine.run_settings import LinkChange
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning.planner.orders import find_order

    problem = make_problem(options.scale)
    starts = [sum(options.steps[:phase]) for phase in range(len(LINKS))]
    changes = {
        start: {"latency_s": latency_s * options.scale, "bandwidth_bytes_per_s": bandwidth}
        for start, (latency_s, bandwidth) in zip(starts[1:], (BAD, GOOD), strict=True)
    }
    link_changes = [
        LinkChange(step=step, link=link, **change) for step, change in changes.items() for link in problem.links
    ]
    spec = RunSpec.bare(
        problem=problem,
        schedule=find_order(problem, options.first, time_limit_s=SEARCH_S).schedule,
        sites=SITES,
        num_steps=sum(options.steps),
        device="sleep",
        emulate_links=not options.wan,
        link_changes=() if options.wan else tuple(link_changes),
        replan=ReplanSettings() if replan else None,
    )
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        wan = None
        if options.wan:
            wan = stack.enter_context(Wan.up([*dict.fromkeys(SITES)], links_of_problem(problem), name="replan"))

        def change_links(line: dict[str, Any]) -> None:
            if wan is not None and (change := changes.get(line["step"] + 2)):
                wan.set("west<>east", **change)

        runner.run(spec, run_dir, wan=wan, on_step=change_links)
        steps = [json.loads(line)["makespan_s"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        log = run_dir / LOG_NAME
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    ends = [*starts[1:], len(steps)]
    return {
        "settled_s": [
            round(median(steps[max(start, end - LAST_STEPS) : end]), 3) for start, end in zip(starts, ends, strict=True)
        ],
        "total_s": round(sum(steps), 1),
        "steps until the new order": [until(start, end, events) for start, end in zip(starts, ends, strict=True)][1:],
        "what happened": [{"step": e["step"], "event": e["event"], "facts": facts(e)} for e in events],
        "steps_s": [round(step, 3) for step in steps],
    }


def until(start: int, end: int, events: list[dict[str, Any]]) -> int | None:
    """The number of steps of a phase that were done in the order of the phase before."""
    swaps = [e["step"] for e in events if e["event"] == "swap" and start <= e["step"] < end]
    return swaps[0] + 1 - start if swaps else None


def facts(event: dict[str, Any]) -> str:
    """A line of the log, in short."""
    shown = {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in event.items()}
    return ", ".join(f"{name} {fact}" for name, fact in shown.items() if name not in ("step", "event"))


def make_problem(scale: float = 1.0) -> Any:
    from farpipe.core.step import Link

    latency_s, rate = GOOD
    link = Link(latency_s=latency_s * scale, bandwidth_bytes_per_s=rate)
    return two_by_two(link, round(MESSAGE_BYTES * scale), (ACTION_S * scale,) * 3, NUM_MICROBATCHES)


if __name__ == "__main__":
    main()
