"""A training's own log beside the prediction of its job: the error, where the seconds go, what may explain the rest."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from farpipe import planning
from farpipe.core.errors import FarpipeError, InfeasibleError
from farpipe.core.simulate import Timeline
from farpipe.core.spec import Job, Site
from farpipe.core.units import format_seconds
from farpipe.interop.log_sizes import expect_same, pinned_by, sizes_of_plan
from farpipe.interop.steady_steps import Measured
from farpipe.interop.step_log import StepLog
from farpipe.interop.trace_files import Trace, of_one_rank
from farpipe.interop.traced_steps import timeline_of
from farpipe.planning import Plan, Planned, find
from farpipe.planning.explain.derivation import parts_of_step
from farpipe.planning.planner.find import MeasuredDevices

_MORE_MEMORY: Final = 16.0
"""Factor on the devices' memory with which a training is predicted that ran, but would not fit by the model."""
_CALIBRATED: Final = 1e-3
"""Relative error of the step at which a calibration ends."""
_VISIBLE: Final = 1e-3
"""Share of a step below which a setting explains nothing."""
_MAX_CALIBRATIONS: Final = 32
_CHANGES: Final[Mapping[str, Mapping[Any, str]]] = {
    "overlap": {
        True: "replicas' collectives are not hidden behind compute (overlap = false)",
        False: "replicas' collectives are hidden behind compute (overlap = true)",
    },
    "kernels": {
        "fused": 'operations between matrix products run unfused (kernels = "eager")',
        "eager": 'operations between matrix products are fused (kernels = "fused")',
    },
    "flash_attention": {
        True: "attention keeps its scores (flash_attention = false)",
        False: "attention does not keep its scores (flash_attention = true)",
    },
    "sequence_parallel": {
        True: "norms are not divided (sequence_parallel = false)",
        False: "norms are divided (sequence_parallel = true)",
    },
    "tp_comm_overlap": {
        False: "tensor-parallel collectives run beside products (tp_comm_overlap = true)",
        True: "tensor-parallel collectives do not run beside products (tp_comm_overlap = false)",
    },
    "cuda_graphs": {
        True: "the host launches every kernel (cuda_graphs = false)",
        "part": "the host launches every kernel (cuda_graphs = false)",
        False: "the host launches no kernel by itself (cuda_graphs = true)",
    },
}
"""Settings of a training that a run may have otherwise than its job says, with the words for the other value."""
_OTHERS: Final[Mapping[Any, Any]] = {True: False, False: True, "part": False, "fused": "eager", "eager": "fused"}


@dataclass(frozen=True)
class Suspect:
    """A difference between the job and the run that may explain an error."""

    what: str
    effect_s: float
    """Seconds that it adds to the predicted step."""


@dataclass(frozen=True)
class Comparison:
    """Measured and predicted step of a training."""

    measured: Measured
    planned: Planned
    seconds: Mapping[str, float]
    """`parts_of_step`, and ``rest``: what was measured beyond the prediction."""
    suspects: tuple[Suspect, ...]
    notes: tuple[str, ...]
    timeline: Timeline | None = None
    """Measured timeline of a pipeline's step, where traces of all its ranks were given."""

    @property
    def plan(self) -> Plan:
        """The plan that is compared."""
        return self.planned.plan

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.plan.prediction.step_s / self.measured.step_s - 1

    def to_data(self) -> dict[str, Any]:
        """The comparison as ``--json`` prints it."""
        return {
            "format": "farpipe/check/1",
            "measured_step_s": self.measured.step_s,
            "predicted_step_s": self.plan.prediction.step_s,
            "is_comparable": True,
            "error": self.error,
            "num_steps": self.measured.num_steps,
            "spread": self.measured.spread,
            "seconds": dict(self.seconds),
            "suspects": [{"what": suspect.what, "effect_s": suspect.effect_s} for suspect in self.suspects],
            "notes": [*self.measured.notes, *self.notes],
            **({} if self.timeline is None else {"timeline": self.timeline.to_body()}),
        }


def compare(
    job: Job, measured: Measured, log: StepLog, profiles: MeasuredDevices = (), traces: Sequence[Trace] = ()
) -> Comparison:
    """The prediction of `job`, all of whose pins hold, beside what its log tells; `profiles` take the place of modelled
    times, which leaves nothing to suspect in them. `traces` of a pipeline's ranks give the measured Timeline."""
    asked, (job, pinned) = job, pinned_by(log.sizes, job)
    job, found, notes = _planned(job, profiles, log.memory_bytes)
    plan = found.plan
    expect_same(log.sizes, sizes_of_plan(plan), "the plan of this job")
    notes = (*notes, *([f"left open in the job, and taken from the log: {pinned}"] if pinned else []))
    seconds = parts_of_step(plan, found.costs) | {"rest": measured.step_s - plan.prediction.step_s}
    suspects = () if profiles else _suspects(job, plan, measured)
    has_pipeline = plan.problem.num_ranks > 1 and not of_one_rank(traces)
    timeline, told = timeline_of(traces, plan.problem, plan.schedule) if has_pipeline else (None, ())
    notes = (*notes, *_notes(job, plan, log), *_traced_steps(traces, measured), *told)
    found = replace(found, plan=_with_own_memory(plan, asked))
    return Comparison(measured, found, seconds, suspects, notes, timeline)


