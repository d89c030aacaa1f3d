"""Run a RunSpec on this machine: start the ranks, follow their progress, hand back the summary. Needs no torch."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import DivergedError, FarpipeError, InputError, RunError, RunInterruptedError, RunStoppedError
from farpipe.engine.checkpoint.folders import newest_of_run, site_folder
from farpipe.engine.figures.follower import Follower
from farpipe.engine.figures.metrics import METRICS_NAME, SUMMARY_NAME, Summary
from farpipe.engine.launch.directory import (
    make_site_folders,
    missing_sites,
    next_log_dir,
    open_run_dir,
    refuse_results,
    what_is_left,
)
from farpipe.engine.launch.host_memory import expect_memory
from farpipe.engine.launch.launcher import RANK_PROGRAM, launch
from farpipe.engine.links import Namespace, Wan
from farpipe.engine.lock import LOCK_VARIABLE, RUN_SHA256_VARIABLE, digest_of, only_run
from farpipe.engine.outer.record import Record
from farpipe.engine.outer.run_sites import run_sites
from farpipe.engine.outer.sites import sites_of
from farpipe.engine.processes import LeaveRequest, interrupt, leave_request
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Explanation

LEAVE_S: Final = 600.0
"""Time, in seconds, for the ranks to write a checkpoint and leave; they wait as long for one themselves."""


class LostSiteError(RunError):
    """The processes of a site have ended, and its folder in the run directory is gone."""


def run(
    spec: RunSpec,
    run_dir: Path | str,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    master_port: int = 0,
    wan: Wan | None = None,
    allow_plaintext: bool = False,
    resume: bool = False,
    explanation: Explanation | None = None,
    lock: int | None = None,
    max_restarts: int = 0,
    on_restart: Callable[[str], None] | None = None,
    on_notice: Callable[[str], None] = lambda text: None,
    rank_program: Sequence[str] = RANK_PROGRAM,
    leave_when: Callable[[], bool] = lambda: False,
) -> Summary:
    """Run `spec` with one process per rank; results go to `run_dir`, what the ranks print to its ``logs``.

    `on_step` gets every line of ``metrics.jsonl`` soon after it was written. With a `wan` each rank runs in the
    namespace of its site, and `spec` should not emulate links a second time; its links change as `link_changes` say,
    soon after the step before them has ended. As between real sites, everything goes through TLS, with certificates
    that are deleted after the run, unless `allow_plaintext`. With `resume` the run in `run_dir` continues from its
    newest checkpoint. With `lock`, the descriptor of `only_run`, the caller holds the directory. The `explanation` of
    the plan is kept in ``plan.json``. A run that breaks is started again up to `max_restarts` times, from its newest
    checkpoint or else from the beginning; `on_restart` gets the reason. `on_notice` hears of ranks that did not end by
    themselves when their work was done. `rank_program` is what the ranks run, followed by the run directory.
    When `leave_when` says so, the ranks are asked to leave as by SIGTERM; runs by site do not ask it.

    SIGTERM and SIGHUP are passed on to the ranks: they write a checkpoint and leave, and RunStoppedError says so;
    RunInterruptedError where there is no checkpoint. Raises InputError when `run_dir` has results already, another run
    is at work in it, the port is taken or the data don't do, DivergedError when the training diverges,
    InfeasibleError when the machine has no memory for the weights alone, RunError when a rank is lost or the disk is
    full; then nothing is left running, and the missing ``summary.json`` shows that the run is not complete.
    """
    run_dir = Path(run_dir)
    expect_memory(spec)
    with ExitStack() as stack:
        if lock is None:
            if not resume:
                refuse_results(run_dir)  # before a lock is put there
            lock = stack.enter_context(only_run(run_dir, make=True))
        open_run_dir(spec, run_dir, resume=resume, explanation=explanation)
        make_site_folders(spec, run_dir)
        if spec.runs_by_site:
            return _run_sites(spec, run_dir, on_step, on_notice, wan, allow_plaintext, rank_program, stack)
        follower = Follower(run_dir / METRICS_NAME, changing_links(spec, wan, on_step))
        places = [_namespace(wan, spec.places.site(rank)) for rank in range(spec.num_processes)] if wan else None
        command = [sys.executable, *rank_program, str(run_dir)]
        security = stack.enter_context(_security(wan, allow_plaintext))
        request = stack.enter_context(leave_request(interrupt))
        attempt = partial(
            launch,
            lambda rank: [*command, "--host", places[rank].address, *security] if places else command,
            spec.num_processes,
            master_port=master_port,
            namespaces=places,
            on_tick=partial(_tick, follower, request, leave_when),
            on_notice=on_notice,
            request=request,
            leave_s=LEAVE_S,
            fds_of_rank_0=[lock],
        )
        for restart in range(max_restarts + 1):
            is_last = restart == max_restarts
            reason = _reason_to_restart(attempt, spec, run_dir, lock, wan, request, is_last=is_last)
            follower.read()
            if reason is None:
                break
            if on_restart is not None:
                on_restart(reason)
    return Summary.load(run_dir / SUMMARY_NAME)


def _tick(follower: Follower, request: LeaveRequest, leave_when: Callable[[], bool]) -> None:
    """What is due while the ranks run."""
    follower.read()
    if not request and leave_when():
        request.time_s = time.monotonic()


def _expect_sites(spec: RunSpec, run_dir: Path, error: object) -> None:
    """LostSiteError when the disk of a site is gone: to start its ranks again would be another site."""
    lost = missing_sites(spec.places.sites, run_dir) if spec.is_mirrored else []
    if lost:
        folders = ", ".join(str(site_folder(run_dir, site)) for site in lost)
        raise LostSiteError(f"lost: {', '.join(lost)} ({folders} is gone)\n{error}") from None


def _run_sites(
    spec: RunSpec,
    run_dir: Path,
    on_step: Callable[[dict[str, Any]], None] | None,
    on_notice: Callable[[str], None],
    wan: Wan | None,
    allow_plaintext: bool,
    rank_program: Sequence[str],
    stack: ExitStack,
) -> Summary:
    """Run every site by itself, and put their figures together; the timeline is of the plan's site before others."""
    sites = sorted(sites_of(spec), key=lambda site: site != spec.places.sites[0])
    record = stack.enter_context(closing(Record(run_dir, sites, on_step, None if spec.local_steps else on_notice)))
    run_sites(
        spec,
        run_dir,
        on_tick=record.read,
        on_notice=on_notice,
        request=stack.enter_context(leave_request(interrupt)),
        leave_s=LEAVE_S,
        namespaces=wan.namespaces if wan else None,
        options=stack.enter_context(_security(wan, allow_plaintext)),
        rank_program=rank_program,
    )
    return record.finish()


