"""Settings of another framework on their way to a job.toml, each with the place that it comes from."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec.write import toml_value
from farpipe.interop.kinds import KIND_NAMES, as_flag
from farpipe.interop.known_options import KnownOptions, says_shape
from farpipe.interop.shell import UNKNOWN, unset

TABLES: Final = ("model", "training", "layout", "schedule")
Plain = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""Settings that are taken as they are: by key of the job, their name and the kind of their value."""
NEEDED: Final = {
    "model": ("num_layers", "hidden", "num_heads", "ffn_hidden", "vocab_size"),
    "training": ("sequence_length", "global_batch"),
}


@dataclass(frozen=True)
class Setting:
    """A value, and the words for where it stands."""

    value: Any
    origin: str

    @property
    def is_open(self) -> bool:
        """True for a value that no file says."""
        return self.origin.startswith(("default", "assumed"))


@dataclass
class Settings:
    """The settings of one file by name; `take` marks those that are understood."""

    source: str
    values: dict[str, Setting]
    notes: list[str] = field(default_factory=list)
    """Assumptions, and lines that could not be followed, in words."""
    problems: list[str] = field(default_factory=list)
    """Settings that were found, but could not be read."""
    changes: list[str] = field(default_factory=list)
    """Settings that change a step and are not planned."""
    shapes: dict[str, str] = field(default_factory=dict)
    """Settings of the model's shape and of degrees that are not understood, in words, by their names."""
    rivals: dict[str, list[Setting]] = field(default_factory=dict)
    """Other values of a setting, deeper in the file or as deep; of these `take` has the first."""
    other_files: dict[str, str] = field(default_factory=dict)
    """Settings that name a file with more of them, by the file's name."""
    unset: set[str] = field(default_factory=set)
    """Variables and arguments that settings need and the file does not set."""
    _taken: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """True if the file has this setting; it counts as understood."""
        self._taken.add(name)
        return name in self.values

    def take(self, name: str, kind: Callable[[Any], Any] = str, default: Any = None) -> Any:
        """The value of a setting as `kind` reads it; `default` where it is missing or can't be read."""
        if not self.has(name):
            return default
        found = self.values[name]
        text = found.value
        if isinstance(text, str) and UNKNOWN in text:
            missing = text.split(UNKNOWN)[1]
            self._say(name, f"{found.origin}: {missing} is not set in the file (give it with --set NAME=VALUE)")
            self.unset |= {*unset(text)}
            return True if kind is as_flag and found.origin.startswith("--") else default
        try:
            return kind(text)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError):
            self._say(name, f"{found.origin}: expected {KIND_NAMES.get(kind, 'another value')}, found {text!r:.60}")
            return default

    def first(self, names: Sequence[str], kind: Callable[[Any], Any]) -> Any:
        """The value of the first of `names` that has one; a note says which others differ."""
        found = [(name, value) for name in names if (value := self.take(name, kind))]
        for name, value in found[1:]:
            if value != found[0][1]:
                self._note(f"{self.origin(found[0][0])}: {found[0][1]} counts, not {self.origin(name)}: {value}")
        return found[0][1] if found else None

    def refer(self, name: str) -> None:
        """Keep the file that a setting names: what it says is not planned unless it is given as well."""
        if isinstance(path := self.take(name, lambda value: value), str):
            self.other_files[path.replace(UNKNOWN, "").rpartition("/")[2]] = self.origin(name)

    def ignore(self, *names: str) -> None:
        """Count settings as understood whose values do not matter beside the others."""
        self._taken.update(names)

    def change(self, name: str, what: str) -> None:
        """Keep that a setting changes a step in a way that is not planned."""
        self.changes.append(f"{self.origin(name)}: {_shown(self.values[name].value)}: {what}")

    def _say(self, name: str, problem: str) -> None:
        if says_shape(name):
            self.shapes.setdefault(name, problem)
        elif problem not in self.problems:
            self.problems.append(problem)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def flag(self, name: str) -> bool:
        """True if a switch is on."""
        return bool(self.take(name, as_flag, default=False))

    def origin(self, *names: str) -> str:
        """The place of the first of `names` that the file has; ``default`` where it has none."""
        return next((self.values[name].origin for name in names if name in self.values), "default")

    def expect_one_value(self) -> None:
        """InputError for a setting that was taken and has another value as deep in the file; notes on deeper ones."""
        for name, others in self.rivals.items():
            first = self.values[name]
            for other in others if name in self._taken else ():
                if first.origin.count(".") == other.origin.count("."):
                    raise InputError(
                        f"{self.source}: two values for {name}: {_shown(first.value)} by {first.origin}, "
                        f"{_shown(other.value)} by {other.origin}; leave the one that is meant"
                    )
                self._note(f"{first.origin}: {_shown(first.value)} counts, not {other.origin}: {_shown(other.value)}")

    def left(self, known: KnownOptions) -> tuple[list[str], list[str]]:
        """The settings that nobody took: those not understood, and those without effect.

        Those that change a step go to `changes`, those that may say a shape to `shapes`.
        """
        unknown, without_effect = [*self.problems], []
        for name, found in self.values.items():
            text, place = f"{found.origin}: {_shown(found.value)}", found.origin.partition(",")[0]
            kind = None if name in self._taken else known.kind(place, name, found.value)
            if kind == "without effect":
                without_effect.append(found.origin)
            elif kind == "changes":
                self.changes.append(f"{text}: {known.change(place, name)}")
            elif kind == "shape":
                self.shapes.setdefault(name, text)
            elif kind == "unknown":
                unknown.append(text)
        return unknown, without_effect


