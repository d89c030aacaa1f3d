"""PyTorch is optional: what needs it names the extra to install, before anything is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from job_files import SMALL_MODEL, cluster_text

TRAINING = '\n[training]\nsequence_length = 32\nglobal_batch = 4\nnum_steps = 2\nprecision = "fp32"\n\n'
JOB = SMALL_MODEL + TRAINING + cluster_text()
SRC = Path(__file__).parents[2] / "src"
HIDE_TORCH = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def farpipe(tmp_path):
    """`farpipe(*arguments)` on a Python that has no PyTorch; the finished process."""
    hidden, folder = tmp_path / "hidden", tmp_path / "work"
    hidden.mkdir()
    folder.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE_TORCH)
    (folder / "job.toml").write_text(JOB)
    paths = [str(hidden), str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(hidden)}

    def run(*arguments):
        command = [sys.executable, "-m", "farpipe", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "job.toml"),
        ("train", "job.toml", "--device", "sleep"),
        ("profile", "job.toml"),
        ("export", "runs/last", "--format", "hugging-face", "-o", "model"),
    ],
    ids=" ".join,
)
def test_what_needs_torch_names_the_extra_and_leaves_nothing_behind(farpipe, tmp_path, arguments):
    result = farpipe(*arguments)
    assert (result.returncode, result.stdout) == (3, "")
    assert "needs PyTorch: pip install 'farpipe[train]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["job.toml"]
    assert {path.name for path in (tmp_path / "hidden").iterdir()} <= {"sitecustomize.py", "__pycache__"}


@pytest.mark.slow
def test_planning_simulating_and_preparing_need_no_torch(farpipe):
    for arguments in (
        ("plan", "job.toml"),
        ("compare", "plan.json", "--method", "1f1b"),
        ("simulate", "plan.json", "--html", "report.html"),
        ("prepare", "plan.json", "--run-dir", "runs/1"),
    ):
        result = farpipe(*arguments)
        assert result.returncode == 0, result.stderr
