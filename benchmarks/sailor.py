"""Sailor's clusters: plans under its published formula, beside what Sailor, Atlas and DTFM reach, and under our model.

    python benchmarks/sailor.py --data FOLDER

FOLDER has Sailor's tables (eth-easl/sailor: ``sailor/profiles_tmp.json``, ``llm_info.json``, ``providers/``). For every
cluster the spreads that `farpipe.plan.unlike` looks at are judged by Sailor's formula (its runtime_simulator.py) and by
its rule of memory; the best is then simulated under our model, beside the best spread that our model finds.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from farpipe.cost import JobCosts
from farpipe.errors import FarpipeError
from farpipe.plan.decided import decided
from farpipe.plan.spreads import Degrees, Shortlist, Spread, spreads
from farpipe.plan.unlike import find_unlike, play_spread
from farpipe.spec import Cluster, Job, LocalLink, Model, Site, SiteLink, Training
from farpipe.spec.written import WrittenDevice

BUCKET_BYTES: Final = 5e8
MEMORY_BYTES: Final = 40 * 2.0**30
DEVICE: Final = "A100-40"
AWS_GBIT_S: Final = 3.85
"""The slowest of the three regions' links, 4.35, 4.32 and 3.85 Gbit/s, for all of them: which is which is not said."""


@dataclass(frozen=True)
class Case:
    """One cluster with what others reach on it, seconds of a step by Sailor's own simulator; None: out of memory."""

    name: str
    model: str
    sites: tuple[tuple[str, int], ...]
    sailor_s: float
    atlas_s: float | None = None
    dtfm_s: float | None = None
    search_s: float | None = None
    """Seconds of Sailor's search on two cores, where they are known."""

    @property
    def best_s(self) -> float:
        """The best of the three."""
        return min(seconds for seconds in (self.sailor_s, self.atlas_s, self.dtfm_s) if seconds is not None)


C = "us-central1"
ZONES: Final = (f"{C}-a", f"{C}-b", f"{C}-c", f"{C}-f", "us-west1-b")
AWS: Final = ("aws-us-east-1", "aws-us-west-2", "aws-eu-west-1")


def _cases() -> Iterator[Case]:
    for number, seconds in {8: 29.4, 16: 15.2, 24: 10.5}.items():
        yield Case(f"{number}, one zone", "OPT-350", ((ZONES[0], number),), seconds)
    yield Case("32, one zone", "OPT-350", ((ZONES[0], 32),), 7.99, 7.99, 8.56)
    yield Case("128, one zone", "OPT-350", ((ZONES[0], 128),), 2.395, 2.395, 3.09)
    yield Case("5 zones x 32", "OPT-350", tuple((zone, 32) for zone in ZONES), 2.41, 2.42, 8.09, 0.39)
    yield Case("5 zones x 128", "OPT-350", tuple((zone, 128) for zone in ZONES), 0.981, 0.983, None, 0.23)
    both = (ZONES[0], ZONES[4])
    yield Case("central 8 + west 8", "OPT-350", tuple((zone, 8) for zone in both), 23.6, 28.7, 18.9)
    yield Case("3 regions x 8", "OPT-350", tuple((zone, 8) for zone in AWS), 23.2, 29.4, 13.4)
    yield Case("3 regions x 32", "OPT-350", tuple((zone, 32) for zone in AWS), 6.28, 7.79, 6.04)
    for number, seconds in {8: 175.0, 16: 89.1, 24: 60.6, 32: 46.2}.items():
        yield Case(f"{number}, one zone", "GPT-Neo-2.7", ((ZONES[0], number),), seconds)
    yield Case("central 32 + west 32", "GPT-Neo-2.7", tuple((zone, 32) for zone in both), 33.3, 41.1, None)
    yield Case("3 regions x 8", "GPT-Neo-2.7", tuple((zone, 8) for zone in AWS), 121.0, 150.0, 69.8)
    yield Case("3 regions x 32", "GPT-Neo-2.7", tuple((zone, 32) for zone in AWS), 33.0, 39.1, None)


