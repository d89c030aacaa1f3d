"""Run commands as a user does, in an empty folder."""

import io
import json
import os
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout

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
def farpipe(tmp_path, monkeypatch):
    """`farpipe(*arguments)` in an empty folder, in this process: it saves the start of another. How it ended."""
    from farpipe.cli import main

    def run(*arguments):
        with monkeypatch.context() as patch, ExitStack() as stack:
            patch.chdir(tmp_path)
            patch.delenv("COLUMNS", raising=False)
            patch.setattr(sys, "argv", ["farpipe", *map(str, arguments)])
            patch.setattr(sys.modules["__main__"], "__package__", None)  # else `python -m pytest` is the program's name
            written = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
            stack.enter_context(redirect_stdout(written[0]))
            stack.enter_context(redirect_stderr(written[1]))
            with pytest.raises(SystemExit) as end:
                main()
        texts = [text.buffer.getvalue().decode() for text in written]
        return subprocess.CompletedProcess(["farpipe", *map(str, arguments)], end.value.code or 0, *texts)

    return run


@pytest.fixture
def farpipe_process(tmp_path):
    """The same in a process of its own, as a user does: for what a shell or the system sees of it."""

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
