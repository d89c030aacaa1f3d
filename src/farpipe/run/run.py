"""Run a RunSpec on this machine: start the ranks, follow their progress, hand back the summary. Needs no torch."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from farpipe.emulate import Namespace, Wan
from farpipe.errors import DivergedError, InfeasibleError, InputError, RunError
from farpipe.run.launch import launch
from farpipe.runtime.checkpoint.folders import CHECKPOINTS_NAME, folder_of, whole_checkpoints
from farpipe.runtime.figures.metrics import METRICS_NAME, RUN_NAME, SUMMARY_NAME, TIMELINE_NAME, Summary, last_line
from farpipe.runtime.lock import only_run
from farpipe.runtime.run_spec import RunSpec
from farpipe.units import format_bytes

LOGS_NAME: Final = "logs"
RANK_PROGRAM: Final = ("-m", "farpipe.run.rank_main")
_MEMINFO: Final = Path("/proc/meminfo")
LEAVE_S: Final = 600.0
"""Time for the ranks to write a checkpoint and leave after SIGTERM, as long as they would wait for one themselves."""


def run(
    spec: RunSpec,
    run_dir: Path | str,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    master_port: int = 0,
    wan: Wan | None = None,
    allow_plaintext: bool = False,
    resume: bool = False,
    max_restarts: int = 0,
    on_restart: Callable[[str], None] | None = None,
    rank_program: Sequence[str] = RANK_PROGRAM,
) -> Summary:
    """Run `spec` with one process per rank; results go to `run_dir`, what the ranks print to its ``logs``.

    `on_step` gets every line of ``metrics.jsonl`` soon after it was written. With a `wan` each rank runs in the
    namespace of its site, and `spec` should not emulate links a second time; as between real sites all goes through
    TLS, with certificates of its own that are gone after the run, unless `allow_plaintext`. With `resume` the run that
    `run_dir` has goes on from its newest checkpoint. When the run breaks, it is started again up to `max_restarts`
    times, from its newest checkpoint or else from the beginning; `on_restart` gets the reason. `rank_program` is what
    the ranks run, with the run directory behind it.

    SIGTERM is passed on to the ranks: they write a checkpoint and leave, and RunStoppedError says so. Raises InputError
    when `run_dir` has results already, the port is taken or the data don't do, DivergedError when the training
    diverges, InfeasibleError when the machine has no memory for the weights alone, RunError when a rank is lost or the
    disk is full; then nothing is left running, and without a ``summary.json`` nobody takes what there is for a whole
    run.
    """
    run_dir = Path(run_dir)
    _check_room(spec)
    if resume:
        reopen(spec, run_dir)
    else:
        refuse_results(run_dir)
    spec.save(run_dir / RUN_NAME)
    follower = _Follower(run_dir / METRICS_NAME, on_step)
    command = [sys.executable, *rank_program, str(run_dir)]
    places = [_namespace(wan, spec.places.site(rank)) for rank in range(spec.num_ranks)] if wan else None
    with _security(wan, allow_plaintext) as security:

        def argv_for_rank(rank: int) -> list[str]:
            return [*command, "--host", places[rank].address, *security] if places else command

        for restart in range(max_restarts + 1):
            try:
                launch(
                    argv_for_rank,
                    spec.num_ranks,
                    log_dir=run_dir / LOGS_NAME / (f"restart-{restart}" if restart else ""),
                    master_port=master_port,
                    namespaces=places,
                    on_tick=follower.read,
                    leave_s=LEAVE_S,
                )
                break
            except RunError as error:
                is_over = isinstance(error, DivergedError) or (run_dir / SUMMARY_NAME).exists()
                if is_over or restart == max_restarts:
                    raise
                follower.read()
                if on_restart is not None:
                    on_restart(str(error))
    follower.read()
    return Summary.load(run_dir / SUMMARY_NAME)


def _check_room(spec: RunSpec) -> None:
    """InfeasibleError when what all ranks hold for certain is more than this machine has free."""
    if spec.device == "cuda" or not _MEMINFO.exists():  # GPUs have memory of their own
        return
    if spec.device == "sleep":
        what, needed_bytes = "the gradients that replicas exchange", _least_exchanged_bytes(spec)
        remedy = "rehearse a plan with fewer replicas, or a smaller model"
    else:
        what = "weights, gradients and optimizers"
        needed_bytes = spec.num_replicas * sum(rank.static_bytes for rank in spec.problem.ranks)
        remedy = (
            "train a smaller model, rehearse this one with --device sleep, or let --prepare write what torchrun needs "
            "to start it at its sites"
        )
    free_bytes = next(
        int(line.split()[1]) * 1024 for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")
    )
    if needed_bytes > free_bytes:
        raise InfeasibleError(
            f"all {spec.num_ranks} ranks on this machine: {what} take {format_bytes(needed_bytes)}, and "
            f"{format_bytes(free_bytes)} are free; {remedy}"
        )


def _least_exchanged_bytes(spec: RunSpec) -> float:
    """What a rehearsal's collectives hold at least: a ring sends a tensor once or twice, and every process has one."""
    if spec.num_replicas == 1 or spec.problem.sync is None:
        return 0.0
    transfers = [t for sync in spec.problem.sync if sync for t in (sync.gather, sync.reduce) if t is not None]
    return spec.num_replicas * sum(float(spec.problem.row(transfer.bytes).max()) for transfer in transfers) / 2


