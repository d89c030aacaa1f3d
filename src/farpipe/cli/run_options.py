"""Options that ``train`` and ``prepare`` share, and the plan and the run that they ask for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farpipe.cli.options import JobKeys, ProfileFiles, changes, job_with
from farpipe.cli.output import status
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import parse_toml, validate

if TYPE_CHECKING:
    from farpipe.core.spec import Job
    from farpipe.engine.launch.directory import RunPlace
    from farpipe.engine.run_settings import DeviceKind
    from farpipe.planning import Plan, PlanDocument

TCP_NOTE = (
    "note: the plan assumes NVLink and InfiniBand inside a site; farpipe's engine sends everything over TCP from the "
    "host's memory, so steps take longer where a site has several ranks"
)
EAGER_NOTE = (
    'note: the plan counts fused kernels, and transformers\' own norms keep copies: set training.kernels to "eager" '
    "where memory is tight"
)
WITHOUT_GPU = (
    "rehearse here with --device cpu, which computes, or --device sleep, which only sends and waits; `farpipe prepare` "
    "writes the commands for the sites"
)
STDLIB_NOTE = "training text: the source code of Python's standard library, as bytes (data.source names another)"


@dataclass(frozen=True)
class RunOptions:
    """The training that a run directory is made for."""

    job: Annotated[Path, typer.Argument(help="A job (.toml) or a plan.")]
    given: JobKeys = None
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run; default: that of --resume, or runs/last.")
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the job's.")] = None
    device: Annotated[
        Literal["cpu", "cuda", "sleep"] | None,
        typer.Option(help="Device to compute on; sleep rehearses without computing. Default: what the sites have."),
    ] = None
    profile: ProfileFiles = None
    resume: Annotated[
        Path | None, typer.Option(help="Continue from this run's newest good checkpoint, or from this checkpoint.")
    ] = None

    def load_plan(self, *, computes_here: bool) -> "tuple[PlanDocument, dict[str, Any]]":
        """Load or make the plan, once its text was read; with the settings of its run on chunks, or of unlike sites.

        `computes_here`: InputError where this machine has not the device.
        """
        plan_of = self._plan_of_job if self.job.suffix == ".toml" else self._plan_of_file
        return plan_of(computes_here=computes_here)

    def _check(self, job: "Job", *, computes_here: bool) -> None:
        """InputError where the device is not here, or the text can't be trained on."""
        device = self.device_for(job)
        if computes_here and device == "cuda":
            from farpipe.engine.stages.make_stage import expect_gpu

            names = ", ".join(sorted({site.device.name for _, site in job.used_sites()}))
            expect_gpu(f"{self.job}: the device is cuda (its sites have {names})", WITHOUT_GPU)
        check_text(job, device)

    def device_for(self, job: "Job") -> "DeviceKind":
        """The device of `--device`, or that of the job's sites."""
        from farpipe.engine.launch.runs import device_of

        try:
            return self.device or device_of(job)
        except InputError as error:
            raise InputError(f"{self.job}: {error}") from None

    def place(self) -> "RunPlace":
        """Choose the run directory; errors as in `choose_run_dir`."""
        from farpipe.engine.checkpoint.bucket import brought
        from farpipe.engine.launch.directory import choose_run_dir

        if self.device == "sleep" and self.resume is not None:
            raise UsageError("--resume has nothing to continue: a rehearsal trains nothing")
        return choose_run_dir(self.run_dir, brought(self.resume, self.run_dir))

    def settings(self, plan: "Plan") -> dict[str, Any]:
        """The settings of the run of `plan` that these options ask for."""
        return {"num_steps": self.steps or plan.job.training.num_steps, "device": self.device_for(plan.job)}

    def _plan_of_file(self, *, computes_here: bool) -> "tuple[PlanDocument, dict[str, Any]]":
        from farpipe.planning import PlanDocument

        document = _with_keys_of_a_run(PlanDocument.load(self.job), self.given)
        plan = document.plan
        if self.profile:
            raise UsageError(f"--profile: {self.job} is a finished plan; give the job (.toml) to plan with profiles")
        if plan.job.data.packing is not None:
            raise UsageError(f"{self.job}: with data.packing every step is planned separately; give the job")
        self._check(plan.job, computes_here=computes_here)
        return document, {}

    def _plan_of_job(self, *, computes_here: bool) -> "tuple[PlanDocument, dict[str, Any]]":
        from farpipe.cli.planned import errors_of, load_profiles
        from farpipe.engine.launch.runs import chunk_settings, site_settings
        from farpipe.planning import find
        from farpipe.planning.explain import explained
        from farpipe.planning.explain.by_site import plans_by_site

        job = job_with(self.job, self.given)
        self._check(job, computes_here=computes_here)
        with status("planning" if job.data.packing is None else "planning the first batch"):
            profiles = load_profiles(job, self.profile or ())
            with errors_of(self.job):
                if (by_site := plans_by_site(job, profiles)) is not None:
                    typer.echo(f"planning for farpipe's engine: {by_site.verdict}", err=True)
                    return by_site.document, site_settings(by_site)
                job = self._within_engine(job) if job.data.packing is None else job
                found = find(job, profiles)[0]
            return explained(found), chunk_settings(job, found.chunk_costs)

    def _within_engine(self, job: "Job") -> "Job":
        """The job pinned to what the engine can run; a line says so, for `farpipe plan` doesn't pin it."""
        from farpipe.planning.planner.engine import within_engine

        runnable, note = within_engine(job)
        if note:
            typer.echo(f"planning for farpipe's engine: {note}", err=True)
        return runnable


