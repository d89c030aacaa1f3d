"""Slurm at a site: one job for the site's share of an attempt, found again by its name."""

import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

from farpipe.core.document import Table
from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import write_text
from farpipe.service.share import Share, State

LIMIT_S: Final = 30.0
"""Time for an answer of Slurm's."""
SILENT: Final = ("Unable to contact", "timed out", "Connection refused", "try again")
"""Words of a controller that does not answer now."""
WAITING: Final = ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_FIELD: Final = re.compile(r"\b(JobState|Reason|ExitCode|NodeList)=(\S+)")


class Slurm(Table):
    """[sites.slurm]: what every job of a site is submitted with.

    The machines of a site are one job, whose name is the attempt's: a lost answer of sbatch's does no harm.
    """

    partition: str | None = None
    """Queue; None: the cluster's default."""
    account: str | None = None
    time_limit: str | None = None
    """As sbatch takes it, such as ``1-00:00:00``; three minutes before, the ranks write a checkpoint and leave."""
    with_gpus: bool = False
    """Ask for as many GPUs per machine as the plan uses there."""

    def start(self, shares: list[Share], num_devices: int) -> None:
        """Submit the job, unless there is one of its name; RunError with Slurm's words where that can't be done."""
        first = shares[0]
        if _known(first) is not None or self._find(first) is not None:
            return
        asked = {"partition": self.partition, "account": self.account, "time": self.time_limit}
        options = [f"--{name}={value}" for name, value in asked.items() if value is not None]
        if self.with_gpus:
            options.append(f"--gpus-per-node={num_devices}")
        ranks = (sys.executable, "-m", "farpipe.service.ranks", str(first.folder), first.site)
        script = shlex.join(("srun", "--kill-on-bad-exit=0", *ranks))
        said = self._submit(
            "--parsable",
            f"--job-name={first.label}",
            f"--nodes={len(shares)}",
            "--ntasks-per-node=1",
            "--no-requeue",
            "--dependency=singleton",  # of two with the name, the second waits, and finds that all is done
            "--signal=TERM@180",
            "--open-mode=append",
            f"--chdir={first.folder}",
            f"--output={first.path('out')}",
            *options,
            script=f"#!/bin/bash\nexec {script}\n",
        )
        write_text(first.path("job"), said.strip().partition(";")[0] + "\n")

    def _submit(self, *options: str, script: str) -> str:
        """What sbatch prints; InputError where Slurm refuses the job for good."""
        try:
            return _slurm("sbatch", *options, stdin=script)
        except RunError as error:
            if any(word in str(error) for word in SILENT):
                raise
            raise InputError(str(error)) from None

    def states(self, shares: list[Share]) -> list[tuple[State, str]]:
        """What Slurm says of the jobs; RunError where it says nothing."""
        queue = self._queue() if shares else []
        return [_state(share, queue) for share in shares]

    def kill(self, share: Share, *, only_waiting: bool) -> None:
        """Cancel the job if it waits, or whatever it does."""
        for number, name, state in self._queue():
            if name == share.label and (state in WAITING or not only_waiting):
                _slurm("scancel", number)

    def _find(self, share: Share) -> str | None:
        """Number of the job that an earlier start has submitted; it is noted."""
        for number, name, _ in self._queue():
            if name == share.label:
                write_text(share.path("job"), f"{number}\n")
                return number
        return None

    def _queue(self) -> list[tuple[str, str, str]]:
        """Number, name and state of farpipe's jobs."""
        lines = _slurm("squeue", "--noheader", "--me", "--format=%A|%j|%T").splitlines()
        rows = [line.strip().split("|") for line in lines]
        return [(row[0], row[1], row[2]) for row in rows if len(row) == 3 and row[1].startswith("farpipe-")]


def _state(share: Share, queue: list[tuple[str, str, str]]) -> tuple[State, str]:
    states = [state for _, name, state in queue if name == share.label]
    if states:
        return ("queued", "Slurm: " + states[0]) if all(one in WAITING for one in states) else ("alive", "")
    number = _known(share)
    return ("absent", "") if number is None else ("over", _last_words(number))


def _known(share: Share) -> str | None:
    with suppress(FileNotFoundError):
        return share.path("job").read_text().strip()
    return None


def _last_words(number: str) -> str:
    """How Slurm says that a job has ended; it forgets that after some minutes."""
    with suppress(RunError):
        fields = dict(_FIELD.findall(_slurm("scontrol", "show", "job", number)))
        return f"Slurm: job {number} {', '.join(f'{name}={value}' for name, value in fields.items())}"
    return f"Slurm: job {number} is gone"


def _slurm(*argv: str, stdin: str = "") -> str:
    """What a command of Slurm's prints; RunError with its words where it fails, or says nothing for `LIMIT_S`."""
    begin_s = time.monotonic()
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{argv[0]}: {error} after {time.monotonic() - begin_s:.0f} s") from None
    if done.returncode:
        raise RunError(f"{argv[0]}: {done.stderr.strip()[-500:] or f'exit code {done.returncode}'}")
    return done.stdout
