"""Settings of another framework on their way to a job.toml, each with the place that it comes from."""

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

from farpipe.interop.shell import UNKNOWN, unset
from farpipe.spec.hugging_face import MAX_LAYERS
from farpipe.spec.write import toml_value

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
            self._say(f"{found.origin}: {missing} is not set in the file (give it with --set NAME=VALUE)")
            self.unset |= {*unset(text)}
            return True if kind is as_flag and found.origin.startswith("--") else default
        try:
            return kind(text)
        except (ValueError, TypeError, ArithmeticError):
            self._say(f"{found.origin}: expected {_NAMES.get(kind, 'another value')}, found {text!r:.60}")
            return default

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def flag(self, name: str) -> bool:
        """True if a switch is on."""
        return bool(self.take(name, as_flag, default=False))

    def origin(self, *names: str) -> str:
        """The place of the first of `names` that the file has; ``default`` where it has none."""
        return next((self.values[name].origin for name in names if name in self.values), "default")

    def left(self, without_effect: Iterable[str]) -> tuple[list[str], list[str]]:
        """The settings that nobody took: those not understood, and those without an effect on a step."""
        rest = {name: found for name, found in self.values.items() if name not in self._taken}
        known = set(without_effect)
        unknown = [f"{found.origin}: {_shown(found.value)}" for name, found in rest.items() if name not in known]
        return [*self.problems, *unknown], [found.origin for name, found in rest.items() if name in known]


def as_flag(value: Any) -> bool:
    """True or false, as files of all kinds write it."""
    if isinstance(value, bool):
        return value
    if value is None or value == "":
        return True  # a switch without a value
    texts = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    return texts[str(value).lower()] if str(value).lower() in texts else _refuse(value)


def as_count(value: Any) -> int:
    """A whole number; text such as ``1e6`` is one too."""
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    return int(number) if number == int(number) else _refuse(value)


def as_layers(value: Any) -> list[int]:
    """1 or 0 for each layer, by a list or an expression such as ``([0]*3+[1,0]*29)``; ValueError for anything else."""
    if isinstance(value, list):
        return [int(kind) for kind in value]
    try:
        return _listed(ast.parse(str(value).strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ValueError(value) from None


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.List():
            return [int(kind) for kind in ast.literal_eval(node)]
        case ast.BinOp(left, ast.Add(), right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))) if times * len(kinds := _listed(left)) <= MAX_LAYERS:
            return kinds * times
    raise ValueError


def _refuse(value: Any) -> Any:
    raise ValueError(value)


_NAMES: Final[dict[Any, str]] = {as_count: "a whole number", float: "a number", as_flag: "true or false"}


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
    notes: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
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

    def close(self, settings: Settings, without_effect: Iterable[str]) -> None:
        """List what was not understood, once all is taken."""
        self.not_understood, self.without_effect = settings.left(without_effect)
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
        if self.value("layout", "data") is None:
            count = self.num_devices.value
            if count % model_devices:
                self.notes.append(
                    f"{count} devices ({self.num_devices.origin}) are no multiple of pipeline x tensor x context = "
                    f"{model_devices}, so {model_devices} are assumed"
                )
                count = model_devices
                self.num_devices = Setting(count, "pipeline x tensor x context")
                self.num_devices_per_machine = None if count < 8 else Setting(8, "assumed")
            self.put("layout", "data", count // model_devices, f"{count} devices / {model_devices}")
        each = self.replica_batch or self.tables["training"].get("microbatch_size")
        if self.value("training", "global_batch") is None and each is not None:
            data = self.value("layout", "data")
            self.put("training", "global_batch", each.value * data, f"{each.origin}, on {data} replicas")

    def missing(self) -> list[str]:
        """Keys that a job needs and nobody put."""
        tables = {"training"} if "preset" in self.tables["model"] else {*NEEDED}
        needed = [(table, key) for table, keys in NEEDED.items() if table in tables for key in keys]
        if self.value("model", "positions") == "learned":
            needed.append(("model", "max_sequence_length"))
        return [f"{table}.{key}" for table, key in needed if key not in self.tables[table]] + self.unreadable

    def site(self, device: str, num_devices: Setting | None = None, name: str = "site") -> DraftSite:
        """The training's own site, or one like it."""
        assert self.num_devices is not None, "settle first"
        kind = Setting(device, "--device")
        return DraftSite(name, kind, num_devices or self.num_devices, self.num_devices_per_machine)

    def to_toml(
        self, device: str, sites: Sequence[DraftSite] = (), link: Link = USUAL_LINK, back: Link | None = None
    ) -> str:
        """The job.toml, with a comment behind every value; a site's links are the catalogue's for its device.

        On other `sites` than the training's own the degrees are left to the planner, and stand there as comments; the
        method is one that the framework runs.
        """
        lines = [f"# From settings of {self.form}. Behind each value: where it comes from."]
        lines += [f"# Assumed: {note}" for note in self.notes]
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
        }


def _lines(table: Mapping[str, Setting]) -> list[str]:
    pairs = [(f"{key} = {toml_value(found.value)}", found.origin) for key, found in table.items()]
    width = min(48, max(len(pair) for pair, _ in pairs))
    return [f"{pair:<{width}}  # {' '.join(origin.split())}" for pair, origin in pairs]
