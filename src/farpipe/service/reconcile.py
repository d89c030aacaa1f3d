"""The loop of the service: the state says what is to be, launchers say what is, a pass makes them equal.

There is no list of orders that have to be carried out once: a start or a stop that was lost with the service is found
missing at the next pass, and one that is done twice does nothing twice.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from statistics import median
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.spec import Cluster
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, folder_of
from farpipe.engine.figures.metrics import METRICS_NAME, good_lines
from farpipe.fleet.events import (
    CheckpointStored,
    Event,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    StepReported,
)
from farpipe.fleet.job import JobState
from farpipe.fleet.state import FleetState
from farpipe.service.folder import JOB_NAME, RUN_NAME
from farpipe.service.launcher import Key, Launcher, Seen
from farpipe.service.order import ORDER_NAME, Order

NAME: Final = re.compile(JOB_NAME)
CHANGED: Final = 0.1
"""Share of a step's time by which it has to differ to be reported at once."""


class LeaseOverError(Exception):
    """The lease is over, and nothing may be started or stopped here."""


@dataclass
class Heard:
    """What was read of an attempt so far; it is read again after a restart, and old reports change nothing."""

    offset: int = 0
    num_steps: int = 0
    num_stored: int = 0
    reported_s: float = -math.inf
    """Time of the last report of its steps."""


