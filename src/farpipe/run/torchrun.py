"""Commands that start a run with torchrun on real machines: one per machine, or a Slurm script per site."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from farpipe.run.machines import Machine

MASTER_PORT: Final = 29500


def torchrun_commands(machines: Sequence[Machine], run_dir: Path, max_restarts: int) -> str:
    """One command per machine, in the order of the ranks; addresses that are not known are left to fill in."""
    lines = ["ready. Copy this directory to the same path at every machine, then start:"]
    for node_rank, machine in enumerate(machines):
        command = _command(machines, run_dir, max_restarts, str(machine.num_processes), str(node_rank), machine.address)
        several = any(other.site == machine.site and other.number for other in machines)
        where = f"{machine.site}, machine {machine.number}" if several else machine.site
        lines += ["", f"at {where}:", "", "    " + " \\\n        ".join(command)]
    return "\n".join([*lines, ""])


def _command(
    machines: Sequence[Machine],
    run_dir: Path,
    max_restarts: int,
    num_processes: str,
    node_rank: str,
    host: str,
    master: str = "",
) -> list[str]:
    """The lines of one command; words of a shell script may stand for what a machine finds out itself."""
    return [
        f"torchrun --nnodes {len(machines)} --nproc-per-node {num_processes} --node-rank {node_rank}",
        f"--max-restarts {max_restarts} --master-addr {master or machines[0].address} --master-port {MASTER_PORT}",
        f"-m farpipe.run.rank_main {run_dir} --host {host} --certs certs",
    ]


def sbatch_scripts(machines: Sequence[Machine], run_dir: Path, max_restarts: int, *, with_gpus: bool) -> dict[str, str]:
    """A Slurm script per site, by file name: one task per machine, each an agent of torchrun.

    Sites have Slurm clusters of their own, so each script is submitted at its site with MASTER_ADDR, the address of the
    first machine of the first site, in the environment.
    """
    groups = [(site, [*group]) for site, group in groupby(machines, key=lambda machine: machine.site)]
    scripts: dict[str, str] = {}
    first_node = 0
    for number, (site, group) in enumerate(groups):
        again = any(other == site for other, _ in groups[:number])
        name = f"{site}-{number}" if again else site
        scripts[f"{name}.sbatch"] = _sbatch(machines, group, first_node, run_dir, max_restarts, with_gpus)
        first_node += len(group)
    return scripts


def _sbatch(
    machines: Sequence[Machine],
    group: Sequence[Machine],
    first_node: int,
    run_dir: Path,
    max_restarts: int,
    with_gpus: bool,
) -> str:
    site, sizes = group[0].site, [machine.num_processes for machine in group]
    gpus = [f"#SBATCH --gpus-per-node={max(sizes)}"] if with_gpus else []
    command = _command(
        machines,
        run_dir,
        max_restarts,
        "$NUM_PROCESSES",
        f"$(({first_node} + SLURM_NODEID))",
        "$(hostname -I | cut -d' ' -f1)",
        master="$MASTER_ADDR",
    )
    first = machines[0]
    master = (
        f': "${{MASTER_ADDR:?set it to the address of the first machine at {first.site}}}"'
        if first.address.startswith("ADDRESS_OF_")
        else f": ${{MASTER_ADDR:={first.address}}}"
    )
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name=farpipe-{site}",
            f"#SBATCH --nodes={len(group)}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            "#SBATCH --exclusive",
            "#SBATCH --open-mode=append",
            "# SIGTERM 3 minutes before the time limit: the ranks write a checkpoint and leave; submit again to go on",
            "#SBATCH --signal=TERM@180",
            "",
            master,
            "export MASTER_ADDR",
            "srun --kill-on-bad-exit=1 bash -c '",
            f"  SIZES=({' '.join(map(str, sizes))})",
            "  NUM_PROCESSES=${SIZES[$SLURM_NODEID]}",
            "  exec " + " \\\n      ".join(line.replace("'", "'\\''") for line in command),
            "'",
            "",
        ]
    )