BATCH: Final = {"OPT-350": 1024, "GPT-Neo-2.7": 2048}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "OPT-350": {"num_layers": 24, "hidden": 1024, "num_heads": 16, "vocab_size": 50272},
    "GPT-Neo-2.7": {"num_layers": 32, "hidden": 2560, "num_heads": 32, "vocab_size": 50257},
}


Stages = tuple[tuple[int, int, float, float], ...]
"""First layer, last layer, seconds and weight bytes of every stage."""


class Formula:
    """Sailor's step time: (M - 1) max(comp + comm) + sum comm + sum comp + update + all-reduce."""

    def __init__(self, folder: Path, model: str) -> None:
        def read(name: str) -> Any:
            return json.loads((folder / name).read_text(encoding="utf-8"))

        self._times = read("profiles_tmp.json")[model][DEVICE]
        self._sizes = read("llm_info.json")[model]
        self._rates = read("providers/multizone_bandwidths_het.json")
        self._num_layers = len(self._sizes["1"])
        self._batch = BATCH[model]
        self.stages = cache(self._stages)
        self.least_s = cache(self._least_s)
        self.send_s = cache(self._send_s)
        self.sum_s = cache(self._sum_s)

    def _coefficients(self, source: str, target: str, number: int) -> Sequence[float]:
        if source.startswith("aws") and source != target:
            return (AWS_GBIT_S / 8,)
        a, b = (ZONES[0], ZONES[0]) if source.startswith("aws") else (source, target)
        found: Sequence[float] = self._rates[a][DEVICE][str(number)][b][DEVICE][str(number)][0]
        return found

    def _seconds(self, num_bytes: float, coefficients: Sequence[float]) -> float:
        rate = 0.0
        for coefficient in coefficients:
            rate = rate * math.log2(num_bytes / 1e6) + coefficient
        return num_bytes / 1e9 / rate

    def _send_s(self, source: str, target: str, layer: int, tensor: int, size: int) -> float:
        num_bytes = self._sizes["1"][str(layer)]["act_output_floats"] * 4 * size
        return self._seconds(num_bytes, self._coefficients(source, target, tensor))

    def _sum_s(self, weight_bytes: float, replicas: int, source: str, target: str) -> float:
        if replicas == 1:
            return 0.0
        whole, rest = divmod(weight_bytes, BUCKET_BYTES)
        line = self._coefficients(source, target, 1)
        each = [BUCKET_BYTES] * int(whole) + ([rest] if rest else [])
        return sum(2 * (replicas - 1) * self._seconds(bucket / replicas, line) for bucket in each)

    def _stages(self, count: int, tensor: int, size: int) -> Stages | None:
        """None: not measured, or no memory for it."""
        rows = self._times.get(str(size), {}).get(str(tensor))
        if rows is None or count > self._num_layers:
            return None
        each, more = divmod(self._num_layers, count)
        found, first = [], 0
        for stage in range(count):
            last = first + each + (stage >= count - more)
            layers = [str(layer) for layer in range(first, last)]
            params = sum(self._sizes[str(tensor)][layer]["params_floats"] for layer in layers)
            kept = sum(self._sizes[str(tensor)][layer]["act_mem_floats"] for layer in layers)
            taken = 24 * params + 4 * size * kept * (count - stage) + (2e9 if tensor == 1 else 3e9)
            if taken > MEMORY_BYTES:
                return None
            weights = sum(self._sizes["1"][layer]["params_floats"] for layer in layers) * 4 / tensor
            found.append((first, last - 1, sum(rows[layer][0] + rows[layer][1] for layer in layers), weights))
            first = last
        return tuple(found)

    def _least_s(self, sites: tuple[str, ...], is_pipeline: bool, degrees: tuple[int, int, int, int]) -> float:
        """A bound of the step in whatever order sites and ranks are; infinite as for `step_s`."""
        count, tensor, size, replicas = degrees
        stages = self.stages(count, tensor, size)
        if stages is None:
            return math.inf
        inside = [(site, site) for site in sites]
        links = [(a, b) for a in sites for b in sites] if is_pipeline else inside
        send = [self._sends_s(links, links, stages, index, (tensor, size), min) for index in range(count)]
        touching = inside if is_pipeline or len(sites) == 1 else [(a, self._nearest(a, sites)) for a in sites]
        sums = [max(self.sum_s(stage[3], replicas, *pair) for pair in touching) for stage in stages]
        if is_pipeline:
            sums = [min(self.sum_s(stage[3], replicas, *pair) for pair in inside) for stage in stages]
        return self._formula_s(stages, (tensor, size, replicas), send, sums)

    def _nearest(self, site: str, sites: Sequence[str]) -> str:
        """The site that it has the fastest link with, in either direction."""
        return min((other for other in sites if other != site), key=lambda other: self.sum_s(1e8, 2, site, other))

    def step_s(self, spread: Spread) -> float:
        """Infinite where it does not tell of such a spread: all groups have the same ranks, tensor and data degrees."""
        first, size = spread.groups[0], spread.microbatch_size
        tensor, count = first.tensor[0], len(first.sites)
        stages = self.stages(count, tensor, size)
        if stages is None or any(one.tensor != (tensor,) * count or len({*one.data}) > 1 for one in spread.groups):
            return math.inf
        replicas = sum(one.data[0] for one in spread.groups)
        send = []
        for index in range(count):
            after = {(one.sites[index], one.sites[index + 1]) for one in spread.groups} if index < count - 1 else set()
            before = {(one.sites[index], one.sites[index - 1]) for one in spread.groups} if index else set()
            send.append(self._sends_s(after, before, stages, index, (tensor, size), max))
        sums = [self._stage_sum_s(spread, stage[3], index, replicas) for index, stage in enumerate(stages)]
        return self._formula_s(stages, (tensor, size, replicas), send, sums)

    def _formula_s(
        self, stages: Stages, degrees: tuple[int, int, int], send: Sequence[float], sums: Sequence[float]
    ) -> float:
        tensor, size, replicas = degrees
        times, compute = math.ceil(self._batch / (size * replicas)), [stage[2] for stage in stages]
        slowest = max(one + other for one, other in zip(compute, send, strict=True))
        update = max(self._times[str(size)][str(tensor)][str(stage[0])][2] for stage in stages)
        return (times - 1) * slowest + sum(send) + sum(compute) + update + max(sums)

    def _sends_s(
        self,
        after: Collection[tuple[str, str]],
        before: Collection[tuple[str, str]],
        stages: Stages,
        index: int,
        degrees: tuple[int, int],
        choose: Callable[[Iterable[float]], float],
    ) -> float:
        """As estimate_p2p_pipeline_times, over the pairs of sites to the next stage and back: of up to three stages the
        first one sends once."""
        last = len(stages) - 1
        forward = choose(self.send_s(*pair, stages[index][1], *degrees) for pair in after) if index < last else 0.0
        backward = choose(self.send_s(*pair, stages[index][0], *degrees) for pair in before) if index else 0.0
        if 0 < index < last:
            return forward + backward
        return 2 * backward if index else forward * (1 if last < 3 else 2)

    def _stage_sum_s(self, spread: Spread, weight_bytes: float, index: int, replicas: int) -> float:
        """The slowest pair of neighbours among a stage's replicas, which stand group by group."""
        homes = [one.sites[index] for one in spread.groups]
        inside = {(home, home) for one, home in zip(spread.groups, homes, strict=True) if one.data[0] > 1}
        pairs = inside | set(pairwise(homes))
        return max((self.sum_s(weight_bytes, replicas, *pair) for pair in pairs), default=0.0)


