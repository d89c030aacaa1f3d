"""The built wheel, installed where there is no clone, has all that a first answer needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
TREE = ("src", "recipes", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder with the package as the wheel of a copy of the tree has it; its libraries are this environment's."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    tree = subprocess.run(["git", "ls-files", *TREE], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    copied = ["tar", "-C", str(ROOT), "-cf", str(folder / "tree.tar"), *tree.splitlines()]
    subprocess.run(copied, check=True)
    (folder / "clone").mkdir()
    subprocess.run(["tar", "-C", str(folder / "clone"), "-xf", str(folder / "tree.tar")], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "clone")]
    subprocess.run(build, check=True, cwd=folder, timeout=250)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, cwd=folder)
    return folder / "site"


@pytest.fixture
def run(installed, tmp_path):
    """`run(*arguments)`: a command of that package in an empty folder; what it printed."""

    def call(*arguments):
        environment = os.environ | {"PYTHONPATH": str(installed), "NUMBA_CACHE_DIR": str(installed / "cache")}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_it_is_the_wheel_that_is_tried(run, installed):
    assert run("-c", "import farpipe; print(farpipe.__file__)").startswith(str(installed))


def test_recipes_come_with_the_wheel(run, tmp_path):
    assert "use both sites" in run("-m", "farpipe", "init", "--recipe", "two_sites")
    run("-m", "farpipe", "init", "--recipe", "megatron")
    assert "Next: farpipe" in run("-m", "farpipe", "init", "--recipe", "fleet")
    assert {path.name for path in (tmp_path / "megatron").iterdir()} == {
        "iperf.json",
        "ping.txt",
        "train.log",
        "train.sh",
    }


def test_the_sample_script_and_its_log_agree(run):
    run("-m", "farpipe", "init", "--recipe", "megatron")
    run("-m", "farpipe", "import", "megatron/train.sh", "--site", "h100", "-o", "job.toml")
    assert "Measured and predicted" in run("-m", "farpipe", "check", "job.toml", "--log", "megatron/train.log")
