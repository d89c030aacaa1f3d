"""The steps of the Containerfile, run in a new environment where there is no engine for containers."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from farpipe import __version__

ROOT = Path(__file__).parent.parent
FILE = (ROOT / "Containerfile").read_text(encoding="utf-8")
STEPS = re.findall(r"^(ARG|FROM|WORKDIR|COPY|RUN|USER|CMD) (.*)$", FILE, re.MULTILINE)


def test_the_file_names_this_version():
    assert re.findall(r"farpipe/farpipe:(\S+)", FILE) == [__version__, f"{__version__}-cuda"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_steps_make_an_environment_that_plans(tmp_path):
    """Without PyTorch, which alone takes minutes, and without the user; / is a folder."""
    venv.create(tmp_path / "venv", with_pip=True)
    (tmp_path / "dist").mkdir()
    path = f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path, "TORCH": "cpu"}
    folder, environment["EXTRAS"] = tmp_path, "secure"
    for instruction, text in STEPS:
        here = re.sub(r"(?<![\w.])/(source|dist)\b", rf"{tmp_path}/\1", text)
        if instruction == "WORKDIR" and "/source" in text:
            folder = Path(here)
            folder.mkdir()
        elif instruction == "COPY" and not text.startswith("--from"):
            *names, _ = text.split()
            tree = subprocess.run(
                ["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
            files = "\n".join(tree.splitlines())
            copied = f"tar -C {ROOT} -ch -T - | tar -x -C {folder}"
            subprocess.run(["bash", "-c", copied.replace("-ch", "-cf -")], input=files, text=True, check=True)
        elif instruction == "COPY" and "constraints.txt" in text:
            (tmp_path / "dist" / "constraints.txt").write_bytes((folder / "constraints.txt").read_bytes())
        elif instruction == "RUN" and "useradd" not in text:
            command = here.replace(" --system", "")
            subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=True)
    run = tmp_path / "runs"
    run.mkdir()
    done = subprocess.run(
        ["farpipe", "init", "--recipe", "two_sites"], cwd=run, env=environment, capture_output=True, text=True
    )
    assert "use both sites" in done.stdout, done.stderr
    assert "compiling" not in done.stderr
    assert sys.version_info >= (3, 11)
