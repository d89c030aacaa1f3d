"""The walk of docs/how-to/fine-tune-over-two-sites.md, as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farpipe.plan import Plan
from forked import WITH_FORKS

pytestmark = pytest.mark.slow  # starts processes

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "fine-tune-over-two-sites.md"
BLOCK = re.compile(r"^```(python|text|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FARPIPE = f'#!/bin/sh\nexec "{sys.executable}" {WITH_FORKS} -m farpipe "$@"\n'


def test_a_model_is_tuned_over_two_sites_loses_a_twin_and_comes_back_to_transformers(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "farpipe").write_text(FARPIPE)
    (programs / "farpipe").chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    kinds = []
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        kinds.append(kind)
        if kind == "text":
            (folder / "job.toml").write_text(text)
            continue
        command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euc", text]
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=250)
    assert kinds == ["python", "text", "bash", "bash", "bash", "bash", "python"]
    lines = [json.loads(line) for line in (folder / "runs" / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(12))
    assert {line["attempt"] for line in lines} == {0, 1}, "one process was lost"
    planned = Plan.load(folder / "plan.json").prediction.link_bytes
    assert all(line["link_bytes"] == planned for line in lines), (planned, lines[-1]["link_bytes"])
