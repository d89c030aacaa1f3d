"""CrossPipe's grid: step time of a 70B model on 8 ranks over two sites, against the distance between them.
Latency and message time are multiples of the forward time of one rank; the figures are seconds per microbatch, step
time / 16. The limits to hold this against are the lower bound, `ideal` (F + I + W, no bubble at all), and what
CrossPipe publishes (USENIX ATC 2025, arXiv 2507.00217): at most 33.6 % less than traditional orders in the memory of
1F1B. `auto` searches one stage per rank and two in a V and takes the better.

    python -m benchmarks.orders.crosspipe_grid [--plot PICTURE.svg]

Times: Table 5 there, M70, TP 4, PP 8, m = 16; F, I and W are fitted to its column without delay (1F1B, 0.151 s).
The model is the same in every placement: of two stages on a rank each has half of the time and half of the activations.
An activation fills its place until the end of its W. The traditional orders are simulated with messages that never
block a rank, as farpipe's engine sends them; the published ones are slower, for there a rank waits for its messages.
"""

import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from farpipe.core.errors import FarpipeError
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.planning.search import FoundOrder, search

NUM_RANKS, NUM_MICROBATCHES = 8, 16
FORWARD_S, INPUT_GRAD_S, WEIGHT_GRAD_S = 0.038, 0.0465, 0.0205
IDEAL_S = FORWARD_S + INPUT_GRAD_S + WEIGHT_GRAD_S
DELAYS = (0.0, 0.25, 0.5, 1.0, 2.0)
EQUAL, TWICE = NUM_RANKS, 2 * NUM_RANKS
"""Microbatches that fit a rank: as many as 1F1B holds, and twice as many."""
TRADITIONAL = {"1f1b": "one", "interleaved": "round", "zb-h1": "one", "zbv": "v"}
"""With the placement that each is defined for."""
LIMITS_S = {"one": 6.0, "v": 20.0}
"""For one search, which takes less: most are proven optimal sooner, and the effort of the others is counted."""
PUBLISHED = {
    (0, 0): {"1f1b": 0.151, "zb-h1": 0.133, "zbv": 0.118, "best": 0.119, "best, twice": 0.108},
    (0.25, 0.25): {"1f1b": 0.168, "zb-h1": 0.150, "zbv": 0.148, "best": 0.127, "best, twice": 0.112},
    (0.25, 2): {"1f1b": 0.241, "zb-h1": 0.230, "zbv": 0.315, "best": 0.177, "best, twice": 0.144},
    (2, 0.25): {"1f1b": 0.242, "zb-h1": 0.229, "zbv": 0.314, "best": 0.148, "best, twice": 0.115},
    (2, 2): {"1f1b": 0.321, "zb-h1": 0.309, "zbv": 0.473, "best": 0.196, "best, twice": 0.145},
}
"""Seconds per microbatch at (latency, message) / F; `best` is the lowest of theirs: 16 microbatches in the memory of
1F1B, or 32 in twice that."""
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "crosspipe.svg"


def placement(shape: str) -> list[int]:
    """The rank of every stage: ``one`` each, two in a ``v``, or two ``round`` robin."""
    ring = list(range(NUM_RANKS))
    return {"one": ring, "v": ring + ring[::-1], "round": ring + ring}[shape]


def two_sites(
    shape: str, delay: tuple[float, float], in_flight: int, num_microbatches: int = NUM_MICROBATCHES
) -> Problem:
    """Half of the ranks at each of two sites, a link for each direction; `delay` is (latency, message) / F."""
    ranks = placement(shape)
    share = NUM_RANKS / len(ranks)
    stages = [
        Stage(
            rank=rank,
            forward_s=share * FORWARD_S,
            input_grad_s=share * INPUT_GRAD_S,
            weight_grad_s=share * WEIGHT_GRAD_S,
            activation_bytes=share,
            weight_stash_bytes=share,
        )
        for rank in ranks
    ]
    link = Link(latency_s=delay[0] * FORWARD_S, bandwidth_bytes_per_s=1.0)
    sites = ["ab"[2 * rank // NUM_RANKS] for rank in ranks]
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(memory_bytes=float(in_flight)),) * NUM_RANKS,
        stages=tuple(stages),
        links={"a>b": link, "b>a": link},
        hops=tuple(_hop(*ends, delay[1] * FORWARD_S) for ends in itertools.pairwise(sites)),
    )