@contextmanager
def _security(wan: Wan | None, allow_plaintext: bool) -> Iterator[list[str]]:
    """What the ranks are told about TLS. Their certificates last as long as the context, or the WAN after kill -9."""
    if allow_plaintext or wan is None:
        yield ["--allow-plaintext"]
        return
    from farpipe.transport.security.authority import make_throwaway

    with tempfile.TemporaryDirectory(prefix="certs-", dir=wan.folder) as folder:
        try:
            make_throwaway(Path(folder), wan.sites)
        except InputError as error:
            raise InputError(f"{error}; or, with --allow-plaintext, this run does without") from None
        yield ["--certs", folder]


def reopen(spec: RunSpec, run_dir: Path) -> None:
    """Prepare a run directory for more steps.

    InputError when there are none to do, its checkpoints are of another training or text, or a run is at work in it;
    then nothing is changed.
    """
    last = last_line(run_dir / METRICS_NAME)
    if last is not None and last["step"] + 1 >= spec.num_steps and (run_dir / SUMMARY_NAME).exists():
        raise InputError(f"{run_dir}: all {spec.num_steps} steps are done; ask for more with --steps")
    _check_same_training(spec, run_dir / CHECKPOINTS_NAME)
    with only_run(run_dir):
        for name in (SUMMARY_NAME, TIMELINE_NAME):
            (run_dir / name).unlink(missing_ok=True)


def _check_same_training(spec: RunSpec, checkpoints: Path) -> None:
    """InputError when the newest checkpoint is of another training; the ranks check all that they read."""
    steps = whole_checkpoints(checkpoints)
    if not steps:
        return
    from farpipe.runtime.checkpoint.files import Manifest  # this, and not a rehearsal, needs torch
    from farpipe.runtime.checkpoint.resume import all_done, check_same
    from farpipe.runtime.work import batches_of

    folder = folder_of(checkpoints, steps[0])
    try:
        manifest = Manifest.load(folder)
    except InputError:  # a damaged one is passed over by the ranks, with a warning
        return
    check_same(spec, manifest, folder, batches_of(spec).digest.hex())
    if min(steps) >= spec.num_steps:
        raise all_done(checkpoints, steps[0], spec.num_steps)


def _namespace(wan: Wan, site: str) -> Namespace:
    """Where the ranks of `site` run; InputError when the WAN is of other sites."""
    if site not in wan.namespaces:
        raise InputError(
            f"the WAN {wan.name!r} has no site {site!r}, only {', '.join(wan.sites)}; take it down with "
            "`farpipe wan down`, or bring up one for this job"
        )
    return wan.namespaces[site]


def refuse_results(run_dir: Path) -> None:
    """InputError when `run_dir` has results of a run, whole or broken off."""
    for name in (METRICS_NAME, SUMMARY_NAME, TIMELINE_NAME):
        if (run_dir / name).exists():
            raise InputError(
                f"{run_dir}: has the {name} of an earlier run; choose another directory or remove this one"
            )


class _Follower:
    """Reads ``metrics.jsonl`` as it grows; steps that are done again after a restart are not told again."""

    def __init__(self, path: Path, on_step: Callable[[dict[str, Any]], None] | None) -> None:
        self._path, self._on_step = path, on_step
        self._file_number, self._position, self._last_step = -1, 0, -1

    def read(self) -> None:
        """Pass on the lines that have been completed since the last call."""
        if self._on_step is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._file_number:  # a restart has written it anew
                self._file_number, self._position = number, 0
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for text in whole.splitlines():
            line = json.loads(text)
            if line["step"] > self._last_step:
                self._last_step = line["step"]
                self._on_step(line)
