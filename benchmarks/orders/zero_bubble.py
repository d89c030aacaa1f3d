"""Zero bubble as published: bubbles of 1F1B, ZB-1p and ZB-2p, ours / the paper's, on the rows of its tables.

    FARPIPE_DATA=... python -m benchmarks.orders.zero_bubble

The limit to hold this against are tables 5 and 9 of arXiv 2401.10241: bubble = (t - m (F + I + W)) / t, t the longest
time that any stage takes from its own first to its own last action.
"""

import json
from typing import Any

from benchmarks.shared.data import data_folder
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Schedule, Stage, Transfer


def problem(row: dict[str, Any]) -> Problem:
    """One row; an activation is s (34 h + 5 a s) bytes, what I leaves to W 32 s h."""
    num_ranks, length, hidden = row["num_ranks"], row["sequence_length"], row["hidden"]
    stages = [
        Stage(
            rank=rank,
            forward_s=row["forward_ms"],
            input_grad_s=row["input_grad_ms"],
            weight_grad_s=row["weight_grad_ms"],
            activation_bytes=float(length * (34 * hidden + 5 * row["num_heads"] * length)),
            weight_stash_bytes=float(32 * length * hidden),
        )
        for rank in range(num_ranks)
    ]
    hops = [(f"{rank}>{rank + 1}", f"{rank + 1}>{rank}") for rank in range(num_ranks - 1)]
    link = Link(latency_s=row["message_ms"], bandwidth_bytes_per_s=1.0)
    return Problem(
        num_microbatches=row["num_microbatches"],
        ranks=(Rank(),) * num_ranks,
        stages=tuple(stages),
        links={name: link for names in hops for name in names},
        hops=tuple(
            Hop(forward=Transfer(link=there, bytes=0.0), backward=Transfer(link=back, bytes=0.0))
            for there, back in hops
        ),
    )


def bubble(step: Problem, schedule: Schedule) -> float:
    """As the paper counts it."""
    check(step, schedule)
    actions = simulate(step, schedule, checked=True).actions
    spans = [
        mine["end_s"].max() - mine["start_s"].min()
        for mine in (actions[actions["rank"] == rank] for rank in range(step.num_ranks))
    ]
    work_s = sum(float(step.table(name)[0].sum()) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    return 1 - work_s / float(max(spans))


def measured(row: dict[str, Any]) -> dict[str, str]:
    """One line of the table."""
    step = problem(row)
    cells = {"model": str(row["model"]), "ranks": str(step.num_ranks), "microbatches": str(step.num_microbatches)}
    for name in ("1f1b", "zb-1p", "zb-2p"):
        cells[name] = f"{bubble(step, order(name, step)):.4f} / {row['bubble_' + name.replace('-', '_')]:.4f}"
    return cells


def main() -> None:
    """Print the table as JSON."""
    text = (data_folder("published/") / "published" / "zero_bubble.json").read_text()
    rows = [measured(row) for row in json.loads(text)["rows"]]
    print(json.dumps({"benchmark": "zero_bubble", "bubble, ours / published": rows}))


if __name__ == "__main__":
    main()
