"""Under torchrun a machine is lost for good and another one takes its place, which counts restarts from 0."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from proxies import free_port
from trainings import checkpoints, equal_states, losses, state

pytestmark = pytest.mark.slow

LIMIT_S = 120


@pytest.fixture(params=["static", "c10d"])
def start(request, tmp_path):
    """`start(name, number)`: an agent with one rank; the first one that is started serves the store."""
    port = free_port()
    agents = []

    def agent(name, number):
        options = {"nnodes": 2, "nproc-per-node": 1, "max-restarts": 3, "monitor-interval": 0.1}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"}
        if request.param == "static":
            options |= {"master-addr": "127.0.0.1", "master-port": port, "node-rank": number}
        else:
            conf = f"is_host={int(not agents)},keep_alive_interval=1,keep_alive_max_attempt=3"
            options |= {"rdzv-backend": "c10d", "rdzv-endpoint": f"127.0.0.1:{port}", "rdzv-id": "x", "rdzv-conf": conf}
            # With a shared store torch 2.13 leaves the one that comes waiting if the one that stays was the first.
            environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        words = [f"--{option}={value}" for option, value in options.items()]
        command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "farpipe.engine.launch.rank_main"]
        with (tmp_path / f"{name}.log").open("w") as log:
            agents.append(subprocess.Popen([*command, str(tmp_path)], env=environment, stdout=log, stderr=log))
        return agents[-1]

    yield agent
    for one in agents:
        lose(one)


def lose(agent):
    """As when its machine goes down: the agent and its rank end without a word."""
    with suppress(OSError):
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        for rank in ranks:
            os.kill(int(rank), signal.SIGKILL)
    agent.wait(LIMIT_S)


def logs(run_dir):
    return "\n".join(path.read_text() for path in run_dir.glob("*.log"))


def wait_for_step(step, run_dir):
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := checkpoints(run_dir)) or found[0] < step:
        assert time.monotonic() < deadline_s, logs(run_dir)
        time.sleep(0.02)


def test_a_machine_that_takes_the_place_of_another_goes_on_with_the_training(make, undisturbed, start, tmp_path):
    spec = make(num_steps=4000)
    spec = spec.with_plan(training=spec.plan.training.model_copy(update={"keep_checkpoints": 999}))
    spec.save(tmp_path / "run.json")
    stays, goes = start("stays", 0), start("goes", 1)
    wait_for_step(5, tmp_path)
    lose(goes)
    comes = start("comes", 1)
    wait_for_step(40, tmp_path)
    for agent in (stays, comes):
        agent.send_signal(signal.SIGTERM)
    for agent in (stays, comes):
        agent.wait(LIMIT_S)
    expected_losses, expected_state = undisturbed(1)
    assert losses(tmp_path)[:40] == expected_losses
    assert equal_states(state(tmp_path, spec, 40), expected_state)
    counts = {
        name: re.findall(r"restart_count=(\d)", (tmp_path / f"{name}.log").read_text()) for name in ("stays", "comes")
    }
    assert (counts["stays"][-1], counts["comes"]) == ("1", ["0"]), "or this test shows less than it should"