def _hop(source: str, target: str, message_s: float) -> Hop | None:
    """Between stages at two sites; inside a site messages are free."""
    if source == target:
        return None
    there, back = (Transfer(link=name, bytes=message_s) for name in (f"{source}>{target}", f"{target}>{source}"))
    return Hop(forward=there, backward=back)


def named_s(name: str, shape: str, delay: tuple[float, float], in_flight: int) -> float | None:
    """Seconds per microbatch of a named order; None where it does not fit memory."""
    problem = two_sites(shape, delay, in_flight)
    try:
        schedule = order(name, problem)
        check(problem, schedule)
    except FarpipeError:
        return None
    return simulate(problem, schedule, checked=True).makespan_s / NUM_MICROBATCHES


def point(in_flight: int, delay: tuple[float, float], limits_s: dict[str, float] = LIMITS_S) -> dict[str, Any]:
    """One row of the table: seconds per microbatch, the gap to the bound, and what was won."""
    orders = {name: named_s(name, shape, delay, in_flight) for name, shape in TRADITIONAL.items()}
    orders["wave"] = named_s("wave", "v", delay, in_flight)
    problems = {shape: two_sites(shape, delay, in_flight) for shape in limits_s}
    greedy = {shape: search(problem, 1.0, methods=["greedy"]) for shape, problem in problems.items()}
    found = {shape: search(problem, limits_s[shape]) for shape, problem in problems.items()}
    best = min(found, key=lambda shape: found[shape].timeline.makespan_s)
    best_s, bound_s = _per_microbatch(found[best]), min(f.lower_bound_s for f in found.values()) / NUM_MICROBATCHES
    traditional_s = min(seconds for name in TRADITIONAL if (seconds := orders[name]) is not None)
    return {
        "latency / F": delay[0],
        "message / F": delay[1],
        **orders,
        "greedy": min(map(_per_microbatch, greedy.values())),
        "auto, one": _per_microbatch(found["one"]),
        "auto, v": _per_microbatch(found["v"]),
        "auto": best_s,
        "placement": best,
        "gap": best_s / bound_s - 1,
        "gap in its placement": found[best].gap,
        "less than the best traditional": 1 - best_s / traditional_s,
        "less than 1f1b": 1 - best_s / (orders["1f1b"] or best_s),
    }


def _per_microbatch(found: FoundOrder) -> float:
    return found.timeline.makespan_s / NUM_MICROBATCHES


def many_s(delay: tuple[float, float]) -> float:
    """Seconds per microbatch of the best order for twice the microbatches in twice the memory, as is published."""
    problems = {shape: two_sites(shape, delay, TWICE, 2 * NUM_MICROBATCHES) for shape in LIMITS_S}
    steps_s = (search(problem, LIMITS_S[shape]).timeline.makespan_s for shape, problem in problems.items())
    return min(steps_s) / (2 * NUM_MICROBATCHES)


