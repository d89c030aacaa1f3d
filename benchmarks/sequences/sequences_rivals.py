"""The planner of batches, free in its layout, against other methods under the same cost model, each at its best.

    FARPIPE_DATA=... python -m benchmarks.sequences.sequences_rivals --rows ROWS [--models 7b] [--corpora code]
    python -m benchmarks.sequences.sequences_rivals --rows ROWS --table

InfiniPipe's machines and models as in `sequences_paper`: 32 A800, 512 documents a step. Corpora: code files, Wikipedia
articles, and `sft`: a stand-in for the lengths of fine-tuning, lognormal with a median of 1,000 tokens and sigma 1.6,
one document as long as the cut (synthetic). Rivals that cut or pack have farpipe's search of layouts (stages, degrees,
replicas, ZeRO) but for groups of several degrees. A figure is the step of a rival over farpipe's on the same batch, the
mean of the draws with its interval (95 %, Student's t); below 1 the rival is faster. All simulated. A method that ROWS
has of a batch is not run again. `farpipe, groups`: farpipe's groups of several degrees alone, without its search of
other layouts, which takes minutes at 30B and 256K.

`seq1f1b`: slices of equal time, short sequences packed by tokens, as many chunks in flight to the end; recomputation by
chunk as ours. `chunkflow`: slices and packed chunks of equal tokens, likewise. `slimpipe`: equal tokens, the attention
of the chunks that stages of one pipeline have at a time shared out evenly (`shared_attention`); `free` where the
exchange takes no time, else queries and outputs of half of the tokens cross the link of a device in every layer,
exposed. `infinipipe`: Algorithm 1 as printed. `wlb`: whole sequences packed by time, Ulysses inside a stage.
`one degree`: whole documents on replicas of one context degree, Ulysses inside, as farpipe plans them. `dynamic cp`:
one stage, each sequence on the fewest devices that hold it and keep it below a time that is searched, the longest first
on the group that is free first; as FlexSP and Megatron's dynamic context parallelism, whose degrees are powers of two,
all documents computed again or none; `searched`: the degree of every document by farpipe's local search; `tuned`:
besides, with the degrees of farpipe's groups, computing again the documents that have to be, all of them or (`all but
attention`) what is faster. These four are plans, priced as farpipe's are: its chunks in every group, their fixed times,
gathers of ZeRO, optimizer. `idealised`: figures that no run can reach, for states are sharded at no cost and fixed
times of chunks paid by the token; so is `ulysses` (at the paper's degrees, 16 at 7B, else 32, over NICs of so many
GB/s, and at its best degrees) but for fixed times. Rivals that cut or pack recompute all of a layer.
`flexsp, ideal`: each sequence whole on the devices that make it cheapest, all devices always busy. `work`: of a device
alone, nothing exchanged, recomputed or idle. `bound`: what no plan can be faster than (`least_step`); `one stage`: no
plan without a pipeline.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from benchmarks.sequences.least_step import least_step
from benchmarks.sequences.sequences_many import read_corpora
from benchmarks.sequences.sequences_paper import (
    BATCH,
    NICS,
    NUM_DEVICES,
    a800,
    capacities,
    flexsp,
    models,
    seconds_of,
    shared,
    ulysses,
)
from benchmarks.sequences.shared_attention import exchanged_bytes, planning_with, shared_out
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, Job, Model, Pins, Training
from farpipe.planning.cost.chunk_laws import Law
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.workload import BatchOptions, cut, sample_lengths
from farpipe.planning.workload.checkpointing import CheckpointRule
from farpipe.planning.workload.chunk import as_load
from farpipe.planning.workload.device_groups import (
    DeviceGroup,
    DocumentTimes,
    Family,
    assignments,
    document_times,
    family_of,
    plan_assigned,
    plan_groups,
)
from farpipe.planning.workload.layout import sequence_seconds

Step = tuple[float, str]
_OURS = ("farpipe", "farpipe, groups")
_MAX_PRICED = 8
"""Number of a rival's assignments, the shortest by its own account, that are planned to the end."""
CUTS = (49152, 98304, 262144)
NOTHING: Step = (math.inf, "nothing fits")
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
"""Quantile of Student's t for so many draws."""
_ONE_DEGREE = BatchOptions(dynamic_context=False, shrinks=False, may_keep_attention=False)
"""Options of rivals, whose replicas have one context degree."""


def planned(model: Model, lengths: Any, options: BatchOptions = BatchOptions(), pins: Pins = Pins()) -> Step:  # noqa: B008
    """The best plan of any layout: stages, degrees, replicas, ZeRO."""
    found = plan_batch(_free_job(model, lengths, pins), lengths, options)
    return found.step_s, f"{found.degrees}, {found.num_slices} slices"


