"""A run as files: which directory it gets, what may stand there already, what is put into it. Needs no torch.

Nothing of an earlier run is overwritten here, nor of anybody else: a new run refuses a directory with results, or with
anything where no run is, and a run that goes on is first held against the checkpoints that it finds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import remove_unfinished, write_text
from farpipe.core.units import counted
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.checkpoint.folders import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    SITES_NAME,
    checkpoint_folders,
    newest_of_run,
    run_around,
    site_folder,
)
from farpipe.engine.figures.metrics import (
    METRICS_NAME,
    PLAN_NAME,
    RUN_NAME,
    STEP_PLAN_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    last_line,
)

if TYPE_CHECKING:
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning import Explanation, Plan, PlanDocument

JOB_NAME: Final = "job.toml"
LOGS_NAME: Final = "logs"
WRITTEN: Final = (RUN_NAME, METRICS_NAME, SUMMARY_NAME, TIMELINE_NAME, STEP_PLAN_NAME, PLAN_NAME, JOB_NAME)
"""Files of a run in its directory, beside its checkpoints and logs."""
_HEAD_BYTES: Final = 200
DEFAULT_RUN_DIR: Final = Path("runs/last")


@dataclass(frozen=True)
class RunPlace:
    """Directory that a run goes to, and the one that it goes on from."""

    run_dir: Path
    resume: str | None = None
    """Another directory with the checkpoints to go on from."""
    in_place: bool = False
    """True if it goes on in the directory that it has."""

    def change_of(self, plan: "Plan") -> str:
        """Sentence on how `plan` differs from the plan of the run that is continued; empty where it does not."""
        from farpipe.planning import PlanDocument

        folder = self.run_dir if self.in_place else Path(self.resume or "")
        folder = run_around(folder) if (folder / MANIFEST_NAME).exists() else folder
        if not (self.in_place or self.resume) or not (folder / PLAN_NAME).is_file():
            return ""
        try:
            before = PlanDocument.load(folder / PLAN_NAME).plan
        except InputError:  # its checkpoints are what counts
            return ""
        if before.placements == plan.placements and before.schedule.method == plan.schedule.method:
            return ""
        then, now = (f"{one.where}: {one.degrees}, order {one.schedule.method}" for one in (before, plan))
        what = f"{now} (before: {then})" if then != now else "other layers on its stages"
        return f"{folder}: continued with another plan: {what}"


def choose_run_dir(run_dir: Path | None, resume: Path | None) -> RunPlace:
    """Choose the directories that ``--run-dir`` and ``--resume`` ask for.

    InputError when the directory has results of another run, or there is nothing to go on from; UsageError when the
    new directory has to be named.
    """
    is_checkpoint = resume is not None and (resume / MANIFEST_NAME).exists()
    if is_checkpoint and run_dir is None:
        raise UsageError("--resume with one checkpoint: give --run-dir another directory, for a run of its own")
    if resume is not None and not is_checkpoint and newest_of_run(resume) is None:
        raise InputError(
            f"no complete checkpoint in {resume / CHECKPOINTS_NAME}: so there is nothing to continue; start without "
            "--resume, in another directory"
        )
    place = run_dir or resume or DEFAULT_RUN_DIR
    if resume is not None and place.resolve() == resume.resolve():
        return RunPlace(place, in_place=True)
    refuse_results(place)
    return RunPlace(place, None if resume is None else str(resume.absolute()))


def open_run_dir(spec: "RunSpec", run_dir: Path, *, resume: bool, explanation: "Explanation | None" = None) -> None:
    """Put the run into a directory that is new, or that with `resume` has checkpoints to go on from: ``run.json`` and,
    where a planner made its plan, ``plan.json`` with the `explanation`, and the job.

    The caller holds the directory's lock. InputError when it has results, or none to go on from; then nothing is
    changed.
    """
    if resume:
        reopen(spec, run_dir)
    else:
        refuse_results(run_dir)
    for name in WRITTEN:
        remove_unfinished(run_dir / name)
    if not isinstance(spec.plan, BarePlan):
        from farpipe.planning import Explanation, PlanDocument

        write_inputs(PlanDocument(plan=spec.plan, explanation=explanation or Explanation()), run_dir)
    spec.save(run_dir / RUN_NAME)


def refuse_strangers(run_dir: Path) -> None:
    """InputError when `run_dir` has something in it and is no run: all that is there is somebody else's."""
    if not run_dir.is_dir() or _is_run(run_dir / RUN_NAME):
        return
    names = sorted(path.name for path in run_dir.iterdir())
    if found := [name for name in names if not name.startswith(".") and name != "lost+found"]:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise InputError(
            f"{run_dir}: is no run (there is no {RUN_NAME} of farpipe's), but has {shown}; choose another directory"
        )