def _reason_to_restart(
    attempt: Callable[..., object],
    spec: RunSpec,
    run_dir: Path,
    lock: int,
    wan: Wan | None,
    request: LeaveRequest,
    *,
    is_last: bool,
) -> str | None:
    """Run one attempt; the reason for another one, or None when the run is whole.

    Raises what ends the run: any error of the last attempt or that another attempt would not mend, and after a request
    to leave what is left of the run.
    """
    environment = {LOCK_VARIABLE: str(lock), RUN_SHA256_VARIABLE: digest_of(run_dir)}
    try:
        attempt(log_dir=next_log_dir(run_dir), env=environment)
    except RunError as error:
        if isinstance(error, DivergedError):
            raise
        if request:
            if (run_dir / SUMMARY_NAME).exists():  # the request came after the last step
                return None
            raise _left(run_dir, error) from None
        if wan is not None:
            Wan.find(wan.name)  # ranks that are lost because the WAN has ended: its own error says so
        _expect_sites(spec, run_dir, error)
        if is_last or (run_dir / SUMMARY_NAME).exists():
            raise
        return str(error)
    return None


def _left(run_dir: Path, error: RunError) -> FarpipeError:
    """Error of a run that was asked to leave and broke before its ranks had left."""
    kind = RunStoppedError if newest_of_run(run_dir) else RunInterruptedError
    return kind(f"stopped by SIGTERM or SIGHUP {what_is_left(run_dir)}. The ranks broke before they had left: {error}")


def changing_links(
    spec: RunSpec, wan: Wan | None, on_step: Callable[[dict[str, Any]], None] | None
) -> Callable[[dict[str, Any]], None] | None:
    """`on_step`, after the WAN's links have become those of the step that follows."""
    if wan is None or not spec.link_changes:
        return on_step

    def change(line: dict[str, Any]) -> None:
        for link in spec.link_changes:
            if link.step == line["step"] + 1:
                wan.set(link.link, latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)
        if on_step is not None:
            on_step(line)

    return change


@contextmanager
def _security(wan: Wan | None, allow_plaintext: bool) -> Iterator[list[str]]:
    """Options of the ranks on TLS. Their certificates last as long as the context, or the WAN after kill -9."""
    if allow_plaintext or wan is None:
        yield ["--allow-plaintext"]
        return
    from farpipe.engine.transport.security.authority import make_throwaway

    with tempfile.TemporaryDirectory(prefix="certs-", dir=wan.folder) as folder:
        try:
            make_throwaway(Path(folder), wan.sites)
        except InputError as error:
            raise InputError(f"{error}; or, with --allow-plaintext, this run does without") from None
        yield ["--certs", folder]


def _namespace(wan: Wan, site: str) -> Namespace:
    """Network namespace of the ranks of `site`; InputError if the WAN is of other sites."""
    if site not in wan.namespaces:
        raise InputError(
            f"the WAN {wan.name!r} has no site {site!r}, only {', '.join(wan.sites)}; take it down with "
            "`farpipe wan down`, or bring up one for this job"
        )
    return wan.namespaces[site]