def _shown(value: Any) -> str:
    return "on" if value is None else str(value).replace(UNKNOWN, "")[:60]


@dataclass(frozen=True)
class DraftSite:
    """A site in the making: what a [[cluster.sites]] of a job needs, each with the place that it comes from."""

    name: str
    device: Setting
    num_devices: Setting
    devices_per_machine: Setting | None = None

    def lines(self) -> list[str]:
        """Its table in a job.toml."""
        table = {"name": Setting(self.name, "any"), "device": self.device, "num_devices": self.num_devices}
        each = self.devices_per_machine
        if each is not None and self.num_devices.value % each.value == 0:
            table["devices_per_machine"] = each
        return ["", "[[cluster.sites]]", *_lines(table)]


Link = Mapping[str, tuple[Any, str]]
"""`latency`, `bandwidth`, `loss` and `jitter` as a job writes them, each with the place that it comes from."""
USUAL_LINK: Final[Link] = {"latency": ("20 ms", "assumed"), "bandwidth": ("100 Gbit/s", "assumed")}
"""The link between sites of which nothing is known."""


def cluster_lines(sites: Sequence[DraftSite], link: Link, back: Link | None = None) -> list[str]:
    """Tables of sites in a job.toml, and a link between each two of them."""
    links = [link_lines([one.name, other.name], {**USUAL_LINK, **link}, back) for one, other in combinations(sites, 2)]
    return [line for table in (*(site.lines() for site in sites), *links) for line in table]


def link_lines(ends: list[str], link: Link, back: Link | None = None) -> list[str]:
    """Table of one link in a job.toml; of both its directions where `back` has figures of the second."""
    tables: list[tuple[dict[str, Any], Link]] = [({"between": ends}, link)]
    if back:
        tables = [
            ({"from": one, "to": to}, of_direction)
            for (one, to), of_direction in ((ends, link), (ends[::-1], {**link, **back}))
        ]
    settings = [
        {key: Setting(value, "any") for key, value in at.items()}
        | {key: Setting(*one) for key, one in of_direction.items()}
        for at, of_direction in tables
    ]
    return [line for table in settings for line in ("", "[[cluster.links]]", *_lines(table))]