def job_of(case: Case) -> Job:
    """The case as a job: machines of four A100-40GB, links of 12.5 ms (zones: 0.5 ms) for our model alone."""
    device = WrittenDevice(preset="a100-40gb").resolve()
    near = LocalLink(latency_s=3e-6, bandwidth_bytes_per_s=300e9)
    far = LocalLink(latency_s=2e-5, bandwidth_bytes_per_s=2.4e9)
    sites = tuple(
        Site(name=name, device=device, num_devices=number, devices_per_machine=4, machine_link=near, site_link=far)
        for name, number in case.sites
    )
    links = tuple(
        SiteLink(source=a, target=b, latency_s=_latency_s(a, b), bandwidth_bytes_per_s=_rate(a, b))
        for a, _ in case.sites
        for b, _ in case.sites
        if a != b
    )
    model = Model(
        name=case.model,
        **SHAPES[case.model],
        ffn_hidden=4 * SHAPES[case.model]["hidden"],
        gated_mlp=False,
        norm="layernorm",
        positions="learned",
        max_sequence_length=2048,
        bias=True,
    )
    training = Training(
        sequence_length=2048,
        global_batch=BATCH[case.model],
        precision="fp32",
        matmul="tf32",
        recompute="none",
        zero=0,
        flash_attention=False,
        overlap=False,
    )
    return Job(model=model, training=training, cluster=Cluster(sites=sites, links=links))