def _with_keys_of_a_run(document: "PlanDocument", given: list[str] | None) -> "PlanDocument":
    """The plan with the keys of `--set` that a plan leaves open: those of [run], and another order."""
    from farpipe.core.spec import RunKeys
    from farpipe.planning import PlanDocument, reorder

    changed, plan, why = changes(given), document.plan, document.explanation
    method = changed.pop("schedule.method", None)
    if others := [key for key in changed if not key.startswith("run.")]:
        raise UsageError(
            f"--set {others[0]}: the plan has this decided; give the job (.toml), or only keys of [run] and "
            "schedule.method"
        )
    if changed:
        keys = {key.removeprefix("run."): value for key, value in changed.items()}
        run = validate(RunKeys, plan.job.run.model_dump() | keys, "--set", prefix="run")
        plan = plan.model_copy(update={"job": plan.job.model_copy(update={"run": run})})
    if method is not None:
        plan, why = reorder(plan, str(method)), why.of_another_order()
    return PlanDocument(plan=plan, explanation=why)


def show_planned(plan: "Plan", device: str, *, to_stderr: bool) -> None:
    """Print the plan's layout and step in two lines, and what it assumes that the engine does not do."""
    typer.echo("\n".join(str(plan).splitlines()[:2]), err=to_stderr)
    if device == "cuda":
        typer.echo(TCP_NOTE, err=to_stderr)
        if plan.job.model.is_of_transformers and plan.job.training.kernels == "fused":
            typer.echo(EAGER_NOTE, err=to_stderr)


def check_text(job: "Job", device: str) -> None:
    """Read and tokenize the text before anything is planned, so that no rank does it while the others wait.

    InputError where it can't be trained on, or where GPUs would train on the standard library unasked.
    """
    from farpipe.planning.documents.tokens import load_tokens, require_vocabulary

    if device == "sleep":
        return
    if job.data.source == "stdlib":
        _report_stdlib(job, device)
    if job.data.packing is not None:
        return  # to plan it, the documents are read before all else
    with status("reading the text"):
        require_vocabulary(load_tokens(job.data), job.model)


def _report_stdlib(job: "Job", device: str) -> None:
    if device == "cuda" and not _is_asked_for(job):
        raise InputError(
            'data.source: needed to train on GPUs: name the training text in the job, or say source = "stdlib" for '
            "the source code of Python's standard library as bytes"
        )
    typer.echo(STDLIB_NOTE, err=True)


def _is_asked_for(job: "Job") -> bool:
    """True if the job's file has the key."""
    data = parse_toml(job.text, "job").get("data") if job.text else None
    return isinstance(data, dict) and "source" in data
