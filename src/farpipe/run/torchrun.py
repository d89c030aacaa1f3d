"""What to type at each site to start a run with torchrun."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpipe.runtime.run_spec import RunSpec


def torchrun_commands(spec: "RunSpec", run_dir: Path, max_restarts: int) -> str:
    """One command per site, in the order of the ranks; addresses are left to fill in."""
    sites = [spec.places.site(process) for process in range(spec.num_processes)]
    groups = [(site, len([*ranks])) for site, ranks in groupby(sites)]
    first = f"ADDRESS_OF_{groups[0][0]}"
    lines = ["ready. Copy this directory to the same path at every site, then start:"]
    for number, (site, num_processes) in enumerate(groups):
        command = [
            f"torchrun --nnodes {len(groups)} --nproc-per-node {num_processes} --node-rank {number}",
            f"--max-restarts {max_restarts} --master-addr {first} --master-port 29500",
            f"-m farpipe.run.rank_main {run_dir} --host ADDRESS_OF_{site} --certs certs",
        ]
        lines += ["", f"at {site}:", "", "    " + " \\\n        ".join(command)]
    return "\n".join([*lines, ""])
