"""Compile the kernels of a wheel: ``python -m farpipe.cli.kernels``, as setup.py calls it when it builds one.

The commands that somebody types in the first hour are run on the recipes; whatever numba compiles for them is kept in
the package's folder of kernels. A kernel that none of them needs is compiled where it is first called, as without a
wheel.
"""

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from farpipe.cli import main
from farpipe.core.step import jit

COMMANDS: Final = """
init --recipe two_sites
init --recipe long_documents -o documents.toml
init --recipe three_sites_asymmetric -o three.toml
init --recipe strategies -o strategies.toml
plan job.toml --html page.html
plan job.toml --time-limit 1
plan three.toml -o three.json
plan strategies.toml -o strategies.json
plan documents.toml -o documents.json
plan job.toml --set schedule.method=zb-1p --no-strategies
simulate plan.json
simulate documents.json
compare plan.json
compare plan.json --time-limit 0.2
compare documents.json
schedule plan.json --time-limit 1
pareto job.toml --objective time,energy
sequences plan documents.toml
lengths --job documents.toml
validate
optical blocking --network nsfnet --load 250
optical simulate plan.json --nodes zurich=1,lugano=14 --network nsfnet --load 200
export plan.json --format torch-csv
fleet simulate fleet/six_regions.toml --jobs fleet/jobs.csv --policy farpipe
"""
"""What is typed first."""


def compile_all() -> None:
    """Run the commands in an empty folder; RuntimeError names the first that fails."""
    jit.ships = True
    jit.SHIPPED.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        for line in ["init --recipe fleet", *COMMANDS.strip().splitlines()]:
            print(line, file=sys.stderr)
            sys.argv = ["farpipe", *line.split()]
            with redirect_stdout(io.StringIO()):
                try:
                    main()
                except SystemExit as end:
                    if end.code:
                        raise RuntimeError(f"farpipe {line}: exit code {end.code}") from None
        os.chdir(Path(folder).parent)


if __name__ == "__main__":
    compile_all()
