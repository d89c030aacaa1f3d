"""Two sites with an agent of torchrun each, as on two machines: what ends at one site starts again at both."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from proxies import free_port
from rank_processes import FAULTY_RANK
from trainings import checkpoints, equal_states, losses, metrics, state

pytestmark = pytest.mark.slow

NUM_STEPS = 40
LIMIT_S = 120


def agents(stack, run_dir, faults, max_restarts):
    """Both agents of torchrun, started."""
    port = free_port()
    environment = os.environ | {"FARPIPE_TEST_FAULT": json.dumps(faults), "OMP_NUM_THREADS": "1"}
    started = []
    for node in range(2):
        options = {"nnodes": 2, "nproc-per-node": 1, "node-rank": node, "max-restarts": max_restarts}
        options |= {"master-addr": "127.0.0.1", "master-port": port, "monitor-interval": 0.1}
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "torch.distributed.run", *words, *FAULTY_RANK, str(run_dir)]
        log = stack.enter_context((run_dir / f"agent-{node}.log").open("w"))
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
        started.append(agent)
        stack.callback(agent.kill)
    return started


def logs(run_dir):
    return "".join((run_dir / f"agent-{node}.log").read_text() for node in range(2))


@pytest.mark.nightly
def test_a_kill_at_either_site_starts_both_again_and_sigterm_lets_them_write_a_checkpoint_and_leave(
    make, undisturbed, tmp_path
):
    spec, begin_s = make(num_steps=4000), time.monotonic()
    spec = spec.with_plan(training=spec.plan.training.model_copy(update={"keep_checkpoints": 999}))
    spec.save(tmp_path / "run.json")
    with ExitStack() as stack:
        both = agents(stack, tmp_path, faults=[[1, "optimizer"], [0, "forward"]], max_restarts=2)
        while NUM_STEPS not in checkpoints(tmp_path):
            assert time.monotonic() < begin_s + LIMIT_S, logs(tmp_path)
            assert [agent.poll() for agent in both] == [None, None], logs(tmp_path)
            time.sleep(0.02)
        for agent in both:
            agent.send_signal(signal.SIGTERM)
        for agent in both:
            agent.wait(LIMIT_S)
    found = losses(tmp_path)
    assert [step for step, *_ in found] == list(range(len(found)))
    assert NUM_STEPS <= len(found) < spec.num_steps
    assert checkpoints(tmp_path)[0] == len(found), logs(tmp_path)
    assert {line["attempt"] for line in metrics(tmp_path)} == {0, 1, 2}
    expected_losses, expected_state = undisturbed(1)
    assert found[:NUM_STEPS] == expected_losses
    assert equal_states(state(tmp_path, spec, NUM_STEPS), expected_state)
