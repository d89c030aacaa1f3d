"""Rows of the database that follow from one decision of the core."""

from collections.abc import Iterable, Mapping, Sequence

from farpipe.fleet.documents import Entry
from farpipe.fleet.events import Command, Event, Migrate, Resize, Start, Tick
from farpipe.fleet.state import FleetState
from farpipe.service.launcher import Key
from farpipe.service.reconcile import Heard
from farpipe.service.store import Change, Row
from farpipe.service.views import ended_view


def is_idle(before: FleetState, events: Sequence[Event], after: FleetState, commands: Sequence[Command]) -> bool:
    """True if nothing has come of it, but that time has passed or all was refused: there is nothing to write."""
    told = (event for event, why in zip(events, after.verdicts, strict=True) if not why)
    unchanged = not commands and after.jobs is before.jobs
    return unchanged and not after.closed and all(isinstance(event, Tick) for event in told)


def change_of(
    before: FleetState,
    events: Sequence[Event],
    after: FleetState,
    commands: Sequence[Command],
    jobs: Iterable[Row] = (),
    who: str = "",
) -> Change:
    """What is written of ``after, commands = before.handle(*events)``.

    `jobs`: rows of those that were submitted; `who`: who asked for what.
    """
    change = Change(after.now_s, who, Entry.of(before, events, after, commands).to_line())
    change.jobs = [row for row in jobs if row["name"] in after.jobs]
    reasons = {one.name: (one.what, one.why) for one in after.done if one.phase is None}
    for job in after.closed:
        what, why = reasons[job.name]
        view = ended_view(after, job, what, why or job.last_failure).model_dump_json()
        change.closed.append({"job": job.name, "ended_s": after.now_s, "view": view})
    change.begun = [_begun(after, command) for command in commands if isinstance(command, Start | Resize | Migrate)]
    change.over = [*_over(before, after)]
    return change


def _begun(after: FleetState, command: Start | Resize | Migrate) -> Row:
    row = {"job": command.name, "attempt": command.attempt, "place": command.placement.where}
    return {**row, "began_s": after.now_s, "offset": 0, "num_steps": 0, "num_stored": 0}


def _over(before: FleetState, after: FleetState) -> Iterable[Row]:
    """Rows of the attempts that held devices and do not any more, and of those that begin to stop, with the reason."""
    words = {one.name: (one.what, one.why) for one in after.done if one.what not in ("run", "start", "submit")}
    for job in before.jobs.values():
        if job.placement is None:
            continue
        now, (result, why) = after.jobs.get(job.name), words.get(job.name, ("stopped", ""))
        row: Row = {"job": job.name, "attempt": job.attempt} | ({"why": why} if why else {})
        if now is None or now.placement is None or now.attempt != job.attempt:
            yield row | {"ended_s": after.now_s, "result": result}
        elif why and now.phase == "stopping" != job.phase:
            yield row


def heard_rows(heard: Mapping[Key, Heard], keys: Iterable[Key]) -> list[Row]:
    """How far the attempts `keys` were heard."""
    found = {key: heard[key] for key in keys if key in heard}
    names = ("offset", "num_steps", "num_stored")
    return [{**key._asdict(), **{name: getattr(one, name) for name in names}} for key, one in found.items()]


def heard_of(rows: Iterable[Row]) -> dict[Key, Heard]:
    """The inverse, of rows of `ATTEMPTS`."""
    return {Key(row["job"], row["attempt"]): Heard(row["offset"], row["num_steps"], row["num_stored"]) for row in rows}
