"""The recipe with rollouts at a third site, and what becomes of it when either side is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farpipe.engine.launch.runs import run_spec_of
from farpipe.engine.publish.words import FILE_NAME
from farpipe.planning import Plan
from publishing import subscription
from waiting import wait_until

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "rollouts"
KEYS = ("training.num_steps=100000", "training.checkpoint_every_steps=5", "publish.every_steps=5")


def start(*words, log):
    """A process in a group of its own, so that all of it can be killed."""
    with Path(log).open("ab") as file:
        return subprocess.Popen([sys.executable, *map(str, words)], stdout=file, stderr=file, start_new_session=True)


def kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The recipe's plan, with many steps."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    sets = [word for key in KEYS for word in ("--set", key)]
    subprocess.run(
        [sys.executable, "-m", "farpipe", "plan", RECIPE / "job.toml", *sets, "-o", path], check=True, timeout=300
    )
    return path


@pytest.fixture
def train(plan, tmp_path):
    """Starts the training, or lets it go on; all that is left of it is killed at the end."""
    started = []

    def begin(*options):
        command = ("-m", "farpipe", "train", plan, "--device", "cpu", *options)
        started.append(start(*command, log=tmp_path / "train.log"))
        wait_until((tmp_path / "run" / FILE_NAME).exists, "the training publishes", 240)
        return started[-1]

    yield begin
    for process in started:
        kill(process)


def lines(log):
    return [line for line in log.read_text().splitlines() if line.startswith("step ")]


@pytest.mark.slow
@pytest.mark.nightly
def test_either_side_may_be_killed_and_comes_back(train, tmp_path):
    run, log = tmp_path / "run", tmp_path / "rollouts.log"
    training = train("--run-dir", run)
    rollouts = start(RECIPE / "rollouts.py", run, log=log)
    try:
        wait_until(lambda: log.exists() and len(lines(log)) >= 3, "three versions are there", 240)
        shares = [line.split(",", 1)[1].split(" bytes")[0].replace(",", "").split(" of ") for line in lines(log)]
        assert int(shares[0][0]) > int(shares[0][1])
        assert int(shares[2][0]) < int(shares[2][1])
        kill(rollouts)
        before = steps_done(run)
        wait_until(lambda: steps_done(run) > before + 5, "the training goes on alone", 240)
        with subscription(run, site="rollouts", patience_s=240.0) as found:
            first = found.next(240)
            assert first.num_changed is None
            kill(training)
            train("--resume", run)
            while (weights := found.next(240)).step <= first.step + 5:
                assert weights is not None
            assert weights.whole_bytes == first.whole_bytes
    finally:
        kill(rollouts)


@pytest.mark.slow
def test_links_to_a_site_that_only_subscribes_are_emulated_too(plan):
    run = run_spec_of(Plan.load(plan), device="cpu")
    found = dict(run.links_to_subscribers().values())
    assert set(found) == {"zurich>rollouts", "lugano>rollouts"}
    assert found["zurich>rollouts"].latency_s == pytest.approx(0.04)
    assert found["zurich>rollouts"].bandwidth_bytes_per_s == pytest.approx(2.5e6)


def steps_done(run):
    return (run / "metrics.jsonl").read_bytes().count(b"\n")
