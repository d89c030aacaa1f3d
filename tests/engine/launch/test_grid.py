"""Sweeps in processes: kept, resumed, the same wherever they are played."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farpipe.core.errors import InputError
from farpipe.core.strict import parse_toml
from farpipe.engine.launch.grid import RowFile, here, play_grid
from farpipe.planning.explain.job_grid import FORMAT, Axis, Result, job_points, name_of, row_of
from job_files import MODEL_TO_SWEEP, site_text

JOB = f"""
{MODEL_TO_SWEEP}
{site_text("a", device="a100-80gb")}
"""
BATCHES = "training.global_batch"


def points(*batches):
    return job_points(parse_toml(JOB, "job.toml"), [Axis(BATCHES, batches)])


def rows_in(store):
    """The file of a sweep's rows at `store`."""
    return RowFile(store, name_of, {"format": FORMAT})


@pytest.fixture
def run_sweep(tmp_path):
    """`run_sweep(points, store, player, progress)`: the results, kept in `store`, or nowhere else."""

    def run(asked, store, player, progress):
        file = rows_in(store or tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
        rows = play_grid(asked, [point.name for point in asked], row_of, file, player, progress)
        return [Result.from_data(row, point.values) for row, point in zip(rows, asked, strict=True)]

    return run


def ignore(done, number):
    """Progress that nobody watches."""


class Counting:
    """A player that notes how many points it was given, and may stop early."""

    def __init__(self, stop_after=None):
        self.given, self.stop_after = [], stop_after

    def __call__(self, play, asked):
        self.given.append(len(asked))
        for number, found in enumerate(here(1)(play, asked)):
            if number == self.stop_after:
                raise KeyboardInterrupt
            yield found


def test_what_is_kept_is_not_played_again(run_sweep, tmp_path):
    store, player = tmp_path / "sweep.jsonl", Counting()
    first = run_sweep(points(8, 16), store, player, ignore)
    again = run_sweep(points(8, 16, 32), store, player, ignore)
    assert player.given == [2, 1]
    assert again[:2] == first
    assert run_sweep(points(16), store, player, ignore)[0].strategies == first[1].strategies


def test_a_sweep_that_was_cut_goes_on_where_it_was(run_sweep, tmp_path):
    store = tmp_path / "sweep.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points(8, 16, 32), store, Counting(stop_after=2), ignore)
    player = Counting()
    assert run_sweep(points(8, 16, 32), store, player, ignore) == run_sweep(points(8, 16, 32), None, here(1), ignore)
    assert player.given == [1]


def test_a_line_that_was_cut_is_played_again_and_spoils_no_other(run_sweep, tmp_path):
    store = tmp_path / "sweep.jsonl"
    run_sweep(points(8, 16), store, here(1), ignore)
    store.write_text(store.read_text()[:-20])
    player = Counting()
    run_sweep(points(8, 16), store, player, ignore)
    assert player.given == [1]
    assert len(rows_in(store).read()) == 2


@pytest.mark.parametrize("text", ["hello\n", '{"format": "farpipe/plan/1"}\n', "[]\n"])
def test_a_file_that_is_something_else_is_left_alone(run_sweep, tmp_path, text):
    store = tmp_path / "sweep.jsonl"
    store.write_text(text)
    with pytest.raises(InputError, match="no rows of a sweep of farpipe"):
        run_sweep(points(8), store, here(1), ignore)
    assert store.read_text() == text


def test_progress_is_told_from_what_is_known_to_the_end(run_sweep, tmp_path):
    told = []
    run_sweep(points(8, 16), tmp_path / "s.jsonl", here(1), lambda done, number: told.append((done, number)))
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.slow
def test_several_processes_find_what_one_finds(run_sweep):
    asked = points(8, 16, 32)
    assert run_sweep(asked, None, here(2), ignore) == run_sweep(asked, None, here(1), ignore)


@pytest.mark.slow
def test_an_impossible_point_in_a_process_is_told_as_here(run_sweep):
    with pytest.raises(InputError, match=r"training.global_batch"):
        run_sweep(points(8, "many"), None, here(2), ignore)


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    batches = ",".join(str(8 * n) for n in range(1, 200))
    command = [
        sys.executable,
        "-m",
        "farpipe",
        "sweep",
        "job.toml",
        "--over",
        f"{BATCHES}={batches}",
        "--processes",
        "2",
    ]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    store, end = tmp_path / "sweep.jsonl", time.monotonic() + 60
    while (not store.exists() or len(store.read_text().splitlines()) < 2) and time.monotonic() < end:
        time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait(60)
    while _members(run.pid) and time.monotonic() < end:
        time.sleep(0.2)
    assert not _members(run.pid)
    assert len(rows_in(store).read()) >= 1


def _members(session):
    """Processes of the session that are no zombies; multiprocessing's resource tracker ends by itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(folder.name)
    return found
