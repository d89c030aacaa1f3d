"""Versions of others' packages with which this one was run or read; others are named in a warning or refused."""

import re
import warnings
from typing import Final, NamedTuple

from farpipe.errors import InputError


class Tested(NamedTuple):
    """First and last version that was run, and what is done about older ones."""

    first: str
    last: str
    older_is_refused: bool = False


TESTED: Final = {
    "torch": Tested("2.13", "2.14"),
    "torchtitan": Tested("0.3", "0.3", older_is_refused=True),  # pipelines were made by another call
    "megatron-core": Tested("0.16", "0.16"),
}


def expect_tested(package: str, found: str) -> None:
    """Warn of a version of `package` outside the range that was run; InputError for one that can't work."""
    tested, version = TESTED[package], _numbers(found)
    if _numbers(tested.first) <= version <= _numbers(tested.last):
        return
    known = tested.first if tested.first == tested.last else f"{tested.first} to {tested.last}"
    is_older = version < _numbers(tested.first)
    if is_older and tested.older_is_refused:
        raise InputError(
            f"farpipe.torch needs {package} {tested.first}, found {found}: pip install {package}=={known}.*"
        )
    warnings.warn(
        f"farpipe.torch was run with {package} {known}, not with {found}; first compare some steps with and without it",
        stacklevel=3,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
