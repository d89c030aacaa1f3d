"""Run commands as a user does: in a process of its own, in an empty folder."""

import json
import os
import subprocess
import sys

import pytest

PROBLEM = {
    "format": "farpipe/problem/1",
    "num_microbatches": 4,
    "ranks": [{"memory_bytes": 4, "static_bytes": 0}] * 2,
    "stages": [
        {"rank": r, "forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, "activation_bytes": 1} for r in range(2)
    ],
    "links": {name: {"latency_s": 2, "bandwidth_bytes_per_s": 1} for name in ("a>b", "b>a")},
    "hops": [{"forward": {"link": "a>b", "bytes": 1}, "backward": {"link": "b>a", "bytes": 1}}],
}


@pytest.fixture
def farpipe(tmp_path):
    """`farpipe(*arguments)` in an empty folder; the finished process."""

    def run(*arguments, timeout=120):
        command = [sys.executable, "-m", "farpipe", *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture
def problem_file(tmp_path):
    """A small Problem of two ranks over a slow link."""
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    return path
