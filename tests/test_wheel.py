"""The built wheel, installed where there is no clone, has all that a first answer needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
MEASURED = re.compile(r'"(search|planning)_s": [^,}]*')
TREE = ("src", "recipes", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def built(folder, **environment):
    """Folder with the package as the wheel of a copy of the tree has it; its libraries are this environment's."""
    pytest.importorskip("pip")
    tree = subprocess.run(["git", "ls-files", *TREE], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    copied = ["tar", "-C", str(ROOT), "-cf", str(folder / "tree.tar"), *tree.splitlines()]
    subprocess.run(copied, check=True)
    (folder / "clone").mkdir()
    subprocess.run(["tar", "-C", str(folder / "clone"), "-xf", str(folder / "tree.tar")], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "clone")]
    subprocess.run(build, check=True, cwd=folder, env=os.environ | environment)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, cwd=folder)
    return folder / "site"


def called(site, folder, arguments, **environment):
    """A command of the package in `site`, called in `folder`."""
    environment = os.environ | {"PYTHONPATH": str(site)} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def run(installed, tmp_path):
    """`run(*arguments)`: a command of that package in an empty folder; what it printed."""
    return lambda *arguments: called(installed, tmp_path, arguments, NUMBA_CACHE_DIR=str(installed / "cache")).stdout


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


def test_pip_is_told_which_python_is_too_old(installed):
    """By this line pip on 3.10 says: requires a different Python: 3.10.13 not in '>=3.11'."""
    (metadata,) = installed.glob("farpipe-*.dist-info/METADATA")
    assert "\nRequires-Python: >=3.11\n" in metadata.read_text()


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # it compiles every kernel: a minute of CPU
def test_a_wheel_with_kernels_answers_the_same_and_compiles_nothing(tmp_path, tmp_path_factory):
    """The same as the tree, whose kernels other tests have compiled: to compile them a second time takes as long."""
    site = built(tmp_path_factory.mktemp("kernels"), FARPIPE_KERNELS="1")
    commands = [
        ("init", "--recipe", "two_sites"),
        ("init", "--recipe", "long_documents", "-o", "documents.toml"),
        ("plan", "job.toml", "--json"),
        ("sequences", "plan", "documents.toml", "--json"),
        ("optical", "blocking", "--network", "nsfnet", "--load", "250", "--set", "seeds=1", "--json"),
    ]
    (tmp_path / "with").mkdir()
    for command in commands:
        cache = {"NUMBA_CACHE_DIR": str(site / "cache")}
        found = called(site, tmp_path / "with", ("-m", "farpipe", *command), **cache)
        assert "compiling" not in found.stderr
        expected = called(ROOT / "src", tmp_path, ("-m", "farpipe", *command)).stdout
        assert MEASURED.sub("", found.stdout) == MEASURED.sub("", expected)
    assert not [*(site / "cache").rglob("*.nbc")]