def grid(in_flight: int, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """All rows for one memory."""
    return list(pool.map(partial(point, in_flight), itertools.product(DELAYS, DELAYS)))


def summary(equal: list[dict[str, Any]], twice: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the papers' claims are held against."""
    won = max(equal, key=lambda row: row["less than the best traditional"])
    against = max(equal, key=lambda row: row["less than 1f1b"])
    published = [(1 - at(equal, delay)["auto"] / row["1f1b"]) for delay, row in PUBLISHED.items()]
    kept = [twice[0]["auto"] / row["auto"] for row in twice]
    return {
        "less time than the best traditional order, same memory": {
            "largest": won["less than the best traditional"],
            "at latency and message / F": f"{won['latency / F']:g}, {won['message / F']:g}",
            "published": 0.336,
        },
        "less time than 1f1b, same memory, largest": against["less than 1f1b"],
        "less time than 1f1b as published, same memory, largest": max(published),
        "kept of the best without delay, twice the memory": {
            "mean": sum(kept) / len(kept),
            "where messages take at most F / 2, least": least(kept, twice, 0.5),
            "everywhere, least": min(kept),
        },
        "kept of ideal, twice the memory, everywhere, least": min(IDEAL_S / row["auto"] for row in twice),
        "gap, largest": max(row["gap"] for row in equal + twice),
        "gap at most 1e-6, of 50": sum(row["gap"] < 1e-6 for row in equal + twice),
    }


def at(rows: list[dict[str, Any]], delay: tuple[float, float]) -> dict[str, Any]:
    """The row for one delay."""
    return next(row for row in rows if (row["latency / F"], row["message / F"]) == delay)


def least(kept: list[float], rows: list[dict[str, Any]], message: float) -> float:
    """The least that is kept where messages take at most `message` forward times."""
    return min(share for share, row in zip(kept, rows, strict=True) if row["message / F"] <= message)


def _met(beside: list[dict[str, Any]]) -> int:
    """The number of their best that ours meet, to the three digits that are published."""
    cells = [row[name].split(" / ") for row in beside for name in ("best", "best, twice")]
    return sum(float(ours) <= float(theirs) for ours, theirs in cells)


def beside_published(equal: list[dict[str, Any]], pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Ours / theirs, seconds per microbatch."""
    table = []
    for (delay, row), twice_s in zip(PUBLISHED.items(), pool.map(many_s, PUBLISHED), strict=True):
        here = at(equal, delay)
        ours = {name: here[name] for name in ("1f1b", "zb-h1", "zbv")}
        ours |= {"best": here["auto"], "best, twice": twice_s}
        cells = {name: f"{ours[name]:.3f} / {theirs:.3f}" for name, theirs in row.items()}
        table.append({"latency / F": delay[0], "message / F": delay[1], **cells})
    return table


def draw(equal: list[dict[str, Any]], twice: list[dict[str, Any]], path: Path) -> None:
    """The picture: what is won against the best traditional order, and what is kept of the ideal."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "farpipe", "font.size": 9, "axes.titlesize": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.7), layout="constrained", sharey=True)
    won = [row["less than the best traditional"] for row in equal]
    _heat(axes[0], equal, won, "Time saved against the best of\n1F1B, interleaved, ZB-H1, ZBV, same memory", "Greens")
    for panel, rows, memory in ((axes[1], equal, "memory of 1F1B"), (axes[2], twice, "twice that memory")):
        share = [IDEAL_S / row["auto"] for row in rows]
        _heat(panel, rows, share, f"Ideal step time (no bubble) / step time,\n{memory}", "Blues")
    axes[0].set_ylabel("latency / F")
    figure.supxlabel("message time / F          V: two stages per rank are the better placement", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _heat(axes: Any, rows: list[dict[str, Any]], values: list[float], title: str, colours: str) -> None:
    """One value per delay: latency upwards, message time to the right."""
    size = len(DELAYS)
    low, high = (0.0, 0.5) if colours == "Greens" else (0.5, 1.0)
    table = [values[size * line : size * (line + 1)] for line in range(size)]
    axes.imshow(table, origin="lower", cmap=colours, vmin=low, vmax=high, aspect="auto")
    names = [f"{delay:g}" for delay in DELAYS]
    axes.set_xticks(range(size), names)
    axes.set_yticks(range(size), names)
    axes.set_title(title)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        line, column = divmod(index, size)
        colour = "white" if value > low + 0.65 * (high - low) else "black"
        mark = " V" if row["placement"] == "v" else ""
        axes.text(column, line, f"{100 * value:.0f} %{mark}", ha="center", va="center", color=colour)


def main() -> None:
    """Measure, print and draw."""
    options = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    options.add_argument("--plot", type=Path, default=PICTURE, help="where the picture goes")
    picture = options.parse_args().plot
    begin = time.perf_counter()
    search(two_sites("one", (1, 1), 2), 1.0)  # compile before the processes part
    with ProcessPoolExecutor() as pool:
        equal, twice = (grid(in_flight, pool) for in_flight in (EQUAL, TWICE))
        beside = beside_published(equal, pool)
    found = {
        "benchmark": "crosspipe_grid",
        "summary": summary(equal, twice),
        "at most as long as CrossPipe's best, of its 10": _met(beside),
        "elapsed_s": time.perf_counter() - begin,
        "cpu_s": os.times().user + os.times().children_user,
        "ours / published, s": beside,
        "memory of 1f1b": list(map(_rounded, equal)),
        "twice the memory of 1f1b": list(map(_rounded, twice)),
    }
    try:
        draw(equal, twice, picture)
        found["picture"] = picture.name
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; it needs farpipe[plot]", file=sys.stderr)
    print(json.dumps(found))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(cell, 4) if isinstance(cell, float) else cell for name, cell in row.items()}


if __name__ == "__main__":
    main()