def in_groups(model: Model, lengths: Any) -> Step:
    """Farpipe's best plan on groups of several degrees, without the search of other layouts."""
    found = plan_groups([*_jobs_of_groups(model, lengths)], lengths, BatchOptions(), math.inf)
    return (found.step_s, f"{found.degrees}, groups alone") if found else NOTHING


def _jobs_of_groups(model: Model, lengths: Any) -> Iterator[Job]:
    """One stage on every device, ZeRO-3 and 1."""
    job = _free_job(model, lengths, Pins(tensor=1, pipeline=1, data=NUM_DEVICES))
    for zero in (3, 1):
        yield job.model_copy(update={"training": job.training.decided(zero)})


def _free_job(model: Model, lengths: Any, pins: Pins) -> Job:
    training = Training(sequence_length=int(lengths.max()), global_batch=BATCH, grad_reduce_in_fp32=False)
    return Job(model=model, training=training, cluster=Cluster(sites=(a800(),)), layout=pins)


@contextmanager
def packing_by_tokens() -> Iterator[None]:
    """Short sequences fill chunks up to the tokens of the first slice, whatever their time."""
    by_time = cut.pack

    def by_tokens(shorts: Any, tails: Any, limits: cut.Cut, law: Law) -> Any:
        most = int(max(tails[:, 1].max(initial=0), shorts.max(initial=1)))
        most = most if len(tails) else int(limits.target_s * shorts.sum() / law.seconds(shorts, shorts**2 / 2).sum())
        return by_time(
            shorts, tails, replace(limits, target_s=float(max(most, shorts.max(initial=1)))), Law(token_s=1.0)
        )

    cut.pack = by_tokens
    try:
        yield
    finally:
        cut.pack = by_time


def seq1f1b(model: Model, lengths: Any) -> Step:
    """Slices of equal time, packed by tokens."""
    with packing_by_tokens():
        return planned(model, lengths, _ONE_DEGREE)


def slimpipe(model: Model, lengths: Any, *, exposed: bool) -> Step:
    """One pipeline of equal tokens; queries and outputs of half of the tokens, 16 bit, cross if `exposed`."""
    with planning_with(partial(shared_out, exposed_bytes=exchanged_bytes(model) if exposed else 0.0)):
        return planned(model, lengths, replace(_ONE_DEGREE, equal="tokens"), Pins(data=1))


class _Rule(NamedTuple):
    """What a rival with groups of several degrees may choose."""

    searches: bool = False
    """The degree of every document by farpipe's local search."""
    any_degree: bool = False
    """Degrees that divide the heads, too, and recomputation by document."""
    keeps_attention: bool = False

    def options(self, *, again: bool) -> BatchOptions:
        """Options of the plans of its groups."""
        rule: CheckpointRule = "chunk" if self.any_degree else "full" if again else "none"
        return BatchOptions(checkpointing=rule, may_keep_attention=self.keeps_attention)

    def assigned(self, seconds: Any, degrees: Sequence[int]) -> list[tuple[float, list[DeviceGroup]]]:
        """(makespan, groups) of documents that pay the fixed times of chunks by the token."""
        times = DocumentTimes.by_token(seconds)
        fewest = assignments(times, degrees, NUM_DEVICES, passes=0)[:1]  # devices below a time
        return fewest + (assignments(times, degrees, NUM_DEVICES) if self.searches else [])


class _Assigned(NamedTuple):
    """Documents on groups, all computed again, none or (`again` has no meaning) by document."""

    ideal_s: float
    groups: list[DeviceGroup]
    again: bool


def _idealised(model: Model, lengths: Any, rule: _Rule) -> Iterator[_Assigned]:
    """Each sequence on a group of its own size, the longest first; states sharded, and chunks filled, at no cost."""
    every = range(1, min(NUM_DEVICES, model.num_heads) + 1)
    degrees = [d for d in every if NUM_DEVICES % d == 0 or (rule.any_degree and model.num_heads % d == 0)]
    each = [shared(model, int(lengths.max()), d) for d in degrees]
    overhead_s = max(costs.overhead_s for costs, *_ in each)
    fixed = np.array([sum(law.fixed_s for law in costs.stages[0].laws) for costs, *_ in each])
    kept = [(costs.keeping_attention, *capacities(model, costs.keeping_attention)) for costs, *_ in each]
    ways = []
    for again, costs_of in [(False, each), (True, each), (True, kept)][: 2 + rule.keeps_attention]:
        seconds = np.stack([seconds_of(costs, lengths, again=again) for costs, *_ in costs_of])
        capacity = np.array([fits[again] for _, *fits in costs_of])
        seconds = seconds + (fixed / capacity)[:, None] * lengths  # packed with others into as much as fits
        seconds[lengths > capacity[:, None]] = np.inf
        ways.append(seconds)
    for again, seconds in enumerate([np.minimum.reduce(ways)] if rule.any_degree else ways):
        if np.isfinite(seconds).any(axis=0).all():
            found = rule.assigned(seconds, degrees)
            yield from (_Assigned(step_s + overhead_s, groups, bool(again)) for step_s, groups in found)