@dataclass
class Reconciler:
    """Starts what the state wants and stops what it does not, and turns what is seen into events."""

    launcher: Launcher
    root: Path
    """Every attempt has its directory there: JOB/ATTEMPT."""
    cluster: Cluster
    documents: Mapping[str, str]
    """The job.toml of every job, by name."""
    leave_s: float = 60.0
    """Seconds in which a stopped attempt writes its checkpoint."""
    heard: dict[Key, Heard] = field(default_factory=dict)
    report_every_s: float = 0.0
    """Interval of step reports, unless a step has got slower or faster."""
    gone: set[Key] = field(default_factory=set)
    """Attempts that have ended and are not wanted: nobody looks at them again."""
    may_act: Callable[[], bool] = lambda: True
    """False for an instance that was away and has lost its lease meanwhile: another one may lead."""

    def step(self, state: FleetState, now_s: float) -> list[Event]:
        """One pass: what has happened since the last one, at `now_s`, to be handed to `FleetState.handle`."""
        wanted = {Key(job.name, job.attempt): job for job in state.jobs.values() if job.placement is not None}
        up = {name: site.is_up for name, site in state.sites.items()}
        events: list[Event] = [
            JobFailed(now_s, *key, f"its name {key.job!r} is no name of a directory", is_final=True)
            for key in wanted
            if not NAME.fullmatch(key.job)
        ]
        wanted = {key: job for key, job in wanted.items() if NAME.fullmatch(key.job)}
        seen = self.launcher.look({*wanted, *self._attempts()} - self.gone)
        is_clear = self._stop_unwanted({key: found for key, found in seen.items() if key not in wanted})
        for key, job in wanted.items():
            if seen[key].state == "absent" and job.phase == "starting":
                events += self._start(state, key, now_s) if is_clear else []
            else:
                events += self._events(job, key, seen[key], now_s)
        return [*events, *self.launcher.site_events(up, now_s)]

    def _stop_unwanted(self, seen: Mapping[Key, Seen]) -> bool:
        """Stop what the state does not want, and bar what has not begun yet; True if nothing of it is alive.

        Until then nothing starts: it would share devices with an attempt that the fleet has given up, one of a site
        that was lost and is back, say.
        """
        for key, found in seen.items():
            self.heard.pop(key, None)
            if found.state == "ended":
                self.gone.add(key)
            if found.state in ("alive", "absent"):
                self._stop(key)
        return not any(found.state == "alive" for found in seen.values())

    def _attempts(self) -> Iterator[Key]:
        """All attempts that have a directory."""
        for folder in self.root.glob("*/*/"):
            with suppress(ValueError):
                yield Key(folder.parent.name, int(folder.name))

    def folder(self, key: Key) -> Path:
        """The directory of an attempt."""
        return self.root / key.job / str(key.attempt)

    def _start(self, state: FleetState, key: Key, now_s: float) -> list[Event]:
        job, folder = state.jobs[key.job], self.folder(key)
        assert job.placement is not None
        try:
            order = Order.of(state, self.cluster, key.job, self.documents[key.job], self._checkpoint(job))
            folder.mkdir(parents=True, exist_ok=True)
            order.save(folder / ORDER_NAME)
            self._expect_lease()
            self.launcher.start(key, folder, dict(job.placement.devices))
        except (FarpipeError, OSError) as error:
            return [JobFailed(now_s, key.job, key.attempt, f"it can't be started: {error}")]
        return []

    def _stop(self, key: Key) -> None:
        self._expect_lease()
        self.launcher.stop(key, self.leave_s)

    def _expect_lease(self) -> None:
        if not self.may_act():
            raise LeaseOverError("the lease is over: another instance may lead")

    def _checkpoint(self, job: JobState) -> Path | None:
        """The checkpoint that the state wants the attempt to begin from; InputError if no attempt has it any more."""
        if not job.num_done:
            return None
        before = [Key(job.name, number) for number in range(job.attempt - 1, 0, -1)]
        for key, found in self.launcher.look(before).items():
            if job.num_done in found.stored:
                return folder_of(self.folder(key) / RUN_NAME / CHECKPOINTS_NAME, int(job.num_done))
        raise InputError(f"no attempt of {job.name!r} has a checkpoint of {job.num_done:g} steps")

    def _events(self, job: JobState, key: Key, found: Seen, now_s: float) -> Iterator[Event]:
        """Events of an attempt that has begun, in their order."""
        heard = self.heard.setdefault(key, Heard())
        if job.phase == "stopping":
            self._stop(key)
            found = self.launcher.look([key])[key]  # what was about to begin has begun, or is barred
        lines = self._new_lines(key, heard)
        stored = max(found.stored, default=0)
        if job.phase == "starting" and (heard.num_steps or found.exit_code == 0):
            yield JobStarted(now_s, *key)
        if lines and heard.num_steps:
            step_s = median(line["step_s"] for line in lines)
            if self._is_due(job, heard, step_s, now_s):
                heard.reported_s = now_s
                yield StepReported(now_s, *key, float(heard.num_steps), step_s)
        if stored > heard.num_stored and (heard.num_steps or job.phase != "starting"):
            assert job.placement is not None
            heard.num_stored = stored
            yield CheckpointStored(now_s, *key, job.placement.sites[0], float(stored))
        if found.state not in ("alive", "unknown"):
            yield self._end(job, key, found, now_s, float(max(stored, heard.num_stored)) or None)

    def _is_due(self, job: JobState, heard: Heard, step_s: float, now_s: float) -> bool:
        believed_s = job.placement.step_s if job.placement is not None else 0.0
        is_other = abs(step_s - believed_s) > CHANGED * believed_s
        return is_other or heard.num_steps >= job.job.num_steps or now_s >= heard.reported_s + self.report_every_s

    def _end(self, job: JobState, key: Key, found: Seen, now_s: float, num_steps: float | None) -> Event:
        if found.exit_code == 0:
            return JobEnded(now_s, *key)
        if job.phase == "stopping":
            return JobStopped(now_s, *key, num_steps)
        return JobFailed(now_s, *key, _reason(found), num_steps)

    def _new_lines(self, key: Key, heard: Heard) -> list[dict[str, Any]]:
        """Lines of metrics that came since the last look; a line that is not whole yet is left for the next."""
        data = self.launcher.read(key, f"{RUN_NAME}/{METRICS_NAME}", heard.offset)
        data = data[: data.rfind(b"\n") + 1]
        heard.offset += len(data)
        lines = [line for line in good_lines(data, Path(METRICS_NAME)) if "step" in line and "step_s" in line]
        heard.num_steps = max([heard.num_steps, *(int(line["step"]) + 1 for line in lines)])
        return lines


def _reason(found: Seen) -> str:
    """Words for an end that was not a good one."""
    if found.exit_code is None:
        why = f" ({found.why})" if found.why else ""
        return f"nothing of it runs any more, and it did not say how it ended{why}"
    code = found.exit_code
    end = f"exit code {code}" if code > 0 else f"ended by {Signals(-code).name}"
    return f"{end}: {found.why}" if found.why else end
