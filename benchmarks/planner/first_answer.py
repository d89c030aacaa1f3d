"""The first answers after an installation, and the second: CPU and wall seconds of commands and of all that they start.

    python -m benchmarks.planner.first_answer PYTHON

PYTHON is of an environment with a wheel that has kernels (`make wheel`). Each command runs in an empty folder, with no
cache of numba's: with the wheel's kernels, and in a copy of the package without them, as any wheel was before.
"""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "plan recipes/two_sites.toml": "plan {recipes}/two_sites.toml",
    "optical blocking --network nsfnet --load 250": "optical blocking --network nsfnet --load 250",
    "sequences plan recipes/long_documents.toml": "sequences plan {recipes}/long_documents.toml",
}
ADOPTS_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): what a command leaves running in the background becomes our child."""


def seconds(python: str, command: list[str], environment: dict[str, str], folder: str) -> tuple[float, float]:
    """CPU seconds of a command with every process that it starts, and its own wall seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([python, "-m", "farpipe", *command], env=environment, cwd=folder, capture_output=True)
    took_s = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.stderr.decode())
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took_s


def main() -> None:
    python = sys.argv[1]
    ctypes.CDLL(None).prctl(ADOPTS_ORPHANS, 1, 0, 0, 0)
    where = [python, "-c", "import farpipe; print(farpipe.__path__[0])"]
    bare_environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(where, capture_output=True, text=True, check=True, cwd="/", env=bare_environment)
    installed = Path(done.stdout.strip())
    if not [*installed.glob("kernels/*.nbc")]:
        sys.exit(f"{installed}: the wheel has no kernels; build one with `make wheel`")
    columns = ("command", "kernels", "first, CPU s", "first, wall s", "second, CPU s", "second, wall s")
    print("|", " | ".join(columns), "|\n|" + "---|" * len(columns))
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare"
        shutil.copytree(installed, bare / "farpipe", ignore=shutil.ignore_patterns("kernels", "__pycache__"))
        subprocess.run([python, "-m", "compileall", "-q", str(bare)], check=True)
        (Path(folder) / "recipes").symlink_to(installed / "recipes")
        for name, command in COMMANDS.items():
            for kernels, path in {"compiled first": str(bare), "in the wheel": str(installed.parent)}.items():
                environment = {"PATH": os.environ["PATH"], "HOME": folder, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                environment["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
                words = command.format(recipes="recipes").split()
                found = [seconds(python, words, environment, folder) for _ in range(2)]
                print(
                    f"| `{name}` | {kernels} |", " | ".join(f"{s:.1f}" for pair in found for s in pair), "|", flush=True
                )


if __name__ == "__main__":
    main()