def _is_run(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b'"farpipe/run/' in file.read(_HEAD_BYTES)
    except OSError:
        return False


def refuse_results(run_dir: Path) -> None:
    """InputError when `run_dir` has results or checkpoints of a run, whole or broken off, or is no run."""
    names = [name for name in (METRICS_NAME, SUMMARY_NAME, TIMELINE_NAME) if (run_dir / name).exists()]
    checkpoints = newest_of_run(run_dir)
    names += [CHECKPOINTS_NAME] if checkpoints else []
    if names:
        others = (
            "remove this one, or continue with --resume {}" if checkpoints else "or remove {}: it has no checkpoint"
        )
        raise InputError(
            f"{run_dir}: has the {names[0]} of an earlier run; choose another directory, {others.format(run_dir)}"
        )
    refuse_strangers(run_dir)


def reopen(spec: "RunSpec", run_dir: Path) -> None:
    """Prepare a run directory for more steps.

    InputError when there are none to do, or its checkpoints are damaged or of another training or text; then nothing is
    changed.
    """
    last = last_line(run_dir / METRICS_NAME)
    if last is not None and last["step"] + 1 >= spec.num_steps and (run_dir / SUMMARY_NAME).exists():
        done = last["step"] + 1
        beyond = "" if done == spec.num_steps else f", and {spec.num_steps} were asked for"
        raise InputError(f"{run_dir}: its {counted(done, 'step')} are done{beyond}; ask for more with --steps")
    _check_same_training(spec, run_dir)
    for folder in (run_dir, *run_dir.glob(f"{SITES_NAME}/*")):
        for name in (SUMMARY_NAME, TIMELINE_NAME):
            (folder / name).unlink(missing_ok=True)


def _check_same_training(spec: "RunSpec", run_dir: Path) -> None:
    """InputError when the newest good checkpoint is of another training, or all are damaged.

    The ranks check all that they read, and tell which ones they have skipped.
    """
    if newest_of_run(run_dir) is None:
        return
    from farpipe.engine.checkpoint.manifest import all_done, check_same, find_manifests, no_usable
    from farpipe.engine.run_text import digest_of_text

    every = [find_manifests(place) for place in checkpoint_folders(run_dir)]
    found = {step: item for one, _ in every for step, item in one.items()}
    damaged = {step: reason for _, one in every for step, reason in one.items()}
    if not found:
        raise no_usable([*damaged.values()])
    folder, manifest = found[max(found)]
    check_same(spec, manifest, folder, digest_of_text(spec).hex())
    has_lines = last_line(run_dir / METRICS_NAME) is not None
    if max(found) >= spec.num_steps + has_lines:  # of all steps: only their summary is missing
        raise all_done(folder.parent, max(found), spec.num_steps)


def missing_sites(sites: Iterable[str], run_dir: Path) -> list[str]:
    """Those of `sites` whose folders in the run directory are gone, and so their disks."""
    return [site for site in sites if not site_folder(run_dir, site).is_dir()]


def make_site_folders(spec: "RunSpec", run_dir: Path) -> None:
    """Make the folders of the sites of a run that keeps checkpoints by site."""
    for site in spec.places.sites if spec.is_mirrored else ():
        site_folder(run_dir, site).mkdir(parents=True, exist_ok=True)


def write_inputs(document: "PlanDocument", run_dir: Path) -> None:
    """Put the plan, and the job as the user wrote it, into a run directory."""
    document.save(run_dir / PLAN_NAME)
    if document.plan.job.text:
        write_text(run_dir / JOB_NAME, document.plan.job.text)


def next_log_dir(run_dir: Path) -> Path:
    """Folder for the logs of the next start: ``logs``, then ``logs/restart-1`` and so on; none is written over."""
    logs, number = run_dir / LOGS_NAME, 1
    if not any(logs.glob("rank-*.log")):
        return logs
    while (logs / f"restart-{number}").exists():
        number += 1
    return logs / f"restart-{number}"


def newest_logs(run_dir: Path) -> list[Path]:
    """The logs of the ranks of the newest start, the one that was written first being first."""
    logs = run_dir / LOGS_NAME
    folders: Sequence[Path] = [logs, *logs.glob("restart-*")]
    found = [log for folder in folders for log in folder.glob("rank-*.log")]
    newest = max((log.stat().st_mtime for log in found), default=0.0)
    folder = next((log.parent for log in found if log.stat().st_mtime == newest), logs)
    return sorted(folder.glob("rank-*.log"), key=lambda log: log.stat().st_mtime)


def how_it_ended(run_dir: Path, num_steps: int) -> str:
    """Progress of a run without an end, and the last line of each of its logs, the earliest first."""
    lines = [
        (log, log.read_text(encoding="utf-8", errors="replace").strip().splitlines()) for log in newest_logs(run_dir)
    ]
    said = [f"\n  {log}: {text[-1][:500]}" for log, text in lines if text]
    last = " Last line of each rank's log:" + "".join(said) if said else ""
    return f"{run_dir}: not a whole run: {num_steps} steps are recorded.{last}"


def what_is_left(run_dir: Path) -> str:
    """Progress of a run that was interrupted, and the command to go on, as "Interrupted" is followed by."""
    made_anew = (
        any(place.exists() for place in checkpoint_folders(run_dir)) and not (run_dir / RUN_NAME).exists()
    )  # by who wrote the next
    if made_anew or not run_dir.exists():
        return f"while {run_dir} was removed or renamed; what it had is where it was moved to"
    last = last_line(run_dir / METRICS_NAME)
    at = "before the first step" if last is None else f"at step {last['step'] + 1}"
    newest = newest_of_run(run_dir)
    if newest is None:
        return f"{at}. No checkpoint was written"
    return f"{at}. Newest checkpoint: {newest}; continue with --resume {run_dir}"