def dynamic_context_idealised(model: Model, lengths: Any, rule: _Rule) -> Step:
    """A figure that no run of dynamic context parallelism can reach."""
    found = [(one.ideal_s, f"{len(one.groups)} groups, again {one.again}") for one in _idealised(model, lengths, rule)]
    return min(found, default=NOTHING)


def dynamic_context(model: Model, lengths: Any, rule: _Rule) -> Step:
    """The best plan, priced as farpipe's are, of the idealisation's groups and of its rule under farpipe's costs."""
    found, idealised = [NOTHING], [*_idealised(model, lengths, rule)]
    for job in _jobs_of_groups(model, lengths):
        family = family_of(job, lengths, BatchOptions())
        if family is None or family.ideal_s + family.outside_s >= min(found)[0]:
            continue
        family = family if rule.any_degree else family.dividing
        for one in sorted([*idealised, *_of_family(family, lengths, rule)], key=lambda one: one.ideal_s)[:_MAX_PRICED]:
            with suppress(InfeasibleError, ValueError):  # a degree that this family, with less memory, has not
                if plan := plan_assigned(family, one.groups, lengths, rule.options(again=one.again), min(found)[0]):
                    found.append((plan.step_s, f"{plan.degrees}, again {one.again}"))
    return min(found)


def _of_family(family: Family, lengths: Any, rule: _Rule) -> Iterator[_Assigned]:
    """The same rule with the memory and times of farpipe's layouts."""
    for again in (False,) if rule.any_degree else (False, True):
        seconds = _seconds_of(family, lengths, rule, again=again)
        if np.isfinite(seconds).any(axis=0).all():
            found = rule.assigned(seconds, family.degrees)
            yield from (_Assigned(step_s + family.outside_s, groups, again) for step_s, groups in found)


def _seconds_of(family: Family, lengths: Any, rule: _Rule, *, again: bool) -> Any:
    """Seconds of every document in every degree of a family, as the rule recomputes."""
    costs = [layout.costs for layout in family.layouts]
    if rule.any_degree:
        return document_times(costs, lengths, keeps_attention=rule.keeps_attention).seconds
    plain = np.stack([sequence_seconds(one, lengths) for one in costs]) + family.times.fixed_s[:, None] * (
        family.times.shares
    )
    if not again:
        return np.where(family.times.shares < 1, plain, np.inf)
    stages, load = [one.stages[0] for one in costs], as_load(lengths)
    forward = np.stack([stage.num_layers * stage.layer_forward.of_load(load) for stage in stages])
    return np.where(np.isfinite(family.times.seconds), plain + forward, np.inf)


def work_s(model: Model, lengths: Any) -> float:
    """Forward and backward of all sequences, divided over the devices."""
    alone = shared(model, int(lengths.max()), 1)[0]
    return float(seconds_of(alone, lengths, again=False).sum()) / NUM_DEVICES


def ulysses_of_paper(model: Model, lengths: Any) -> Step:
    """Ulysses at the paper's degree, over NICs of 12.5 GB/s."""
    degree = 16 if model.num_layers <= 32 else 32
    return ulysses(model, lengths, nic=NICS[1], degrees=(degree,))


