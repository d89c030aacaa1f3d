"""``farpipe profile JOB.toml``: measure this machine's stage times."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from farpipe.cli.options import AsJson, JobKeys, job_with, need_torch, with_groups
from farpipe.cli.output import check_folder, console, expect_replaceable, keep_earlier, status
from farpipe.core.errors import UsageError
from farpipe.core.strict import nearest

if TYPE_CHECKING:
    from farpipe.core.document import Document
    from farpipe.core.spec import Job
    from farpipe.engine.run_settings import DeviceKind
    from farpipe.planning.cost.chunk_profile import ChunkProfile


@dataclass(frozen=True)
class ProfileOptions:
    """A job, and how its parts are measured on this machine."""

    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")]
    given: JobKeys = None
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the profile.")] = Path("profile.json")
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Device to measure on; default: that of the job.")
    ] = None
    name: Annotated[
        str | None, typer.Option("--as", help="The job's name for the device, where its sites have several.")
    ] = None
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes that measure in parallel. "
            "Default: on a CPU the job's devices, at most one per core; on a GPU 1.",
        ),
    ] = None
    as_json: AsJson = False


@with_groups
def profile(options: ProfileOptions) -> None:
    """Measure this machine's stage times; `farpipe plan --profile` uses them instead of modelled ones.

    Of a job with data.packing it measures slices of many lengths behind many prefixes. Needs PyTorch.
    """
    check_folder(options.output, keeping=(options.job,))
    job = job_with(options.job, options.given)
    is_packed = job.data.packing is not None
    expect_replaceable(options.output, "chunk-profile" if is_packed else "profile")
    name = _device_name(job, options.name)
    need_torch("farpipe profile")
    (_profile_chunks if is_packed else _profile_parts)(job, name, options.device or _kind_of(job, name), options)


def _kind_of(job: "Job", name: str) -> "DeviceKind":
    """The kind of the device that is measured; InputError where it is a GPU and there is none here."""
    from farpipe.engine.stages.make_stage import expect_gpu

    if next(site.device for site in job.cluster.sites if site.device.name == name).is_cpu:
        return "cpu"
    expect_gpu(f"a profile of {name} is measured on a GPU", "measure where there is one, or say --device cpu")
    return "cuda"


def _profile_parts(job: "Job", name: str, device: "DeviceKind", options: ProfileOptions) -> None:
    """Measure, write and show what the parts of the model take."""
    from farpipe.engine.launch.profile import profile as measure
    from farpipe.report.shown import profile_table

    count = options.processes or _num_processes(job, device)
    with status(f"measuring the parts of the model in {count} processes at once"):
        found = measure(job.model, job.training, name, device=device, num_processes=count)
    _write(found, options.output, as_json=options.as_json, show=lambda: console().print(profile_table(found)))


def _profile_chunks(job: "Job", name: str, device: "DeviceKind", options: ProfileOptions) -> None:
    """Measure, write and show what chunks take and hold."""
    from farpipe.engine.launch.profile import profile_chunks
    from farpipe.planning.cost.chunk_profile import MARK

    count = options.processes or _num_processes(job, device)
    with status(f"measuring slices of sequences in {count} processes at once"):
        found = profile_chunks(job.model, job.training, name, device=device, num_processes=count)
    _write(found, options.output, as_json=options.as_json, show=lambda: _show_chunks(found, MARK))


def _show_chunks(found: "ChunkProfile", mark: float) -> None:
    from farpipe.core.cpu_share import other_work

    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in found.errors.items())
    typer.echo(f"error on held-out slices: {errors}")
    worst = max(error for kind, error in found.errors.items() if kind.endswith("mean"))
    reached = "within" if worst <= mark else "beyond"
    typer.echo(f"{reached} the target of {mark:.0%}; a layer holds {found.layer.held_bytes:,.0f} B per token")
    if doubt := other_work(found.cpu_share):
        typer.echo(doubt)


def _write(found: "Document", output: Path, *, as_json: bool, show: Callable[[], None]) -> None:
    """Save what was measured beside an earlier one, and print it."""
    earlier = keep_earlier(output, found.FORMAT.split("/")[1])
    found.save(output)
    if as_json:
        typer.echo(found.to_json())
        return
    show()
    typer.echo(f"profile written to {output}{earlier}")


def _num_processes(job: "Job", device: str) -> int:
    """The number that `farpipe train` would start here: on a CPU all ranks share the cores, a part each."""
    num_cores = len(os.sched_getaffinity(0))
    return min(sum(site.num_devices for site in job.cluster.sites), num_cores) if device == "cpu" else 1


def _device_name(job: "Job", wanted: str | None) -> str:
    names = sorted({site.device.name for site in job.cluster.sites})
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None:
        raise UsageError(f"the job has several devices; say with --as which one this is: {', '.join(names)}")
    if wanted not in names:
        raise UsageError(f"--as: the job has no device {wanted!r}{nearest(wanted, names)}; it has {', '.join(names)}")
    return wanted
