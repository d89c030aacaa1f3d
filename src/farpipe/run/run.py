"""Run a RunSpec on this machine: start the ranks, follow their progress, hand back the summary. Needs no torch."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from farpipe.emulate import Namespace, Wan
from farpipe.errors import DivergedError, InputError, RunError
from farpipe.run.directory import next_log_dir, open_run_dir
from farpipe.run.follow import Follower
from farpipe.run.host_memory import expect_memory
from farpipe.run.launch import launch
from farpipe.runtime.figures.metrics import METRICS_NAME, SUMMARY_NAME, Summary
from farpipe.runtime.run_spec import RunSpec

RANK_PROGRAM: Final = ("-m", "farpipe.run.rank_main")
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
    is_open: bool = False,
    max_restarts: int = 0,
    on_restart: Callable[[str], None] | None = None,
    rank_program: Sequence[str] = RANK_PROGRAM,
) -> Summary:
    """Run `spec` with one process per rank; results go to `run_dir`, what the ranks print to its ``logs``.

    `on_step` gets every line of ``metrics.jsonl`` soon after it was written. With a `wan` each rank runs in the
    namespace of its site, and `spec` should not emulate links a second time; its links change as `link_changes` say,
    soon after the step before them has ended. As between real sites all goes through
    TLS, with certificates of its own that are gone after the run, unless `allow_plaintext`. With `resume` the run that
    `run_dir` has goes on from its newest checkpoint; with `is_open`, `open_run_dir` has been called already. When the
    run breaks, it is started again up to `max_restarts` times, from its newest checkpoint or else from the beginning;
    `on_restart` gets the reason. `rank_program` is what the ranks run, with the run directory behind it.

    SIGTERM is passed on to the ranks: they write a checkpoint and leave, and RunStoppedError says so. Raises InputError
    when `run_dir` has results already, the port is taken or the data don't do, DivergedError when the training
    diverges, InfeasibleError when the machine has no memory for the weights alone, RunError when a rank is lost or the
    disk is full; then nothing is left running, and without a ``summary.json`` nobody takes what there is for a whole
    run.
    """
    run_dir = Path(run_dir)
    expect_memory(spec)
    if not is_open:
        open_run_dir(spec, run_dir, resume=resume)
    follower = Follower(run_dir / METRICS_NAME, changing_links(spec, wan, on_step))
    command = [sys.executable, *rank_program, str(run_dir)]
    places = [_namespace(wan, spec.places.site(rank)) for rank in range(spec.num_processes)] if wan else None
    with _security(wan, allow_plaintext) as security:

        def argv_for_rank(rank: int) -> list[str]:
            return [*command, "--host", places[rank].address, *security] if places else command

        for restart in range(max_restarts + 1):
            try:
                launch(
                    argv_for_rank,
                    spec.num_processes,
                    log_dir=next_log_dir(run_dir),
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
    from farpipe.transport.security.authority import make_throwaway

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