@dataclass
class Draft:
    """A job.toml in the making: its tables, every value with the place that it comes from."""

    form: str
    tables: dict[str, dict[str, Setting]] = field(default_factory=lambda: {name: {} for name in TABLES})
    num_devices: Setting | None = None
    num_devices_per_machine: Setting | None = None
    own_method: str | None = None
    """Method that stands for the orders of the framework's own runtime; None: it has none, or runs any."""
    replica_batch: Setting | None = None
    """Sequences of one replica in a step, where the file has no batch of all of them."""
    accumulation: Setting | None = None
    """Microbatches of one replica in a step, where the file says it."""
    notes: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """Settings that change a step and are not planned, in words."""
    shapes: dict[str, str] = field(default_factory=dict)
    """Settings that may say a shape or a degree and are not understood, in words, by their names."""
    other_files: dict[str, str] = field(default_factory=dict)
    """Places of settings that name a file with more of them, by the file's name."""
    accepted: list[str] = field(default_factory=list)
    """Settings that may say a shape, are not understood, and without which the user accepts the job, in words."""
    unreadable: list[str] = field(default_factory=list)
    """Keys that must not be left to a default, for their values stand in the file and can't be read."""
    unset: set[str] = field(default_factory=set)
    """Variables and arguments of a script whose values are needed from outside."""

    def put(self, table: str, key: str, value: Any, origin: str) -> None:
        """Set a value; one that is None is left to farpipe's default."""
        if value is not None:
            self.tables[table][key] = Setting(value, origin)

    def copy(self, settings: Settings, table: str, names: Plain) -> None:
        """Take settings as they are."""
        for key, (name, kind) in names.items():
            self.put(table, key, settings.take(name, kind), settings.origin(name))

    def value(self, table: str, key: str, default: Any = None) -> Any:
        """The value that was put there."""
        found = self.tables[table].get(key)
        return default if found is None else found.value

    def close(self, settings: Settings, known: KnownOptions) -> None:
        """List what was not understood, once all is taken; InputError where one setting has two values."""
        settings.expect_one_value()
        self.not_understood, self.without_effect = settings.left(known)
        self.changes, self.shapes, self.other_files = settings.changes, settings.shapes, settings.other_files
        self.notes += settings.notes
        self.unset |= settings.unset

    def degree(self, *keys: str) -> int:
        """Product of degrees of the layout; 1 for those that are open."""
        product = 1
        for key in keys:
            product *= self.value("layout", key, 1)
        return product

    def settle(self) -> None:
        """Derive the data-parallel degree, the number of devices and the batch from each other."""
        model_devices = self.degree("pipeline", "tensor", "context")
        if self.num_devices is None:
            known, experts = self.value("layout", "data"), self.degree("expert")
            count = model_devices * (known or experts // math.gcd(experts, self.degree("tensor", "context")))
            self.num_devices = Setting(count, "the smallest number for these degrees")
            if known is None:
                self.notes.append(
                    f"the number of devices is not in the file: {count} assumed, the smallest for its degrees"
                )
        devices, known = self.num_devices, self.value("layout", "data")
        if devices.value % model_devices or (known and devices.value != model_devices * known):
            degrees = f"pipeline x tensor x context = {model_devices}{f' x data = {known}' if known else ''}"
            raise InputError(
                f"{devices.value} devices ({devices.origin}) do not fit {degrees}; give --site NUMBERxDEVICE"
            )
        if known is None:
            data = devices.value // model_devices
            self.put("layout", "data", data, f"{devices.value} devices / {model_devices}")
        self._settle_batch(self.value("layout", "data"))

    def _settle_batch(self, data: int) -> None:
        """Derive the batch of all replicas; InputError where the file has another one."""
        each, whole = self.replica_batch, self.tables["training"].get("global_batch")
        if each is None and (one := self.tables["training"].get("microbatch_size")) is not None:
            steps = self.accumulation or Setting(1, one.origin)
            each = Setting(one.value * steps.value, steps.origin)
        if each is not None and whole is None:
            self.put("training", "global_batch", each.value * data, f"{each.origin}, on {data} replicas")
        elif each is not None and whole is not None and self.accumulation and each.value * data != whole.value:
            raise InputError(
                f"{whole.origin}: {whole.value} is not {each.value} (by {each.origin}) on {data} replicas; give the "
                "number of devices (--site NUMBERxDEVICE) or the file with the degrees (tensor, pipeline, context)"
            )

    def missing(self) -> list[str]:
        """Keys that a job needs and nobody put."""
        tables = {"training"} if "preset" in self.tables["model"] else {*NEEDED}
        needed = [(table, key) for table, keys in NEEDED.items() if table in tables for key in keys]
        if self.value("model", "positions") == "learned":
            needed.append(("model", "max_sequence_length"))
        if self.replica_batch or "microbatch_size" in self.tables["training"]:  # the batch follows from it
            needed.remove(("training", "global_batch"))
        return [f"{table}.{key}" for table, key in needed if key not in self.tables[table]] + self.unreadable

    def accept(self, names: Sequence[str]) -> None:
        """Take the job without settings that may say a shape; UsageError for a name that is none of these."""
        for name in names:
            plain = name.lstrip("-").replace("-", "_")
            found = next((key for key in self.shapes if plain in (key, key.rpartition(".")[2])), None)
            if found is None:
                waiting = f"; there are {', '.join(self.shapes)}" if self.shapes else ""
                raise UsageError(f"--accept {name}: it is none of the options that stop this import{waiting}")
            self.accepted.append(self.shapes.pop(found))

    def expect_understood(self) -> None:
        """InputError for settings that may say a shape or a degree, are not understood and were not accepted."""
        if self.shapes:
            names = " ".join(f"--accept {name}" for name in self.shapes)
            raise InputError(
                "not understood, and the model's shape, its degrees or the batch may depend on it:"
                + "".join(f"\n  {text}" for text in self.shapes.values())
                + "\nwrite it by a name that farpipe reads, or take it out; to have the job without it (it then is "
                f"another one, and says so): {names}"
            )

    def warnings(self) -> list[str]:
        """Lines to be read first: in what the job is another one than the files describe."""
        accepted = [f"Accepted, though not understood, and it may say a shape: {text}" for text in self.accepted]
        return accepted + [f"Not planned, though it changes a step: {text}" for text in self.changes]

    def site(self, device: str, num_devices: Setting | None = None, name: str = "site") -> DraftSite:
        """The training's own site, or one like it."""
        assert self.num_devices is not None, "settle first"
        kind = Setting(device, "--site")
        return DraftSite(name, kind, num_devices or self.num_devices, self.num_devices_per_machine)

    def to_toml(
        self, device: str, sites: Sequence[DraftSite] = (), link: Link = USUAL_LINK, back: Link | None = None
    ) -> str:
        """The job.toml, with a comment behind every value; a site's links are the catalogue's for its device.

        On other `sites` than the training's own the degrees are left to the planner, and stand there as comments; the
        method is one that the framework runs.
        """
        lines = [f"# From settings of {self.form}. Behind each value: where it comes from."]
        lines += [f"# {text}" for text in self.warnings()]
        lines += [f"# {note}" if note.startswith("--set ") else f"# Assumed: {note}" for note in self.notes]
        lines += [f"# Not understood: {text}" for text in self.not_understood]
        own = {"method": Setting(self.own_method, f'orders that {self.form} runs; "auto": farpipe\'s own as well')}
        tables = self.tables | ({"schedule": own} if sites and self.own_method else {})
        for name, values in tables.items():
            if values:
                is_open = bool(sites) and (name == "layout" or values is self.tables["schedule"])
                table = [f"[{name}]", *_lines(values)]
                lines += ["", *(f"# {line}" if is_open else line for line in table)]
        lines += cluster_lines(sites or [self.site(device)], link, back)
        return "\n".join([*lines, ""])

    def to_data(self) -> dict[str, Any]:
        """The draft as JSON data."""
        return {
            "format": "farpipe/import/1",
            "framework": self.form,
            "job": {name: {key: found.value for key, found in table.items()} for name, table in self.tables.items()},
            "origins": {
                f"{name}.{key}": found.origin for name, table in self.tables.items() for key, found in table.items()
            },
            "num_devices": self.num_devices.value if self.num_devices else None,
            "assumed": self.notes,
            "not_understood": self.not_understood,
            "without_effect": self.without_effect,
            "not_planned": self.changes,
            "accepted": self.accepted,
        }


def _lines(table: Mapping[str, Setting]) -> list[str]:
    pairs = [(f"{key} = {toml_value(found.value)}", found.origin) for key, found in table.items()]
    width = min(48, max(len(pair) for pair, _ in pairs))
    return [f"{pair:<{width}}  # {' '.join(origin.split())}" for pair, origin in pairs]