def _planned(
    job: Job, profiles: MeasuredDevices = (), used_bytes: float | None = None
) -> tuple[Job, Planned, tuple[str, ...]]:
    """The plan of a training that ran, and the job that it is of.

    What ran fits in memory, whatever the model of it says: then the limit is lifted, and a note says so, or which
    device it cannot have been if the log's own `used_bytes` are more than that has.
    """
    try:
        return job, find(job, profiles)[0], ()
    except InfeasibleError as error:
        short = str(error).splitlines()[0]
    device = min((site.device for site in job.cluster.sites), key=lambda device: device.memory_bytes)
    note = f"the memory of this run is overestimated, so its time is predicted without a limit: {short}"
    if used_bytes and used_bytes > device.memory_bytes:
        note = (
            f"the run used {used_bytes / 2**30:.1f} GiB of a device (log), and {device.name} has "
            f"{device.memory_bytes / 2**30:.0f}: name the right one (`farpipe list devices`); its time is predicted "
            "without a limit"
        )
    job = _with_devices(job, memory_factor=_MORE_MEMORY)
    return job, find(job, profiles)[0], (note,)


def _with_own_memory(plan: Plan, asked: Job) -> Plan:
    """The plan whose ranks have the memory of the devices that were asked for, as tables and pages show it."""
    devices = {site.name: site.device for site in asked.cluster.sites}
    if all(site.device == devices[site.name] for site in plan.job.cluster.sites):
        return plan
    ranks = tuple(
        rank.model_copy(update={"memory_bytes": rank.memory_bytes and rank.memory_bytes / _MORE_MEMORY})
        for rank in plan.problem.ranks
    )
    return plan.model_copy(update={"problem": plan.problem.model_copy(update={"ranks": ranks})})


def _suspects(job: Job, plan: Plan, measured: Measured) -> tuple[Suspect, ...]:
    """Settings that would bring the prediction nearer to the measurement by a thousandth of it, the nearest first."""
    missing_s = measured.step_s - plan.prediction.step_s
    found = []
    for key, words in _CHANGES.items():
        value = getattr(job.training, key)
        if value == "auto" or value not in _OTHERS:
            continue
        effect_s = _effect_s(job, plan, {key: _OTHERS[value]})
        nearer_s = 0.0 if effect_s is None else abs(missing_s) - abs(missing_s - effect_s)
        if effect_s is not None and nearer_s > _VISIBLE * measured.step_s:
            found.append(Suspect(words[value], effect_s))
    return tuple(sorted(found, key=lambda suspect: abs(missing_s - suspect.effect_s)))


def _effect_s(job: Job, plan: Plan, change: Mapping[str, Any]) -> float | None:
    training = job.training.model_copy(update=dict(change))
    try:
        other = planning.plan(job.model_copy(update={"training": training, "text": ""}))
    except FarpipeError:  # it would not fit
        return None
    return other.prediction.step_s - plan.prediction.step_s


def _notes(job: Job, plan: Plan, log: StepLog) -> tuple[str, ...]:
    notes = [f"the log is of {log.framework}"]
    if log.memory_bytes:  # 0 where the framework can't ask the device
        expected = max(plan.prediction.peak_memory_bytes)
        notes.append(
            f"memory: {expected / 2**30:.1f} GiB predicted, {log.memory_bytes / 2**30:.1f} GiB in the log "
            f"({expected / log.memory_bytes - 1:+.1%}; an allocator's figure may count what it keeps in reserve)"
        )
    if log.tflops:
        flops = sorted(log.tflops)[len(log.tflops) // 2]
        notes.append(f"the log's own rate: {flops:.0f} TFLOP/s per device")
    if job.data.packing is not None:
        notes.append("steps of packed documents differ from each other; predicted is that of the first batch")
    return tuple(notes)


def _traced_steps(traces: Sequence[Trace], measured: Measured) -> Iterator[str]:
    """Note on the traced steps beside the log's: the profiler takes time, and other work may have run meanwhile."""
    if seconds := [seconds for trace in traces for seconds in trace.step_s]:
        step_s = statistics.median(seconds)
        yield (
            f"the traced steps took {format_seconds(step_s)} (median of {len(seconds)}), "
            f"{step_s / measured.step_s - 1:+.1%} of the log's"
        )


def calibrated(job: Job, step_s: float) -> tuple[Job, float]:
    """The job with devices so fast that its step takes `step_s`, and the factor on their peaks.

    Only rates of matrix products change: all else of the model is left as it is. ValueError where no factor between
    1/8 and 8 does.
    """
    low, high, factor = 0.125, 8.0, 1.0
    for _ in range(_MAX_CALIBRATIONS):
        scaled = _with_devices(job, rate_factor=factor)
        predicted_s = _planned(scaled)[1].plan.prediction.step_s
        if abs(predicted_s / step_s - 1) < _CALIBRATED:
            return scaled, factor
        low, high = (factor, high) if predicted_s > step_s else (low, factor)
        guess = factor * predicted_s / step_s
        factor = guess if low < guess < high else (low * high) ** 0.5
    raise ValueError(f"no rate of the devices gives a step of {step_s:g} s")


def _with_devices(job: Job, rate_factor: float = 1.0, memory_factor: float = 1.0) -> Job:
    """The job on devices with so many times the rates and the memory."""

    def changed(site: Site) -> Site:
        peak_flops = {kind: rate * rate_factor for kind, rate in site.device.peak_flops.items()}
        memory_bytes = site.device.memory_bytes * memory_factor
        device = site.device.model_copy(update={"peak_flops": peak_flops, "memory_bytes": memory_bytes})
        return site.model_copy(update={"device": device})

    cluster = job.cluster.model_copy(update={"sites": tuple(map(changed, job.cluster.sites))})
    return job.model_copy(update={"cluster": cluster, "text": ""})
