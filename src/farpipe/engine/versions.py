"""Versions of torch and transformers: those installed here, and those that the engine was tested with."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple

from farpipe.engine.run_spec import RunSpec


class Tested(NamedTuple):
    """First and last minor version of a package that was run."""

    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"

    def covers(self, found: str) -> bool:
        """True if the version `found` is one of them."""
        return _numbers(self.first) <= _numbers(found) <= _numbers(self.last)

    def is_after(self, found: str) -> bool:
        """True if the version `found` is older than all of them."""
        return _numbers(found) < _numbers(self.first)


TESTED: Final = {"torch": Tested("2.13", "2.13"), "transformers": Tested("5.23", "5.23")}
"""Versions that all tests of the engine ran with."""


def versions_of(run: RunSpec) -> dict[str, str]:
    """Installed versions that `run` depends on, without what tells builds apart; "" for what it does not need."""
    needed = {"torch": True, "transformers": run.plan.model is not None and run.plan.model.is_of_transformers}
    return {name: _installed(name) if is_needed else "" for name, is_needed in needed.items()}


def _installed(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name).partition("+")[0]
    return ""


def untested(versions: Mapping[str, str]) -> list[str]:
    """Warnings on versions, by name, that the engine was never tested with."""
    return [
        f"{name} {found} was not tested with this version of farpipe, {TESTED[name]} was; if a step fails or losses "
        f"look wrong, install {name}=={TESTED[name].last}.*"
        for name, found in versions.items()
        if found and not TESTED[name].covers(found)
    ]


def _numbers(found: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(number) for number in re.findall(r"\d+", found)[:2])
