"""farpipe's first day on GPUs: twelve checks, ten minutes on one host. Prints a table that can go into an issue.

    make gpu
    python -m benchmarks.gpu [--checks 2,3] [--device cpu]
    python -m benchmarks.gpu --two-hosts FOLDER

With one GPU its ranks share it, and what needs two is left out. `--device cpu` has the same trainings on a CPU, with a
small model. `--two-hosts`: the list for 2 x 8 GPUs, see two_hosts.py. Exit code 0: all is as it should be, 1: something
is not, 3: there is no GPU.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu import two_hosts
from benchmarks.gpu.checks import CHECKS, Bench, Check, Outcome
from benchmarks.gpu.machine import Machine

LIMIT_S: Final = 600.0
MARKS: Final = {True: "yes", False: "**no**", None: "-"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--checks", default="")
    parser.add_argument("--two-hosts", type=Path)
    options = parser.parse_args(arguments)
    if options.two_hosts is not None:
        return list_of_two_hosts(options.two_hosts)
    import torch

    from farpipe.core.errors import InputError
    from farpipe.engine.stages.make_stage import expect_gpu

    try:
        if options.device == "cuda":
            expect_gpu("these checks need a GPU", "run them on one, or say --device cpu for the same trainings there")
    except InputError as error:
        print(error, file=sys.stderr)
        return InputError.exit_code
    wanted = {int(number) for number in options.checks.split(",")} if options.checks else None
    checks = [check for check in CHECKS if wanted is None or check.number in wanted]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Machine(Path(folder), options.device, torch.cuda.device_count() or 1))
        print(head(options.device, bench.machine), flush=True)
        outcomes = []
        for check, outcome in done(checks, bench):
            outcomes.append(outcome)
            print(row(check.number, check.what, check.expected, outcome), flush=True)
    return int(any(outcome.is_good is False for outcome in outcomes))


def done(checks: Sequence[Check], bench: Bench) -> Iterator[tuple[Check, Outcome]]:
    """The checks with their outcomes; one that breaks is not as it should be, one too late is left out."""
    deadline_s = time.monotonic() + LIMIT_S
    for check in checks:
        if time.monotonic() > deadline_s:
            yield check, Outcome("no time left", None)
            continue
        try:
            yield check, check.do(bench)
        except Exception as error:
            reason = str(error).replace("|", "/").splitlines()
            yield check, Outcome(f"{type(error).__name__}: {reason[0] if reason else ''}", False)


def head(device: str, machine: Machine) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    what = f"{machine.num_ranks} ranks on {machine.num_gpus} x {name}, torch {torch.__version__}"
    return f"{what}\n\n| # | check | expected | found | as expected |\n|---|---|---|---|---|"


def row(number: int, what: str, expected: str, outcome: Outcome) -> str:
    return f"| {number} | {what} | {expected} | {outcome.figure} | {MARKS[outcome.is_good]} |"


def list_of_two_hosts(folder: Path) -> int:
    """Write the jobs and say what to run, or the table of what was run."""
    if not (folder / "runs").exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(two_hosts.write(Machine(folder, "cuda", 8)))
        return 0
    print("| # | run | expected | found | as expected |\n|---|---|---|---|---|")
    found = two_hosts.read(folder)
    print("\n".join(row(item.number, item.name, item.expected, outcome) for item, outcome in found))
    return int(any(outcome.is_good is False for _, outcome in found))


if __name__ == "__main__":
    sys.exit(main())
