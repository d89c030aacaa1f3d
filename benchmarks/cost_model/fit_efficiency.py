"""Fit the constants of src/farpipe/core/catalog/efficiency.toml.

    FARPIPE_DATA=folder python -m benchmarks.cost_model.fit_efficiency [--without SOURCE] [--a100]

The folder has the public tables that published_steps.py reads, and sailor/profiles_tmp.json. Prints, for
every device, the constants found, the mean error on each source before and after, and the error on a source when the
others alone are fitted (leave one source out). Sources weigh alike, so that a table of 720 rows counts as much as one
of five. What is made small is the mean absolute relative error, by a pattern search over the constants' logarithms;
start values are those of the catalogue. `--without` leaves a source out of every fit and prints the error on it alone
with the catalogue's constants and with those found; `--a100` fits the law itself as well, which takes some minutes.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Final

from benchmarks.cost_model.published_steps import load_published
from benchmarks.shared.data import data_folder
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Model, Site, Training, preset_model, preset_site
from farpipe.planning.cost import JobCosts, Layout, calibration_of, compute, place_evenly, step_cost
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.planner.reference_points import ReferenceJob, ReferencePoint
from farpipe.planning.planner.validation import predict

Fit = dict[str, float]
PRESETS = {
    "V100-16": "v100-16gb",
    "A100-40": "a100-40gb",
    "A100-80": "a100-80gb",
    "GH-96": "gh200",
    "Titan-RTX": "titan-rtx",
    "RTX-2080": "rtx-2080-ti",
    "RTX-3090": "rtx-3090",
}
SHAPES = {
    "OPT-350": {"num_layers": 24, "hidden": 1024, "num_heads": 16, "ffn_hidden": 4096, "vocab_size": 50272},
    "GPT-Neo-2.7": {"num_layers": 32, "hidden": 2560, "num_heads": 20, "ffn_hidden": 10240, "vocab_size": 50257},
    "OPT-30": {"num_layers": 48, "hidden": 7168, "num_heads": 56, "ffn_hidden": 28672, "vocab_size": 50272},
}
"""Sailor's models, all of them with a plain MLP and sequences of 2048 tokens; its Llama is no published one."""
PLAIN = {("OPT-30", "A100-40")}
"""Profiles on devices with TF32 that were taken without it: they are at its plain rate's limit, others far above."""


@dataclass(frozen=True)
class Step:
    """A measured step. While fitting, its simulated time changes by as much as `_estimate` does; `exact` simulates."""

    point: ReferencePoint
    job: ReferenceJob

    def exact(self, calibrations: Mapping[str, Calibration]) -> float:
        """Predicted less measured, over measured, by the simulator."""
        job = self.job
        costs = JobCosts(job.model, job.training, None, calibrations)
        step = step_cost(costs, job.layout, job.placements, job.cluster)
        name = self.point.schedule or ("interleaved" if job.layout.virtual > 1 else "1f1b")
        seconds = simulate(step.problem, order(name, step.problem)).makespan_s + step.overhead_s
        return seconds / self.point.step_s - 1

    @cached_property
    def _offset(self) -> float:
        """Time of the simulated step beyond its estimate, with the constants that the catalogue has now."""
        return (self.exact({}) + 1) * self.point.step_s - self._estimate({})

    def _estimate(self, calibrations: Mapping[str, Calibration]) -> float:
        """The slowest rank's work on all microbatches, and once what the other ranks do before and after it."""
        job = self.job
        costs = JobCosts(job.model, job.training, None, calibrations)
        site, last = job.cluster.sites[0], len(job.placements) - 1
        ranks = [0.0] * job.layout.pipeline
        for index, p in enumerate(job.placements):
            ends = {"embedding": index == 0, "head": index == last}
            ranks[p.rank] += costs.stage(job.layout, site, p.num_layers, p.recompute, **ends).seconds
        return job.layout.num_microbatches * max(ranks) + (sum(ranks) - max(ranks)) / job.layout.virtual

    def error(self, calibrations: Mapping[str, Calibration]) -> float:
        """Predicted less measured, over measured, estimated."""
        return (self._estimate(calibrations) + self._offset) / self.point.step_s - 1


@dataclass(frozen=True)
class Layer:
    """Measured forward and backward of one layer, tensor-parallel collectives included."""

    model: Model
    training: Training
    layout: Layout
    site: Site
    seconds: float

    def error(self, calibrations: Mapping[str, Calibration]) -> float:
        """As `Step.error`."""
        law = calibrations.get(self.site.device.name) or calibration_of(self.site.device)
        times = compute.layer_times(self.model, self.training, self.layout, self.site, law)
        return (times.forward_s + times.input_grad_s + times.weight_grad_s) / self.seconds - 1

    exact = error


Measured = Step | Layer
Sources = dict[str, list[Measured]]


