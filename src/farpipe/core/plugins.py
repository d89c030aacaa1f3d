"""What installed distributions add to farpipe's own names, found by their entry points."""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from farpipe.core.errors import FarpipeError, InputError, fault_in


class Plugins:
    """Things of one kind (`what`) under the entry points of `group`, beside farpipe's `own` names.

    `is_one` says whether what an entry point names is such a thing. Distributions are looked at only for a name
    that is not farpipe's own: what is built in never depends on what else is installed. InputError names the
    distribution that takes a name twice, or whose thing can't be imported or is something else.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, Any], is_one: Callable[[Any], bool]) -> None:
        self._what, self._group, self._own, self._is_one = what, group, own, is_one

    @property
    def names(self) -> tuple[str, ...]:
        """Names that distributions add."""
        return tuple(self._points())

    @property
    def known(self) -> list[str]:
        """All names, farpipe's own first."""
        return [*self._own, *self.names]

    def all(self) -> dict[str, Any]:
        """The things of all names."""
        return {**self._own, **{name: self.load(name) for name in self.names}}

    def find(self, name: str) -> Any:
        """The thing of that name, farpipe's own or a distribution's; None where there is none."""
        if name in self._own:
            return self._own[name]
        return self.load(name) if name in self else None

    def __contains__(self, name: object) -> bool:
        return name in self._points()

    def load(self, name: str) -> Any:
        """The thing of that name; KeyError where no distribution has it."""
        point = self._points()[name]
        try:
            found = point.load()
        except FarpipeError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"{self._said(point)}: can't be imported: {fault_in(error)}") from error
        if not self._is_one(found):
            raise InputError(f"{self._said(point)}: {point.value} is {type(found).__name__}, not a valid {self._what}")
        return found

    def _points(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in _installed(self._group, tuple(sys.path)):
            if point.name in self._own:
                raise InputError(f"{self._said(point)}: farpipe has one of that name; uninstall it, or rename it there")
            if point.name in found:
                other = _distribution(found[point.name])
                raise InputError(f"{self._said(point)}: {other} has one too; uninstall one of the two")
            found[point.name] = point
        return found

    def _said(self, point: EntryPoint) -> str:
        return f"{self._what} {point.name!r} of the installed distribution {_distribution(point)}"


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


@cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of `group`, read once for every `path` to import from."""
    return tuple(entry_points(group=group))
