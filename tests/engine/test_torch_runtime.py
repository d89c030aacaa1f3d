"""Exported orders in torch's own runtime: on real processes, with the gradients of the plain model."""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.schedule.torch_csv import from_torch_csv, to_torch_csv
from farpipe.engine.executor.executor import stage_ranks
from farpipe.engine.launch.launcher import launch
from farpipe.interop.torch_comms import to_torch_comms_csv
from farpipe.interop.trace_files import read_trace
from farpipe.interop.traced_steps import timeline_of
from pipelines import pipeline, two_sites

pytestmark = pytest.mark.slow  # starts processes

SCRIPT = Path(__file__).with_name("torch_pipelining.py")


def test_torch_still_has_the_private_names_that_exported_files_are_tested_with():
    from engine.torch_pipelining import PRIVATE_NAMES, schedules  # takes seconds: not while tests are collected

    for name in PRIVATE_NAMES:
        assert hasattr(schedules, name), f"torch has changed: {name} is gone; see tests/engine/torch_pipelining.py"
    assert hasattr(schedules._PipelineScheduleRuntime, "_load_csv")


def test_torch_reads_junk_that_we_refuse():
    from engine import torch_pipelining

    assert str(torch_pipelining.parse("0F0x")) == "0F0", "torch's parser has become strict: tell so in torch_csv.py"
    with pytest.raises(InputError, match="row 1, column 1: expected an action"):
        from_torch_csv("0F0x")


def write(folder, schedule, name=None):
    path = folder / f"{name or schedule.method}.csv"
    path.write_text(to_torch_csv(schedule))
    facts = {"stage_ranks": stage_ranks(schedule), "num_microbatches": schedule.num_microbatches}
    path.with_suffix(".json").write_text(json.dumps(facts))
    return path


def write_traced(folder, schedule):
    facts = write(folder, schedule, f"{schedule.method}-traced").with_suffix(".json")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"traced": True}))


def expect_traced(folder, problem, schedule):
    """Traces of torch's runtime hold every action once a step, in the order that was exported, between its messages."""
    files = sorted(folder.glob(f"{schedule.method}-traced.rank*.trace.json"))
    assert len(files) == problem.num_ranks
    timeline, notes = timeline_of([*map(read_trace, files)], problem, schedule)
    assert notes == ("the traced step is one of 2, the median",)
    for rank, order_of_rank in enumerate(schedule.ranks):
        mine = timeline.actions[timeline.actions["rank"] == rank]
        assert [timeline.label(action) for action in mine] == [str(action) for action in order_of_rank]
        assert (mine["start_s"][1:] >= mine["end_s"][:-1]).all()
    assert (timeline.messages["ready_s"] <= timeline.messages["arrival_s"]).all()


def write_with_communication(folder, problem, method):
    schedule = order(method, problem)
    path = write(folder, schedule, f"{method}-comms")
    path.write_text(to_torch_comms_csv(problem, schedule))
    facts = path.with_suffix(".json")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"format": "compute_comms"}))


def run_in_torch(folder, num_ranks):
    """The largest error of every file in `folder` over all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(SCRIPT), str(store.port), str(folder)]
    launch(lambda _: command, num_ranks, log_dir=folder / "logs", env={"GLOO_SOCKET_IFNAME": "lo"})
    told = [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(num_ranks)]
    return {name: max(errors[name] for errors in told) for name in told[0]}


def test_torch_runs_exported_orders_with_the_plain_models_gradients(tmp_path):
    flat, vee = two_sites(2, 6, latency=3), two_sites(2, 6, latency=3, v_shape=True)
    names = ("1f1b", "gpipe", "eager", "zb-h1", "zb-2p")
    for method in names:
        write(tmp_path, order(method, flat))
    for method in ("zbv", "wave"):
        write(tmp_path, order(method, vee))
    write(tmp_path, order("interleaved", pipeline(2, 6, stages_per_rank=2)))
    for method in ("1f1b", "zb-h1", "eager"):
        write_with_communication(tmp_path, flat, method)
    write_with_communication(tmp_path, vee, "zbv")
    write_with_communication(tmp_path, pipeline(2, 6, stages_per_rank=2), "interleaved")
    for method in ("zb-h1", "zbv"):
        write_traced(tmp_path, order(method, vee if method == "zbv" else flat))
    errors = run_in_torch(tmp_path, 2)
    for method in ("zb-h1", "zbv"):
        problem = vee if method == "zbv" else flat
        expect_traced(tmp_path, problem, order(method, problem))
    traced = {f"{method}-traced" for method in ("zb-h1", "zbv")}
    with_communication = {f"{method}-comms" for method in ("1f1b", "zb-h1", "eager", "zbv", "interleaved")}
    assert errors.keys() == {*names, "zbv", "wave", "interleaved", *with_communication, *traced}
    assert max(errors.values()) < 1e-12, errors


def test_torch_runs_exported_orders_on_four_ranks(tmp_path):
    flat, vee = two_sites(4, 8, latency=4, size=1), two_sites(4, 8, latency=4, v_shape=True)
    for method in ("eager", "zb-2p"):
        write(tmp_path, order(method, flat))
    write(tmp_path, order("v-half", vee))
    errors = run_in_torch(tmp_path, 4)
    assert len(errors) == 3
    assert max(errors.values()) < 1e-12, errors
