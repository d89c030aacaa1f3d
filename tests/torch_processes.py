"""Processes of torch.distributed for tests of `farpipe.torch`."""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from farpipe.engine.processes import Guarded, ParentPipe
from proxies import free_port

TESTS = Path(__file__).parent
LIMIT_S = 8.0
"""Time within which everybody has heard that a process of this machine was killed, as the how-to says."""


def environment(**more):
    """The environment of a rank: no settings of farpipe's but those in `more`."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FARPIPE_")}
    path = os.pathsep.join(map(str, [TESTS.parent / "src", TESTS, TESTS / "engine"]))
    return plain | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def torchrun(num_ranks, *words, cwd=None, timeout_s=400):
    """What `num_ranks` processes of a script print; they must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += map(str, words)
    options = {"capture_output": True, "text": True, "env": environment(), "cwd": cwd, "check": False}
    done = subprocess.run(command, timeout=timeout_s, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_ranks(num_ranks, *words):
    """(exit code, what it printed) of processes of a script, of which none is ended when another one is killed."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipe, command = ParentPipe(), [sys.executable, *map(str, words)]
    with ExitStack() as stack:
        stack.callback(pipe.close)
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        processes = [
            Guarded.start(command, pipe, env=environment(RANK=str(rank), **shared), stdout=log, stderr=log)
            for rank, log in enumerate(logs)
        ]
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(200), log.seek(0) or log.read()
        return [(process.exit_code, log.seek(0) or log.read()) for process, log in zip(processes, logs, strict=True)]


def run_well(num_ranks, *words):
    """What processes of a script print, which must end well."""
    ended = run_ranks(num_ranks, *words)
    assert not any(code for code, _ in ended), ended
    return "".join(printed for _, printed in ended)
