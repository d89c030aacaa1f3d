"""Output of ``farpipe train`` before anything runs: the plan, the text, with ``--prepare`` the commands to start it."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from farpipe.errors import InputError

if TYPE_CHECKING:
    from farpipe.plan import Plan
    from farpipe.runtime.run_spec import RunSpec

HOSTFILE_NAME = "hostfile"
TCP_NOTE = (
    "note: the plan assumes NVLink and InfiniBand inside a site; farpipe's engine sends everything over TCP from the "
    "host's memory, so steps take longer where a site has several ranks"
)
STDLIB_NOTE = "training text: the source code of Python's standard library, as bytes (data.source names another)"


def check_text(plan: "Plan", device: str) -> None:
    """Say that a run trains on the standard library; InputError where GPUs would, and the job does not ask for it."""
    if device == "sleep" or plan.job.data.source != "stdlib":
        return
    if device == "cuda" and not _is_asked_for(plan):
        raise InputError(
            'data.source: needed to train on GPUs: name the training text in the job, or say source = "stdlib" for '
            "the source code of Python's standard library as bytes"
        )
    typer.echo(STDLIB_NOTE, err=True)


def _is_asked_for(plan: "Plan") -> bool:
    """True if the job's file has the key."""
    from farpipe.strict import parse_toml

    data = parse_toml(plan.job.text, "job").get("data") if plan.job.text else None
    return isinstance(data, dict) and "source" in data


def show_plan(plan: "Plan", device: str, *, to_stderr: bool) -> None:
    """The plan's layout and step in two lines, and what it assumes that the engine does not do."""
    typer.echo("\n".join(str(plan).splitlines()[:2]), err=to_stderr)
    if device == "cuda":
        typer.echo(TCP_NOTE, err=to_stderr)


def show_how_to_start(
    plan: "Plan", spec: "RunSpec", run_dir: Path, max_restarts: int, launch_format: str, hostfile: Path | None
) -> None:
    """The commands or scripts that start the run; a hostfile to fill in where none is given."""
    from farpipe.run.machines import hostfile as hostfile_of
    from farpipe.run.machines import machines_of, read_hostfile
    from farpipe.run.torchrun import sbatch_scripts, torchrun_commands
    from farpipe.strict import write_text

    sizes = {site.name: site.devices_per_machine for site in plan.job.cluster.sites}
    machines = machines_of(spec, sizes, read_hostfile(hostfile) if hostfile else None)
    if hostfile is None:
        write_text(run_dir / HOSTFILE_NAME, hostfile_of(machines))
    if launch_format == "torchrun":
        typer.echo(torchrun_commands(machines, run_dir, max_restarts))
        return
    scripts = sbatch_scripts(machines, run_dir, max_restarts, with_gpus=spec.device == "cuda")
    for name, text in scripts.items():
        write_text(run_dir / name, text)
    typer.echo(
        "ready. Copy this directory to the same path at every site, then submit there with the address of the first "
        f"machine at {machines[0].site}:\n"
    )
    for name in scripts:
        typer.echo(f"    MASTER_ADDR=ADDRESS sbatch {run_dir / name}")