_RULES = {
    "dynamic cp": _Rule(),
    "dynamic cp, searched": _Rule(searches=True),
    "dynamic cp, tuned": _Rule(searches=True, any_degree=True),
    "dynamic cp, all but attention": _Rule(searches=True, any_degree=True, keeps_attention=True),
}
METHODS: dict[str, Callable[[Model, Any], Step]] = {
    "farpipe": planned,
    "farpipe, groups": in_groups,
    "seq1f1b": seq1f1b,
    "chunkflow": partial(planned, options=replace(_ONE_DEGREE, equal="tokens")),
    "slimpipe, free": partial(slimpipe, exposed=False),
    "slimpipe": partial(slimpipe, exposed=True),
    "infinipipe": partial(planned, options=replace(_ONE_DEGREE, rule="literal")),
    "wlb": partial(planned, options=replace(_ONE_DEGREE, num_slices=1)),
    "ulysses, 12.5 GB/s": ulysses_of_paper,
    "ulysses, best": ulysses,
    "one degree": partial(planned, options=replace(_ONE_DEGREE, num_slices=1), pins=Pins(pipeline=1)),
    **{name: partial(dynamic_context, rule=rule) for name, rule in _RULES.items()},
    **{f"{name}, idealised": partial(dynamic_context_idealised, rule=rule) for name, rule in _RULES.items()},
    "flexsp, ideal": flexsp,
    "work": lambda model, lengths: (work_s(model, lengths), ""),
    "bound": lambda model, lengths: (least_step(model, lengths), ""),
    "bound, one stage": lambda model, lengths: (least_step(model, lengths, most_stages=1), ""),
}


def batch(corpus: str, draw: int, longest: int) -> Any:
    """Lengths of a batch, cut off at `longest`."""
    if corpus == "sft":
        drawn = np.random.default_rng([7, draw]).lognormal(math.log(1000), 1.6, BATCH)
        drawn = np.maximum(16, drawn.astype(np.int64))
        drawn[0] = longest  # one at the limit in every batch, as a batch of that context has
    else:
        drawn = sample_lengths(read_corpora()[corpus], BATCH, draw)
    return np.minimum(drawn, longest)


def row(corpus: str, draw: int, name: str, longest: int, methods: Sequence[str]) -> dict[str, Any]:
    """Steps of these methods on one batch."""
    lengths, model = batch(corpus, draw, longest), models()[name]
    found: dict[str, Any] = {"corpus": corpus, "draw": draw, "model": name, "cut": longest, "steps": {}, "degrees": {}}
    for method in methods:
        try:
            step_s, what = METHODS[method](model, lengths)
        except InfeasibleError:
            step_s, what = NOTHING
        found["steps"][method] = round(step_s, 3) if math.isfinite(step_s) else None
        found["degrees"][method] = what
    return found


def _key(row: dict[str, Any]) -> tuple[str, int, str, int]:
    return row["corpus"], row["draw"], row["model"], row["cut"]


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file, those of one batch as one; none where there is no file."""
    found: dict[Any, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        one = json.loads(line)
        mine = found.setdefault(_key(one), one)
        for part in ("steps", "degrees"):
            mine[part] |= one[part]
    return list(found.values())


def interval(values: Sequence[float]) -> str:
    """Mean and half the interval of 95 %."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "–"
    return f"{mean(values):.2f} ± {T95[len(values)] * stdev(values) / math.sqrt(len(values)):.2f}"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Ratios of every setting as Markdown."""
    names = [name for name in METHODS if any(name in row["steps"] for row in rows) and name not in _OURS]
    yield f"| corpus | model | cut at | farpipe, s | {' | '.join(names)} |"
    yield "|---" * (4 + len(names)) + "|"
    for key in dict.fromkeys((row["corpus"], row["model"], row["cut"]) for row in rows):
        steps = [row["steps"] for row in rows if (row["corpus"], row["model"], row["cut"]) == key]
        ours = [min((one[name] for name in _OURS if one.get(name)), default=math.nan) for one in steps]
        pairs = [[one[name] / its for one, its in zip(steps, ours, strict=True) if one.get(name)] for name in names]
        spread = f"{min(ours):.1f} to {max(ours):.1f}"
        yield f"| {' | '.join(map(str, key))} | {spread} | {' | '.join(map(interval, pairs))} |"


def main() -> None:
    """Append rows to a file, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=models(), default=[*models()])
    parser.add_argument(
        "--corpora", nargs="+", choices=["code", "wikipedia", "sft"], default=["code", "wikipedia", "sft"]
    )
    parser.add_argument("--cuts", nargs="+", type=int, default=CUTS)
    parser.add_argument("--draws", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="farpipe must be among them.")
    parser.add_argument("--rows", type=Path, required=True, help="File that gets every row as it comes.")
    parser.add_argument("--table", action="store_true", help="Print the table of the rows that are there.")
    given = parser.parse_args()
    rows = _read(given.rows)
    for draw, longest, name, corpus in product(given.draws, given.cuts, given.models, given.corpora):
        known = next((one for one in rows if _key(one) == (corpus, draw, name, longest)), None)
        methods = [one for one in given.methods if known is None or one not in known["steps"]]
        if methods and not given.table:
            with given.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row(corpus, draw, name, longest, methods)) + "\n")
    rows = _read(given.rows)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
