"""Versions of others' packages with which `farpipe.torch` was run; others are named in a warning or refused."""

import warnings
from typing import Final

from farpipe.core.errors import InputError
from farpipe.engine.versions import Tested

TESTED: Final = {
    "torch": Tested("2.13", "2.14"),
    "torchtitan": Tested("0.3", "0.3"),
    "megatron-core": Tested("0.16", "0.16"),
}
OLDER_ARE_REFUSED: Final = ("torchtitan",)
"""Packages whose older versions can't work: torchtitan's made pipelines by another call."""


def expect_tested(package: str, found: str) -> None:
    """Warn of a version of `package` outside the range that was run; InputError for one that can't work."""
    tested = TESTED[package]
    if tested.covers(found):
        return
    if tested.is_after(found) and package in OLDER_ARE_REFUSED:
        raise InputError(
            f"farpipe.torch needs {package} {tested.first}, found {found}: pip install {package}=={tested.last}.*"
        )
    warnings.warn(
        f"farpipe.torch was run with {package} {tested}, not with {found}; "
        "first compare some steps with and without it",
        stacklevel=3,
    )
