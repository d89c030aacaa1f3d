"""Step, refusals and waiting against the load of the background: a table, and a picture of three panels.

    python -m benchmarks.optical.optical_load [--draws 5] [--plot docs/pictures/light_load.png]

NSFNET, 1F1B, the defaults of `farpipe optical`; each draw is a random placement with a background of its own, as in
optical_grid.py. CD-CBA, the ten-line rule and ours. Prints Markdown.
"""

import argparse
from typing import Any

import numpy as np

from benchmarks.optical.optical_grid import Setting, over_draws, policies_of, show
from farpipe.optical.study import PolicyComparison
from farpipe.report.pyplot import load_pyplot, save_figure

LOADS = (10.0, 30.0, 60.0, 90.0, 120.0)
NAMES = {"cd-cba": "cd-cba", "rule": "ten-line rule", "ours": "ours"}
COLOURS = {"cd-cba": "#c05640", "rule": "#8a8f99", "ours": "#2f6fb0"}
SHOWN_LOAD = 60.0
"""Load at which waiting is drawn message by message."""


def row(load: float, found: PolicyComparison) -> list[str]:
    figures = ("step_s", "refused_ratio", "mean_wait_s", "background_refused_ratio")
    cells = [f"{load:g}"]
    for figure, scale, form in zip(figures, (1, 100, 1000, 100), ("{:.3f}", "{:.1f}", "{:.2f}", "{:.1f}"), strict=True):
        cells += [form.format(scale * found.mean(name, figure).mean) for name in NAMES]
    return cells


def waits_ms(found: PolicyComparison, name: str) -> Any:
    """Waits of all messages of all draws, the longest first."""
    steps = [step for run in found.runs[name] for step in run.played.steps]
    return 1000 * np.sort(np.concatenate([step.wait_s for step in steps]))[::-1]


def draw(path: str, found: dict[float, PolicyComparison]) -> None:
    figure, (step, refused, waits) = load_pyplot().subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for name, label in NAMES.items():
        look = {"color": COLOURS[name], "marker": "o", "markersize": 4, "label": label}
        step.plot(LOADS, [one.mean(name, "step_s").mean for one in found.values()], **look)
        refused.plot(LOADS, [100 * one.mean(name, "background_refused_ratio").mean for one in found.values()], **look)
        refused.plot(LOADS, [100 * one.mean(name, "refused_ratio").mean for one in found.values()], **look, ls=":")
        each = waits_ms(found[SHOWN_LOAD], name)
        waits.plot(100 * np.arange(1, len(each) + 1) / len(each), each, color=COLOURS[name])
    step.set(xlabel="load of the background, Erlang", ylabel="step, s", ylim=(0, None))
    refused.set(xlabel="load of the background, Erlang", ylabel="refused, %", ylim=(0, None))
    refused.set_title("background (solid), messages at first (dotted)", fontsize=9)
    waits.set(xlabel="share of the messages, %", ylabel="wait of at least, ms", ylim=(1, None))
    waits.set(xscale="log", yscale="log")
    waits.set_title(f"waiting by message at {SHOWN_LOAD:g} E", fontsize=9)
    step.legend(fontsize=8)
    save_figure(figure, path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5, help="random placements, each with its background")
    parser.add_argument("--plot")
    args = parser.parse_args()
    arms, found = policies_of(tuple(NAMES)), {}
    for load in LOADS:
        found[load] = over_draws(Setting(load=load), arms, args.draws)
    kinds = ("step s", "refused %", "wait ms", "background refused %")
    heads = [f"{kind}: {label}" for kind in kinds for label in NAMES.values()]
    show(("Erlang", *heads), (row(load, one) for load, one in found.items()))
    if args.plot:
        draw(args.plot, found)


if __name__ == "__main__":
    main()
