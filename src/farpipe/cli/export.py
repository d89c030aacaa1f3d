"""``farpipe export``: what farpipe has found or trained, in the files of others."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from farpipe.cli.options import need_torch, refuse, typed, with_groups
from farpipe.cli.output import check_folder, status
from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.strict import write_text
from farpipe.core.units import counted

if TYPE_CHECKING:
    from farpipe.core.step import Schedule
    from farpipe.planning import Plan


_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_ADAPTERS: Final = "adapter_config.json"
"""File of peft's folder, whose base model has the tokenizer."""


@dataclass(frozen=True)
class ExportOptions:
    """A plan, a schedule or a run, and the form in which it is written."""

    source: Annotated[
        Path, typer.Argument(help="A plan, a schedule, a run file or a run directory; for weights a checkpoint too.")
    ]
    form: Annotated[
        Literal["torch-csv", "torch-csv-comms", "megatron", "torchtitan", "torchtitan-flags", "nemo", "hugging-face"],
        typer.Option(
            "--format",
            help="torch-csv: the schedule; torch-csv-comms: with sends and receives, of a plan; megatron, torchtitan, "
            "nemo: the plan as their settings; torchtitan-flags: options of torchtitan 0.3 under farpipe.torch.titan; "
            "hugging-face: weights of the newest checkpoint.",
        ),
    ] = "torch-csv"
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; default: stdout. For weights a new folder.")
    ] = None
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of the written weights.")] = (
        "float32"
    )


@with_groups
def export(context: typer.Context, options: ExportOptions) -> None:
    """Export a schedule, a plan or trained weights in another framework's format.

    torch-csv: one row per rank, for torch's pipeline runtime; an order that torch would run wrongly is refused.
    hugging-face: config.json and safetensors. megatron, torchtitan: options and settings for a plan.
    """
    if options.form == "hugging-face":
        _export_weights(options.source, options.output, options.dtype)
        return
    refuse(typed(context, dtype="--dtype"), "needs --format hugging-face")
    with_comms = options.form == "torch-csv-comms"
    text = _with_comms(options.source) if with_comms else _exported(options.source, options.form)
    if options.output is None:
        sys.stdout.write(text)
    elif not options.output.is_file() or options.output.read_bytes() != text.encode():
        check_folder(options.output, keeping=(options.source,))
        write_text(options.output, text)


def _exported(source: Path, form: str) -> str:
    """The plan or the schedule in `source`, in the format `form`."""
    if source.suffix == ".toml":
        raise InputError(f"{source}: a job has no schedule yet; run `farpipe plan` and export its plan")
    from farpipe.core.schedule.torch_csv import to_torch_csv
    from farpipe.engine.figures.metrics import PLAN_NAME
    from farpipe.planning import Plan

    if form == "torch-csv":
        return to_torch_csv(load_schedule(source))
    plan = Plan.load(source / PLAN_NAME if source.is_dir() else source)
    return _writers()[form](plan)


def _writers() -> "dict[str, Callable[[Plan], str]]":
    """Functions that write a plan as the settings of a framework, by the name of the format."""
    from farpipe.interop.megatron_flags import megatron_flags
    from farpipe.interop.nemo_config import nemo_config
    from farpipe.interop.torchtitan_config import torchtitan_config, torchtitan_flags

    return {
        "megatron": megatron_flags,
        "torchtitan": torchtitan_config,
        "torchtitan-flags": torchtitan_flags,
        "nemo": nemo_config,
    }


def runs_on(plan: "Plan") -> tuple[str, ...]:
    """Programs that can run a plan: ``farpipe``, and those that a format of settings is for."""
    from farpipe.planning.planner.engine import plan_obstacle

    able = [] if plan_obstacle(plan)[0] else ["farpipe"]
    for form, write in _writers().items():
        with suppress(FarpipeError):
            write(plan)
            able.append(form.removesuffix("-flags"))
    return tuple(dict.fromkeys(able))


def _with_comms(source: Path) -> str:
    """The plan's schedule with sends and receives where the simulator sees them."""
    from farpipe.cli.planned import load_step
    from farpipe.engine.figures.metrics import PLAN_NAME
    from farpipe.interop.torch_comms import to_torch_comms_csv

    problem, schedule, _ = load_step(source / PLAN_NAME if source.is_dir() else source)
    if schedule is None:
        raise InputError(f"{source}: --format torch-csv-comms needs a plan, whose seconds place the receives")
    return to_torch_comms_csv(problem, schedule)


def _export_weights(source: Path, folder: Path | None, dtype: str) -> None:
    if folder is None:
        raise typer.BadParameter("weights need a folder: give one with --output", param_hint="--output")
    need_torch("--format hugging-face")
    from farpipe.engine.checkpoint.export import export_to_hugging_face

    with status("reading and writing weights"):
        num_steps = export_to_hugging_face(source, folder, dtype=dtype)
    typer.echo(f"weights after {counted(num_steps, 'step')} written to {folder}")
    if not any((folder / name).exists() for name in (*_TOKENIZERS, _ADAPTERS)):
        typer.echo(f"no tokenizer in {folder}: copy the files of the one that made the text's tokens there")


def load_schedule(path: Path) -> "Schedule":
    """The order in a plan, a schedule or a run; InputError when the file is something else."""
    from farpipe.cli.planned import read_named
    from farpipe.core.step import Schedule
    from farpipe.engine.figures.metrics import PLAN_NAME, RUN_NAME
    from farpipe.engine.launch.runs import no_run
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning import Plan

    if path.is_dir():
        found = [path / name for name in (RUN_NAME, PLAN_NAME) if (path / name).exists()]
        if not found:
            raise no_run(path)
        path = found[0]
    text, data, name = read_named(path)
    if name.startswith("farpipe/plan/"):
        return Plan.from_json(text, str(path)).schedule
    if name.startswith("farpipe/run/"):
        return RunSpec.load(path).plan.schedule
    if name.startswith("farpipe/schedule/"):
        return Schedule.from_data(data, str(path))
    raise InputError(f"{path}: expected a plan, a schedule or a run, found format {name!r}")
