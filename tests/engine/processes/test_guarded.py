"""Nothing that was started outlives its time: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farpipe.engine.processes import Guarded, ParentPipe, wait_for_any
from rank_processes import child_of
from waiting import wait_until

SLEEPER = ("sleep", "300")


@pytest.fixture
def parent_pipe():
    parent_pipe = ParentPipe()
    yield parent_pipe
    parent_pipe.close()


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_a_process_ends_as_its_command_ends(parent_pipe):
    process = Guarded.start(["sh", "-c", "exit 7"], parent_pipe)
    assert process.wait(60)
    assert process.exit_code == 7
    assert process.wait(0), "a second time"


def test_the_first_that_ends_is_told_and_the_others_go_on(parent_pipe):
    short, long = Guarded.start(["true"], parent_pipe), Guarded.start(SLEEPER, parent_pipe)
    assert wait_for_any([short, long], 60) == [short]
    assert wait_for_any([long], 0.05) == []
    short.reap()
    long.stop(parent_pipe, leave_s=5)
    assert (short.exit_code, long.exit_code) == (0, -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("command", [SLEEPER, ("sh", "-c", "trap '' TERM; setsid sleep 300 & sleep 300")])
def test_stop_leaves_nothing_whatever_the_process_does(command, parent_pipe):
    process = Guarded.start(command, parent_pipe)
    child = child_of(process)
    process.stop(parent_pipe, leave_s=0.3)
    assert process.exit_code is not None
    wait_until(lambda: not runs(child), "the process had ended")


def test_a_process_that_is_stopped_is_ended_too(parent_pipe):
    process = Guarded.start(SLEEPER, parent_pipe)
    os.kill(child_of(process), signal.SIGSTOP)
    process.stop(parent_pipe, leave_s=0.1)
    assert process.exit_code in (-signal.SIGTERM, -signal.SIGKILL), "a group without parents is continued by the kernel"


AGENT = """
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", {rank!r}], env=os.environ | {{"TORCHELASTIC_RUN_ID": "x"}})
print(rank.pid, flush=True)
if {end!r}:
    rank.wait()
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(300)
"""
RANK = "import time; from farpipe.engine.processes import die_with_agent; die_with_agent(idle_limit_s=1.0); {then}"


def start_agent(*, rank_ends):
    """A parent as torchrun is to a rank; it is deaf to SIGTERM once its rank has ended, as torchrun is in its store."""
    rank = RANK.format(then=f"print('up', flush=True); time.sleep({0.2 if rank_ends else 300})")
    program = AGENT.format(rank=rank, end=rank_ends)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_ends_with_an_agent_that_is_killed():
    with start_agent(rank_ends=False) as agent:
        rank = int(agent.stdout.readline())
        assert agent.stdout.readline() == "up\n"
        agent.kill()
        wait_until(lambda: not runs(rank), "the rank had ended")


@pytest.mark.slow
def test_an_agent_without_ranks_that_hears_no_signal_is_ended():
    with start_agent(rank_ends=True) as agent:
        assert agent.wait(60) == -signal.SIGKILL
        assert "torchrun has had no rank for 1 s" in agent.stderr.read()


def test_without_an_agent_nothing_is_done():
    code = "import ctypes; from farpipe.engine.processes import die_with_agent; die_with_agent({}); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "lives\n"


def test_threads_may_cut_a_pipe_at_once(monkeypatch):
    pipe, close, closed = ParentPipe(), os.close, []

    def slowly(fileno):
        time.sleep(0.05)
        closed.append(fileno)
        close(fileno)

    monkeypatch.setattr(os, "close", slowly)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(pipe.cut) for _ in range(4)]:
            done.result(timeout=60)
    monkeypatch.undo()
    assert len(closed) == 1
    pipe.close()