def steps(folder: Path, every: int = 1) -> dict[str, list[Measured]]:
    """The published steps by source; where a table leaves sizes open, those that today's constants find fastest."""
    found: Sources = {}
    for group in load_published(folder):
        points = group.points[:: every if len(group.points) > 100 else 1]
        found[group.name] = [Step(point, predict(point).job) for point in points]
    return found


def layers(folder: Path) -> Sources:
    """Sailor's profiles: one entry for each device and model."""
    tables = json.loads((folder / "sailor" / "profiles_tmp.json").read_text())
    found: Sources = {}
    for name, shape in SHAPES.items():
        for device, sizes in tables[name].items():
            site = preset_site("site", PRESETS[device], 64)
            tf32 = "tf32" in site.device.peak_flops and (name, device) not in PLAIN
            how = {"precision": "fp32", "matmul": "tf32" if tf32 else "same", "flash_attention": False}
            model = Model(**shape, gated_mlp=False, norm="layernorm", bias=True)
            for size, degrees in sizes.items():
                spec = Training(sequence_length=2048, global_batch=int(size), recompute="none", **how)
                for tensor, rows in degrees.items():
                    if model.num_heads % int(tensor) == 0:
                        middle = rows[sorted(rows, key=int)[len(rows) // 2]]
                        layout = Layout(1, 1, int(tensor), 1, int(size), 1)
                        key = f"sailor {PRESETS[device]} {name}"
                        found.setdefault(key, []).append(Layer(model, spec, layout, site, sum(middle[:2])))
    return found


def error_of(measured: Iterable[Measured], calibrations: Mapping[str, Calibration], *, exact: bool = False) -> float:
    """Mean absolute relative error."""
    return fmean(abs(one.exact(calibrations) if exact else one.error(calibrations)) for one in measured)


def pattern_search(start: Fit, cost: Callable[[Fit], float], rounds: int = 4, first: float = 0.2) -> tuple[Fit, float]:
    """The constants near `start` with the least `cost`: each by itself, larger or smaller, by ever smaller factors."""
    best, least, step = dict(start), cost(start), first
    for _ in range(rounds):
        improved = True
        while improved:
            improved = False
            for name in start:
                for factor in (math.exp(step), math.exp(-step)):
                    tried = best | {name: best[name] * factor}
                    value = cost(tried)
                    if value < least * (1 - 1e-5):
                        best, least, improved = tried, value, True
                        break
        step /= 2
    return best, least


def fit(device: str, names: Sequence[str], sources: Sources, limits: Mapping[str, float]) -> tuple[Fit, float]:
    """`names` of the constants of `device`, fitted to `sources`, each source with the same weight."""
    base = calibration_of(preset_site("site", device, 8).device)

    def cost(found: Fit) -> float:
        if any(found[name] > limits.get(name, math.inf) for name in found):
            return math.inf
        law = {device: replace(base, **found)}
        return fmean(error_of(measured, law) for measured in sources.values())

    return pattern_search({name: getattr(base, name) for name in names}, cost)


FRACTIONS = dict.fromkeys(("matrix_fraction", "tf32_fraction", "fp32_fraction", "fp8_fraction"), 0.97)
FRACTIONS |= dict.fromkeys(
    ("attention_fraction", "memory_fraction", "machine_link_fraction", "site_link_fraction"), 0.95
)
LAW = ("matrix_fraction", "memory_fraction", "loss_passes", "layer_launch_s", "depth_elements", "action_overhead_s")


def tell(device: str, names: Sequence[str], sources: Sources, without: str | None) -> None:
    """Fit, print the constants and the errors, and those of each source when it was left out; of `without` alone."""
    base = calibration_of(preset_site("site", device, 8).device)
    if without is not None:
        tell_without(device, names, sources, without)
        return
    found, _ = fit(device, names, sources, FRACTIONS)
    print(f"{device}: " + ", ".join(f"{name} = {value:.4g}" for name, value in found.items()))
    for name, measured in sources.items():
        before = error_of(measured, {}, exact=True)
        fitted = error_of(measured, {device: replace(base, **found)}, exact=True)
        errors = f"today {before:6.1%}, fitted {fitted:6.1%}, left out {left_out(device, names, sources, name)}"
        print(f"  {name:32} {len(measured):4} rows, {errors}", flush=True)


def tell_without(device: str, names: Sequence[str], sources: Sources, without: str) -> None:
    """The error on the source called `without`, where the device has it, today and fitted to the others."""
    if without in sources:
        today = error_of(sources[without], {}, exact=True)
        print(f"{device}: {without}: today {today:.1%}, left out {left_out(device, names, sources, without)}")


def left_out(device: str, names: Sequence[str], sources: Sources, name: str) -> str:
    """The error on the source called `name` when the others alone are fitted; a dash where there are none."""
    others = {other: measured for other, measured in sources.items() if other != name}
    if not others:
        return "-"
    apart, _ = fit(device, names, others, FRACTIONS)
    law = replace(calibration_of(preset_site("site", device, 8).device), **apart)
    return f"{error_of(sources[name], {device: law}, exact=True):.1%}"


def constant_of_gain(device: str, name: str, wanted: float, setting: str, value: str) -> float:
    """Constant `name` with which Llama 3 8B is `wanted` times as fast with a setting of the training as without it.

    By FSDP on 8 devices, sequences of 8,192 tokens, as the published tokens/s are.
    """
    model, place = preset_model("llama-3-8b"), preset_site("site", device, 8)
    plain = Training(sequence_length=8192, global_batch=8, zero=3)
    layout, placements = Layout(1, 8, 1, 1, 1, 1), place_evenly(["site"], [model.num_layers])

    def gain(constant: float) -> float:
        law = {device: replace(calibration_of(place.device), **{name: constant})}
        seconds = []
        for asked in (plain, plain.model_copy(update={setting: value})):
            step = step_cost(JobCosts(model, asked, None, law), layout, placements, Cluster(sites=(place,)))
            seconds.append(simulate(step.problem, order("1f1b", step.problem)).makespan_s + step.overhead_s)
        return seconds[0] / seconds[1]

    low, high = 0.05, 6.0
    rises = gain(high) > gain(low)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if (gain(middle) < wanted) == rises else (low, middle)
    return low


def tell_gains() -> None:
    """Constants that stand on a published gain: tokens/s of torchtitan (H100), of Llama 3 8B."""
    # 8 devices without and 128 with torch.compile: FSDP's collectives, which differ, are hidden in both.
    found = constant_of_gain("h100-96gb-500w", "eager_traffic", 5762.0 / 6514.0, "kernels", "eager")
    print(f"eager_traffic = {found:.2f} (torchtitan)")


NARROW_SOURCES: Final = ("mlperf-hopper", "mlperf-blackwell", "mlperf-amd", "bridge-dense", "lora")


def tell_narrow(known: Sources) -> None:
    """Shares of the narrow rates: for every device and rate the median of what its rows need, by source."""
    needed: dict[tuple[str, str], dict[str, list[float]]] = {}
    for source in NARROW_SOURCES:
        for row in known.get(source, []):
            assert isinstance(row, Step)
            device, name = row.point.device, f"{row.point.matmul}_fraction"
            needed.setdefault((device, name), {}).setdefault(source, []).append(_needed(row, device, name))
    for (device, name), by_source in needed.items():
        shown = ", ".join(f"{source} {median(found):.2f} ({len(found)} rows)" for source, found in by_source.items())
        print(f"{device}: {name} = {shown}")


def _needed(row: Step, device: str, name: str) -> float:
    """The constant with which a row is met."""
    base = calibration_of(preset_site("site", device, 8).device)
    low, high = 0.05, 2.5
    for _ in range(12):
        middle = (low + high) / 2
        too_slow = row.exact({device: replace(base, **{name: middle})}) > 0
        low, high = (middle, high) if too_slow else (low, middle)
    return high


def main() -> None:
    """Fit and tell about every device that there are measurements of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--a100", action="store_true", help="fit the law on whole A100 steps too")
    parser.add_argument("--without", metavar="SOURCE", help="print only the error on a source that no fit has seen")
    wanted = parser.parse_args()
    without = wanted.without
    folder = data_folder("the public tables")
    known, parts = steps(folder, every=20), layers(folder)
    names = {"megatron": "GPT-", "llama-3": "Llama3", "megatron-bridge, fp8": "LLAMA3"}
    h100 = {name: [row for row in known["h100"] if str(row.point).startswith(start)] for name, start in names.items()}
    tell("h100-sxm", ("matrix_fraction", "fp8_fraction"), h100, without)
    tell("h100-96gb-500w", ("matrix_fraction", "fp8_fraction"), {"torchtitan-h100": known["torchtitan-h100"]}, without)
    blackwell = {name: known[name] for name in ("b200", "b200-context", "b200-experts")}
    tell("b200", ("matrix_fraction", "attention_fraction"), blackwell, without)
    if without is None:
        tell_narrow(known)
    for device, name in (("a100-80gb", "tf32"), ("a100-40gb", "tf32"), ("gh200", "tf32"), ("v100-16gb", "fp32")):
        own = {key: parts[key] for key in parts if device in key and (name == "fp32" or not key.endswith("OPT-30"))}
        tell(device, (f"{name}_fraction",), own, without)
    for device, name in (("titan-rtx", "fp32"), ("rtx-2080-ti", "fp32"), ("rtx-3090", "tf32")):
        tell(
            device,
            (f"{name}_fraction", "machine_link_fraction"),
            {"OPT-350": parts[f"sailor {device} OPT-350"]},
            without,
        )
    if without is None:
        print(f"gh200, whole steps, never fitted: {error_of(known['sailor-opt-350-gh200'], {}, exact=True):.1%}")
        tell_gains()
    if wanted.a100:
        names = ("korthikanti-2022", "vtrain-multi-node", "vtrain-single-node", "narayanan-sc21", "zero-bubble-shapes")
        tell("a100-80gb", LAW, {name: known[name] for name in names}, without)


if __name__ == "__main__":
    main()
