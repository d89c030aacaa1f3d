"""Names that a package hands out and imports only when they are asked for (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are elsewhere in it.

    `homes` has the home of every name, ``module:name``, or ``module`` for a module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        module = import_module(f"{package}.{home}")
        return getattr(module, attribute) if attribute else module

    return get
