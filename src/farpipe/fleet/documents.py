"""Documents of a fleet: events, commands and states as JSON, and a log from which a state is restored.

The log holds, for every call of `FleetState.handle`, the events, the commands decided on and what has changed, so that
restoring asks neither the policy nor the planner, whose answers may differ in another version.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from farpipe.core.errors import InputError
from farpipe.core.strict import expect_format, key_path, nearest, parse_json
from farpipe.fleet import events
from farpipe.fleet.events import Command, Event
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import Quotes, StopCosts
from farpipe.fleet.snapshot import EndedJob, World
from farpipe.fleet.state import FleetState

EVENT: Final = "farpipe/fleet-event/2"
COMMAND: Final = "farpipe/fleet-command/1"
STATE: Final = "farpipe/fleet-state/2"
ENTRY: Final = "farpipe/fleet-log/2"
_SNAPSHOT: Final = f'{{"format": "{STATE}"'

T = TypeVar("T")
Data = dict[str, Any]


def event_data(event: Event) -> Data:
    """The event as JSON: its name under ``event``, then its fields."""
    return {"format": EVENT, "event": type(event).__name__, **_plain(event)}


def event_of(data: Any, source: str = "event") -> Event:
    """The inverse of `event_data`; InputError names the place of what is wrong."""
    return _named(Event, data, EVENT, "event", source)


def command_data(command: Command) -> Data:
    """The command as JSON: its name under ``command``, then its fields."""
    return {"format": COMMAND, "command": type(command).__name__, **_plain(command)}


def command_of(data: Any, source: str = "command") -> Command:
    """The inverse of `command_data`; InputError names the place of what is wrong."""
    return _named(Command, data, COMMAND, "command", source)


_MAPPINGS: Final = ("sites", "rates", "tariffs", "jobs", "meters")
_WHOLE: Final = ("now_s", "decided_s", "closed", "refusals")


def state_data(state: FleetState) -> Data:
    """The state as JSON, jobs in order of submission; policy and quotes are objects of the process and stay outside."""
    whole = {name: _plain(getattr(state, name)) for name in (*_WHOLE, *_MAPPINGS)}
    prices = {"egress_usd_per_gb": dict(state.world.egress_usd_per_gb), "stops": _plain(state.world.stops)}
    return {"format": STATE, **whole, "ended": _plain(state.ended), **prices}


def state_of(data: Any, policy: Policy, quotes: Quotes, source: str = "state") -> FleetState:
    """The inverse of `state_data`, which goes on under `policy` with `quotes`; InputError names what is wrong."""
    body = expect_format(data, STATE, source)
    known = {name: _field(name) for name in (*_WHOLE, *_MAPPINGS, "ended")}
    known |= {"egress_usd_per_gb": dict[str, float], "stops": StopCosts}
    _expect_keys(body, known, source, whole=True)
    found = {name: _read(kind, body[name], f"{source}: {name}") for name, kind in known.items()}
    world = World(quotes, found.pop("stops"), found.pop("egress_usd_per_gb"))
    return FleetState(world=world, policy=policy, **found)


@dataclass(frozen=True)
class Entry:
    """One call of `FleetState.handle`: what happened (not what was refused), what was decided, what has changed."""

    events: tuple[Event, ...]
    commands: tuple[Command, ...]
    change: Data
    """Fields of the state document that differ; in its mappings the entries that do, None: it is not there any more."""

    @classmethod
    def of(cls, before: FleetState, events: Iterable[Event], after: FleetState, commands: Iterable[Command]) -> "Entry":
        """The entry of ``after, commands = before.handle(*events)``."""
        change: Data = {name: _plain(getattr(after, name)) for name in _WHOLE}
        for name in _MAPPINGS:
            if different := _difference(getattr(before, name), getattr(after, name)):
                change[name] = different
        gone = [one.name for one in after.done if one.phase is None and one.name in after.ended]
        if gone:
            change["ended"] = _plain([after.ended.get(name) for name in gone])
        happened = (event for event, why in zip(events, after.verdicts, strict=True) if not why)
        return cls(tuple(happened), tuple(commands), change)

    def to_line(self) -> str:
        """A line of the log, with its end."""
        happened, ordered = [event_data(e) for e in self.events], [command_data(c) for c in self.commands]
        body = {"format": ENTRY, "events": happened, "commands": ordered, "change": self.change}
        return json.dumps(body, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str, source: str = "log") -> "Entry":
        """The inverse of `to_line`; InputError names what is wrong."""
        body = expect_format(parse_json(line, source), ENTRY, source)
        _expect_keys(body, ("events", "commands", "change"), source, whole=True)
        for name, kind in (("events", list), ("commands", list), ("change", dict)):
            if not isinstance(body[name], kind):
                raise InputError(f"{source}: {name}: expected a {kind.__name__}, found {body[name]!r}")
        happened = tuple(event_of(data, f"{source}: events[{k}]") for k, data in enumerate(body["events"]))
        ordered = tuple(command_of(data, f"{source}: commands[{k}]") for k, data in enumerate(body["commands"]))
        return cls(happened, ordered, body["change"])

    def applied(self, state: FleetState, source: str = "log") -> FleetState:
        """The state after this entry, by what it says alone; InputError names what is wrong with its change."""
        _expect_keys(self.change, (*_WHOLE, *_MAPPINGS, "ended"), source, whole=False)
        found: Data = {k: _read(_field(k), self.change[k], f"{source}: {k}") for k in _WHOLE if k in self.change}
        for name in self.change.keys() & set(_MAPPINGS):
            found[name] = _changed(name, getattr(state, name), self.change[name], f"{source}: {name}")
        ended = state.ended
        for job, attempt in _read(list[EndedJob], self.change.get("ended", []), f"{source}: ended"):
            ended = ended.plus(job, attempt)
        for name in self.change.get("jobs", ()):
            ended = ended.without(name) if name in found["jobs"] else ended
        return replace(state, ended=ended, **found)


def state_line(state: FleetState) -> str:
    """A snapshot as a line of the log, with its end: `restored` reads nothing before the last one."""
    return json.dumps(state_data(state), allow_nan=False) + "\n"


def restored(state: FleetState, lines: Iterable[str], source: str = "log") -> FleetState:
    """The state that a log of `Entry` leads to from `state`, or from its last `state_line` if it has one.

    A last line without an end was not written whole and is left out: what it says was never ordered.
    """
    since = list[tuple[str, str]]()
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            continue
        if line.startswith(_SNAPSHOT):
            since.clear()
        since.append((f"{source}: line {number}", line))
    for place, line in since:
        if line.startswith(_SNAPSHOT):
            state = state_of(parse_json(line, place), state.policy, state.world.quotes, place)
        else:
            state = Entry.from_line(line, place).applied(state, place)
    return state


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Data:
    if before is after:
        return {}
    gone: Data = {name: None for name in before if name not in after}
    news = {name: value for name, value in after.items() if name not in before or before[name] is not value}
    return gone | {name: _plain(value) for name, value in news.items() if before.get(name) != value}


def _changed(name: str, before: Mapping[str, Any], change: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(change, dict):
        raise InputError(f"{source}: expected an object, found {change!r}")
    news = _read(_field(name), {key: value for key, value in change.items() if value is not None}, source)
    return {key: value for key, value in {**before, **news}.items() if change.get(key, 0) is not None}


def _plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses and named tuples as objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def _named(base: type[T], data: Any, form: str, key: str, source: str) -> T:
    """The event or command whose class is called what stands under `key`."""
    body = expect_format(data, form, source)
    kinds = {k.__name__: k for k in vars(events).values() if isinstance(k, type) and issubclass(k, base)}
    name = body.pop(key, None)
    if not isinstance(name, str) or name not in kinds or kinds[name].__subclasses__():
        raise InputError(f"{source}: {key}: unknown {key} {name!r}{nearest(str(name), kinds)}")
    found: T = _read(kinds[name], body, source)
    return found


@cache
def _field(name: str) -> Any:
    return get_type_hints(FleetState)[name]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _read(kind: Any, data: Any, source: str) -> Any:
    """`data` as a `kind`; InputError for a value of another type, a key that is missing or one too many."""
    try:
        found = _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{source}: {key_path(first['loc'])}: {first['msg']}") from None
    _expect_same(data, _plain(found), source)
    return found


def _expect_same(data: Any, read: Any, source: str) -> None:
    """InputError where `data` holds what reading it did not keep: unknown keys, text in place of figures."""
    if isinstance(data, dict) and isinstance(read, dict):
        _expect_keys(data, read, source, whole=False)
        for name, value in data.items():
            _expect_same(value, read[name], f"{source}: {name}")
    elif isinstance(data, list) and isinstance(read, list):
        for place, (value, kept) in enumerate(zip(data, read, strict=True)):
            _expect_same(value, kept, f"{source}[{place}]")
    elif data != read or isinstance(data, bool) != isinstance(read, bool):
        raise InputError(f"{source}: expected {type(read).__name__}, found {data!r}")


def _expect_keys(data: Mapping[str, Any], known: Iterable[str], source: str, *, whole: bool) -> None:
    known = list(known)
    for name in data:
        if name not in known:
            raise InputError(f"{source}: unknown key {name!r}{nearest(str(name), known)}")
    for name in known if whole else ():
        if name not in data:
            raise InputError(f"{source}: key {name!r} is missing")
