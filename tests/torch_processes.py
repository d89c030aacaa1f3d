"""Processes of torch.distributed for tests of `farpipe.torch`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
LIMIT_S = 8.0
"""Time within which everybody has heard that a process of this machine was killed, as the how-to says."""


def environment(**more):
    """The environment of a rank: no settings of farpipe's but those in `more`."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FARPIPE_")}
    path = os.pathsep.join(map(str, [TESTS.parent / "src", TESTS, TESTS / "runtime"]))
    return plain | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def torchrun(num_ranks, *words, cwd=None, timeout_s=400):
    """What `num_ranks` processes of a script print; they must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += map(str, words)
    options = {"capture_output": True, "text": True, "env": environment(), "cwd": cwd, "check": False}
    done = subprocess.run(command, timeout=timeout_s, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_one_by_one(num_ranks, *words):
    """Processes that nobody ends when another one is killed, and their logs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])

    def start(rank):
        env = environment(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        command = [sys.executable, *map(str, words)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    processes = [start(rank) for rank in range(num_ranks)]
    try:
        return processes, [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
