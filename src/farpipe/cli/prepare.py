"""``farpipe prepare JOB|PLAN``: a run directory, and the commands or scripts that start it at every site."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from farpipe.cli.options import with_groups
from farpipe.cli.output import second_name
from farpipe.cli.run_options import RunOptions, show_planned
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import write_text

if TYPE_CHECKING:
    from farpipe.engine.launch.machines import Machine
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning import Plan

HOSTFILE_NAME = "hostfile"


@with_groups
def prepare(
    options: RunOptions,
    launch_format: Annotated[
        Literal["torchrun", "sbatch", "skypilot", "jobset"],
        typer.Option("--format", help="Commands, scripts for Slurm, a JobGroup of SkyPilot, JobSets for Kubernetes."),
    ] = "torchrun",
    hostfile: Annotated[
        Path | None, typer.Option(metavar="<path>", help="Machines, as lines ADDRESS site=NAME [slots=N].")
    ] = None,
) -> None:
    """Write the directory of a run over real sites, and show how to start it.

    Starts nothing: prints the torchrun command of each machine, or writes sbatch scripts, SkyPilot or JobSet
    manifests (--format).
    """
    from farpipe.engine.launch.directory import open_run_dir
    from farpipe.engine.launch.machines import SITE_RESTARTS
    from farpipe.engine.launch.runs import run_spec_of
    from farpipe.engine.lock import only_run

    place = options.place()
    document, of_run = options.load_plan(computes_here=False)
    plan = document.plan
    if of_run.get("site_plans"):
        raise InputError(
            f"{options.job}: the sites would have unlike layouts, which `farpipe train` starts, but no command of "
            'torchrun or Slurm; say layout.replicas = "across" in the job for one layout at all of them'
        )
    show_planned(plan, options.device_for(plan.job), to_stderr=False)
    spec = run_spec_of(plan, emulate_links=False, resume=place.resume, **options.settings(plan), **of_run)
    if change := place.change_of(plan):
        typer.echo(change, err=True)
    with only_run(place.run_dir, make=True):
        if not place.in_place:
            _keep_prepared(spec, place.run_dir)
        open_run_dir(spec, place.run_dir, resume=place.in_place, explanation=document.explanation)
        max_restarts = plan.job.run.max_restarts or (SITE_RESTARTS if spec.is_elastic else 0)
        _show_how_to_start(plan, spec, place.run_dir, max_restarts, launch_format, hostfile)
    named = (spec.plan.model and spec.plan.model.hugging_face, spec.plan.data.source, spec.plan.data.tokenizer)
    if paths := [path for path in named if path and Path(path).exists()]:
        typer.echo(f"\nEvery machine reads these too, at the same path from where it starts: {', '.join(paths)}")


def _show_how_to_start(
    plan: "Plan", spec: "RunSpec", run_dir: Path, max_restarts: int, launch_format: str, hostfile: Path | None
) -> None:
    """Print the commands or scripts that start the run; write a hostfile to fill in where none is given."""
    from farpipe.engine.launch.machines import hostfile as hostfile_of
    from farpipe.engine.launch.machines import machines_of, read_hostfile, torchrun_commands
    from farpipe.engine.launch.manifests import IMAGE

    sizes = {site.name: site.devices_per_machine for site in plan.job.cluster.sites}
    machines = machines_of(spec, sizes, read_hostfile(hostfile) if hostfile else None)
    if hostfile is None:
        _put(run_dir / HOSTFILE_NAME, hostfile_of(machines))
    if launch_format == "torchrun":
        typer.echo(torchrun_commands(machines, run_dir, max_restarts, is_elastic=spec.is_elastic))
        return
    if spec.is_elastic and launch_format != "sbatch":
        raise UsageError(f"--format {launch_format} does not start elastic runs yet; take torchrun or sbatch")
    texts = _manifests(plan, spec, machines, run_dir, max_restarts, launch_format)
    for name, text in texts.items():
        _put(run_dir / name, text)
    commands = {"sbatch": "MASTER_ADDR=ADDRESS sbatch", "skypilot": "sky jobs launch --env MASTER_ADDR=ADDRESS"}
    image = f"the image {IMAGE} (Containerfile) in a registry of yours and " if launch_format == "jobset" else ""
    typer.echo(
        f"ready. Copy this directory to the same path at every site, then submit there with {image}the address of the "
        f"first machine at {machines[0].site}:\n"
    )
    for name in texts:
        typer.echo(f"    {commands.get(launch_format, 'kubectl apply -f')} {run_dir / name}")


def _keep_prepared(spec: "RunSpec", run_dir: Path) -> None:
    """Give the files of an earlier `prepare` a second name where this one has others; a line on stderr says so."""
    from farpipe.engine.figures.metrics import PLAN_NAME, RUN_NAME

    found = [path for path in (run_dir / RUN_NAME, run_dir / PLAN_NAME) if path.is_file()]
    if found and found[0].read_text(encoding="utf-8") != spec.to_json() + "\n":
        notes = "".join(map(second_name, found))
        typer.echo(f"{run_dir}: was prepared before, with another plan or other settings{notes}", err=True)


def _put(path: Path, text: str) -> None:
    """Write a file of a run directory; an earlier one, which may have been filled in, keeps a second name."""
    note = second_name(path) if path.is_file() and path.read_text(encoding="utf-8") != text else ""
    write_text(path, text)
    if note:
        typer.echo(f"{path}: written again{note}", err=True)


def _manifests(
    plan: "Plan", spec: "RunSpec", machines: "list[Machine]", run_dir: Path, max_restarts: int, launch_format: str
) -> dict[str, str]:
    """The files that start the run at its sites, by name."""
    from farpipe.engine.launch.machines import sbatch_scripts
    from farpipe.engine.launch.manifests import GROUP_NAME, jobsets, skypilot_group

    with_gpus = spec.device == "cuda"
    if launch_format == "sbatch":
        return sbatch_scripts(machines, run_dir, max_restarts, with_gpus=with_gpus, is_elastic=spec.is_elastic)
    if launch_format == "jobset":
        return jobsets(machines, run_dir, max_restarts, with_gpus=with_gpus)
    devices = {site.name: site.device.name for site in plan.job.cluster.sites if with_gpus}
    return {GROUP_NAME: skypilot_group(machines, run_dir, max_restarts, devices)}
