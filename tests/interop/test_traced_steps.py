"""Traces of several ranks: a Timeline that is the one that made them; clocks, missing ranks."""

import json
from dataclasses import replace

import numpy as np
import pytest

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.interop.trace_files import read_trace
from farpipe.interop.traced_steps import timeline_of
from pipelines import pipeline, two_sites

METHODS = ("1f1b", "zb-h1", "interleaved")
GPU_LATE = 5.0


def step_of(method, num_ranks=2):
    problem = (
        pipeline(num_ranks, 4, stages_per_rank=2) if method == "interleaved" else two_sites(num_ranks, 4, latency=2)
    )
    return problem, order(method, problem)


def events_of(timeline, rank, gpu=False, epoch_s=0.0, again=0.0):
    """Kineto's events of a rank: every action waits before it computes, inside its annotation."""
    found, free = [], -1e12
    for action in timeline.actions[timeline.actions["rank"] == rank]:
        start, end = (1e6 * (action[name] + again - epoch_s) for name in ("start_s", "end_s"))
        text, begin = timeline.label(action), max(free, start - 1e5)
        at, free = {"ph": "X", "tid": 1, "args": {}}, end
        found.append(at | {"cat": "user_annotation", "name": f"PP:{text}", "ts": begin, "dur": end - begin})
        found.append(at | {"cat": "cpu_op", "name": "c10d::recv_", "ts": begin, "dur": 1})
        found.append(at | {"cat": "cpu_op", "name": "aten::mm", "ts": start + 1, "dur": end - start - 2})
        if gpu:  # launched at once, run later
            for kernel, late, seconds in (("gemm", GPU_LATE, end - start), ("ncclDevKernel_SendRecv", 0, 9e6)):
                number = {"correlation": len(found) + 100 * rank}
                found.append(
                    at | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 1, "dur": 1, "args": number}
                )
                place = {"cat": "kernel", "name": kernel, "ts": start + 1e6 * late, "dur": seconds, "args": number}
                found.append(at | place)
    return found


def written(tmp_path, timeline, gpu=False, epochs=None, steps=1):
    """The traces of all ranks of `steps` equal steps."""
    traces = []
    for rank in range(timeline.num_ranks):
        epoch_s = (epochs or {}).get(rank, 0.0)
        events = [e for k in range(steps) for e in events_of(timeline, rank, gpu, epoch_s, again=k * 1000.0)]
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": epoch_s * 1e9}))
        traces.append(read_trace(path))
    return traces


def expect_same(found, timeline):
    for name in ("rank", "stage", "kind", "microbatch", "start_s", "end_s"):
        assert np.allclose(
            found.actions[name], np.sort(timeline.actions, order=("rank", "start_s"))[name], atol=1e-5
        ), name
    assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-5)
    assert found.bubble_ratio == pytest.approx(timeline.bubble_ratio, abs=1e-5)
    assert np.allclose(found.exposed_s, timeline.exposed_s, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gpu", [False, True])
def test_traces_of_a_step_give_its_timeline(method, gpu, tmp_path):
    """Waiting inside an annotation, kernels that run later than their launch, and NCCL's are no computing."""
    problem, schedule = step_of(method)
    timeline = simulate(problem, schedule)
    found, notes = timeline_of(written(tmp_path, timeline, gpu, steps=2), problem, schedule)
    assert found.source == "measured"
    assert notes == ("the traced step is one of 2, the median",)
    expect_same(found, timeline)


def test_base_times_join_the_clocks_and_a_wrong_clock_is_shifted(tmp_path):
    problem, schedule = step_of("1f1b")
    timeline = simulate(problem, schedule)
    traces = written(tmp_path, timeline, epochs={0: 100.0, 1: 250.0})
    expect_same(timeline_of(traces, problem, schedule).timeline, timeline)
    late = [traces[0], replace(traces[1], epoch_s=traces[1].epoch_s + 60.0)]
    found, notes = timeline_of(late, problem, schedule)
    assert "the clock of rank 1 was shifted by -6e+04 ms" in notes[1]
    expect_same(found, timeline)


def test_of_two_processes_of_a_rank_the_later_counts(tmp_path):
    problem, schedule = step_of("1f1b")
    timeline = simulate(problem, schedule)
    traces = written(tmp_path, timeline)
    early = [replace(trace, epoch_s=trace.epoch_s - 0.25) for trace in traces]
    expect_same(timeline_of([*early, *traces], problem, schedule).timeline, timeline)


def test_a_missing_rank_and_unnamed_actions_are_told(tmp_path):
    problem, schedule = step_of("1f1b")
    traces = written(tmp_path, simulate(problem, schedule))
    with pytest.raises(InputError, match="stage 1 has no whole forward and backward of microbatch 0; give the traces"):
        timeline_of(traces[:1], problem, schedule)
    with pytest.raises(InputError, match="no action of a pipeline is named"):
        timeline_of([replace(trace, notes=()) for trace in traces], problem, schedule)