def _latency_s(a: str, b: str) -> float:
    if a.startswith("aws"):
        return {("us-east-1", "us-west-2"): 0.03, ("eu-west-1", "us-east-1"): 0.035}.get(
            tuple(sorted((a[4:], b[4:]))), 0.06
        )
    return 0.0005 if a.startswith(C) and b.startswith(C) else 0.0175


def _rate(a: str, b: str) -> float:
    """Bytes per second of everything between two sites: of a machine's sends there, and as many machines as want to."""
    if a.startswith("aws"):
        return AWS_GBIT_S / 8 * 1e9
    return 2.5e9 if a.startswith(C) and b.startswith(C) else 0.62e9


class Useful(Shortlist):
    """Leaves out what takes longer than the best step so far, wherever it is."""

    def __init__(self, formula: Formula) -> None:
        self._formula, self.best_s = formula, math.inf

    def useful(self, sites: Sequence[Site], degrees: Sequence[Degrees], replicas: int, size: int) -> bool:
        """See Shortlist; the sites are of one kind, so there are several degrees in a pipeline over several alone."""
        names, count = tuple(site.name for site in sites), sum(ranks for ranks, _ in degrees)
        is_pipeline = len(degrees) > 1
        least_s = self._formula.least_s(tuple(sorted(names)), is_pipeline, (count, degrees[0][1], size, replicas))
        return least_s < self.best_s


def best_by_formula(job: Job, formula: Formula) -> tuple[float, Spread]:
    """The fastest spread under Sailor's formula."""
    useful, best = Useful(formula), None
    for spread in spreads(job, every_order=True, keep=useful):
        if (seconds := formula.step_s(spread)) < useful.best_s:
            useful.best_s, best = seconds, spread
    assert best is not None
    return useful.best_s, best


def row(case: Case, formula: Formula) -> dict[str, Any]:
    """One cluster's figures."""
    job = job_of(case)
    job = decided(job)
    began = time.perf_counter()
    seconds, spread = best_by_formula(job, formula)
    search_s = time.perf_counter() - began
    costs = JobCosts(job.model, job.training)
    try:
        same_s = play_spread(job, costs, spread).step_s
    except FarpipeError as error:
        same_s = str(error)
    began = time.perf_counter()
    found = find_unlike(job, costs)
    return {
        "case": case.name,
        "model": case.model,
        "published": (case.sailor_s, case.atlas_s, case.dtfm_s),
        "formula_s": seconds,
        "ratio": seconds / case.best_s,
        "search_s": search_s,
        "plan": str(spread),
        "same_under_ours_s": same_s,
        "best_under_ours_s": found.played.step_s,
        "own_search_s": time.perf_counter() - began,
        "own_gap": found.gap,
    }


def main() -> None:
    """Print a row for every cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("FARPIPE_DATA"), required="FARPIPE_DATA" not in os.environ
    )
    parser.add_argument("--only", default="", help="a part of a cluster's name")
    options = parser.parse_args()
    for case in (case for case in _cases() if options.only in case.name):
        formula = Formula(Path(options.data) / "sailor", case.model)
        print(json.dumps(row(case, formula)), flush=True)


if __name__ == "__main__":
    main()
