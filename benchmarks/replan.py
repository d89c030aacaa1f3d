"""A link that changes during a run, with and without planning anew. Prints JSON.

Four sleeping ranks at two sites (F = I = W = 20 ms, messages of 0.5 MB, 16 microbatches). The link between them
has 200 Mbit/s and 10 ms one way, then 50 Mbit/s and 60 ms, then 200 Mbit/s and 10 ms again. Both runs begin with the
best order for the link as it is at first. Figures are medians over the last steps of each phase, when all has settled.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

NUM_RANKS, NUM_MICROBATCHES = 4, 16
SITES = ("west", "west", "east", "east")
LINKS = ("200 Mbit/s, 10 ms", "50 Mbit/s, 60 ms", "200 Mbit/s, 10 ms again")
GOOD, BAD = (0.010, 25e6), (0.060, 6.25e6)
"""Latency in seconds, bytes per second."""
PHASE_STEPS, LAST_STEPS = (10, 30, 30), 6
SEARCH_S = 5.0


def main() -> None:
    without, planning = run(replan=False), run(replan=True)
    medians = zip(LINKS, without["median_step_s"], planning["median_step_s"], strict=True)
    phases = [{"link": link, "without_s": a, "with re-planning_s": b} for link, a, b in medians]
    totals = {"all steps without_s": without["total_s"], "all steps with re-planning_s": planning["total_s"]}
    print(json.dumps({"steps": phases, "what happened": planning["events"], **totals}))


def run(*, replan: bool) -> dict[str, Any]:
    """Median step of every phase, and what was done about it."""
    from farpipe.plan.orders import find_order
    from farpipe.runtime import run as runner
    from farpipe.runtime.replan import LOG_NAME
    from farpipe.runtime.run_spec import LinkChange, RunSpec
    from farpipe.spec.replanning import ReplanSettings

    problem = make_problem()
    starts = [sum(PHASE_STEPS[:phase]) for phase in range(len(PHASE_STEPS))]
    weather = tuple(
        LinkChange(step=step, link=link, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
        for step, (latency_s, bandwidth) in zip(starts[1:], (BAD, GOOD), strict=True)
        for link in problem.links
    )
    spec = RunSpec(
        problem=problem,
        schedule=find_order(problem, "auto", time_limit_s=SEARCH_S).schedule,
        sites=SITES,
        num_steps=sum(PHASE_STEPS),
        device="sleep",
        weather=weather,
        replan=ReplanSettings() if replan else None,
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        runner.run(spec, run_dir)
        steps = [json.loads(line)["makespan_s"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        log = run_dir / LOG_NAME
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    ends = [*starts[1:], len(steps)]
    return {
        "median_step_s": [round(median(steps[end - LAST_STEPS : end]), 3) for end in ends],
        "total_s": round(sum(steps), 1),
        "events": [{"step": e["step"], "event": e["event"], "facts": facts(e)} for e in events],
    }


def facts(event: dict[str, Any]) -> str:
    """What a line of the log says, in short."""
    shown = {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in event.items()}
    return ", ".join(f"{name} {fact}" for name, fact in shown.items() if name not in ("step", "event"))


def make_problem() -> Any:
    from farpipe.problem import Hop, Link, Problem, Rank, Stage, Transfer

    links = {name: Link(latency_s=GOOD[0], bandwidth_bytes_per_s=GOOD[1]) for name in ("west>east", "east>west")}
    there, back = (Transfer(link=name, bytes=500_000) for name in links)
    times = {"forward_s": 0.020, "input_grad_s": 0.020, "weight_grad_s": 0.020}
    return Problem(
        num_microbatches=NUM_MICROBATCHES,
        ranks=(Rank(),) * NUM_RANKS,
        stages=tuple(Stage(rank=rank, **times) for rank in range(NUM_RANKS)),
        links=links,
        hops=(Hop(), Hop(forward=there, backward=back), Hop()),
    )


if __name__ == "__main__":
    main()
