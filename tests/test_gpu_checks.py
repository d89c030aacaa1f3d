"""The checks of the first day on GPUs: verdicts from runs as they may be, and the table."""

import json

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, two_hosts
from benchmarks.gpu.busy import busy, covered
from benchmarks.gpu.checks import CHECKS, Bench, Check, Outcome
from benchmarks.gpu.kernels import added_product, rounding_ms
from benchmarks.gpu.machine import SMALL, Machine, Run, largest_difference


class Recorded(Machine):
    """A machine whose trainings are known: losses by name of the run."""

    def __init__(self, folder, losses, *, exit_code=0, ended_after_s=2.0, gpus=None):
        super().__init__(folder, "cuda", 2)
        self._losses, self._exit_code, self._ended_after_s, self._gpus = losses, exit_code, ended_after_s, gpus or {}

    def train(self, job, name, *options, device="", kill=None, pause_s=0.0):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"loss": loss, "cuda_peak_max_bytes": 95}) + "\n" for loss in self._losses.get(name, [])]
        (folder / "metrics.jsonl").write_text("".join(lines))
        (folder / "plan.json").write_text(json.dumps({"prediction": {"peak_memory_bytes": [90, 100]}}))
        exit_code = 0 if name == "stopped" else self._exit_code
        return Run(folder, exit_code, 1.0, "it said why", self._ended_after_s, self._gpus)


def outcome(number, machine):
    (check,) = [check for check in CHECKS if check.number == number]
    return next(gpu.done([check], Bench(machine)))[1]


GOOD = {"1f1b": [5.0, 4.0], "cpu": [5.0, 4.0001], "zb-h1": [5.0, 4.0], "zb-2p": [5.0, 4.0], "again": [5.0, 4.0]}


@pytest.mark.parametrize(
    ("number", "losses", "is_good"),
    [
        (2, GOOD, True),
        (2, GOOD | {"cpu": [5.0, 4.001]}, False),
        (2, GOOD | {"zb-2p": [5.0, 4.0001]}, False),
        (2, GOOD | {"cpu": []}, False),
        (3, GOOD, True),
        (3, GOOD | {"again": [5.0, 4.0 + 1e-9]}, False),
        (6, GOOD, True),
        (8, {}, False),
    ],
)
def test_verdicts_by_losses(tmp_path, number, losses, is_good):
    assert outcome(number, Recorded(tmp_path, losses)).is_good is is_good


@pytest.mark.parametrize(
    ("gpus", "is_good"),
    [({1: {"a"}, 2: {"b"}}, True), ({1: {"a"}, 2: {"a"}}, False), ({1: {"a", "b"}}, False), ({}, False)],
)
def test_each_process_has_a_gpu_of_its_own(tmp_path, monkeypatch, gpus, is_good):
    monkeypatch.setattr(checks, "backend", lambda device: ({3: {"a"}, 4: {"b"}}, True))
    assert outcome(1, Recorded(tmp_path, GOOD, gpus=gpus)).is_good is is_good


@pytest.mark.parametrize("found", [({3: {"a", "b"}}, True), ({3: {"a"}}, False)])
def test_the_backend_has_no_context_elsewhere_and_its_tensors_arrive(tmp_path, monkeypatch, found):
    monkeypatch.setattr(checks, "backend", lambda device: found)
    assert outcome(1, Recorded(tmp_path, GOOD, gpus={1: {"a"}, 2: {"b"}})).is_good is False


STOPPED = {"stopped": [5.0] * checks.STOPPED_STEPS}


@pytest.mark.parametrize(
    ("took_s", "exit_code", "losses", "is_good"),
    [
        (2.0, 6, STOPPED, True),
        (16.0, 6, STOPPED, False),
        (2.0, 0, STOPPED, False),
        (2.0, 6, {"stopped": [5.0] * 20}, False),
    ],
)
def test_a_killed_rank_ends_all_soon_and_a_stopped_one_goes_on(tmp_path, took_s, exit_code, losses, is_good):
    assert outcome(8, Recorded(tmp_path, losses, exit_code=exit_code, ended_after_s=took_s)).is_good is is_good


def test_kernels_run_where_no_gpu_is_there():
    assert rounding_ms("cpu", 1 << 20) > 0
    times, error = added_product("cpu", 64)
    assert times > 0
    assert error < 0.01


def test_a_run_that_fails_is_in_the_table_with_its_reason(tmp_path):
    found = outcome(3, Recorded(tmp_path, GOOD, exit_code=7))
    assert found == Outcome("RuntimeError: exit code 7: it said why", False)
    assert gpu.row(3, "twice", "the same", found).endswith("| **no** |")


def test_what_comes_after_ten_minutes_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT_S", -1.0)
    late = Check(1, "never", "", lambda bench: pytest.fail("it began"))
    assert [found for _, found in gpu.done([late], Bench(Recorded(tmp_path, {})))] == [Outcome("no time left", None)]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu.main([]) == 3
    assert "this machine has no GPU that torch can use" in capsys.readouterr().err


def test_idle_time_of_a_gpu():
    assert covered([(0, 10), (5, 20), (30, 40)]) == (0.75, 10)
    assert covered([]) == (0.0, float("inf"))


def test_python_calls_are_counted_where_no_gpu_is_there():
    share, gap_us, calls = busy(SMALL | {"num_layers": 1}, "cpu")
    assert (share, gap_us) == (0.0, float("inf"))
    assert 10 < calls < 1000


def test_the_list_for_two_hosts_is_written_once_and_then_read(tmp_path, capsys):
    assert gpu.main(["--two-hosts", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("farpipe prepare") == len(two_hosts.ITEMS)
    for name, losses in {"1f1b": [2.0] * 10, "zb-2p": [2.0] * 9 + [2.1]}.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f'{{"loss": {x}, "makespan_s": 1.05}}\n' for x in losses))
        (folder / "plan.json").write_text('{"prediction": {"makespan_s": 1.0}}')
    assert gpu.main(["--two-hosts", str(tmp_path)]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert "| 1.05 of the predicted step | yes |" in rows[2]
    assert rows[3].endswith("from 1f1b | **no** |")
    assert sum("not run" in row for row in rows) == 5


def test_losses_of_different_length_are_not_alike():
    assert largest_difference([1.0], [1.0, 2.0]) == largest_difference([], []) == float("inf")
