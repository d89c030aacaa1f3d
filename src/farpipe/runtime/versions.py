"""Versions of torch and transformers: those installed here, and those that the engine was tested with."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from farpipe.runtime.run_spec import RunSpec

TESTED: Final = {"torch": "2.13", "transformers": "5.23"}
"""Minor versions that all tests ran with."""


def versions_of(run: RunSpec) -> dict[str, str]:
    """Installed versions that `run` depends on, without what tells builds apart; "" for what it does not need."""
    needed = {"torch": True, "transformers": run.model is not None and run.model.hugging_face is not None}
    return {name: _installed(name) if is_needed else "" for name, is_needed in needed.items()}


def _installed(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name).partition("+")[0]
    return ""


def untested(versions: Mapping[str, str]) -> list[str]:
    """Warnings on versions, by name, that nobody has tested the engine with."""
    return [
        f"{name} {found} was not tested with this version of farpipe, {TESTED[name]} was; if a step fails or losses "
        f"look wrong, install {name}=={TESTED[name]}.*"
        for name, found in versions.items()
        if found and not f"{found}.".startswith(f"{TESTED[name]}.")
    ]
