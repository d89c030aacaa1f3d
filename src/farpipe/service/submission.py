"""Jobs of submitters: a job.toml that names no file, no code and no address of the machine that reads it."""

from collections.abc import Iterator
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Job
from farpipe.core.spec.load import parse_job
from farpipe.core.strict import key_path, parse_toml

MOST_BYTES: Final = 256 * 1024
"""Longest job.toml that is taken."""
TABLES: Final = ("model", "training", "data", "layout", "schedule", "cluster")
"""Tables that a submitter may write. [run] and [metrics] are the operator's: they open ports and files."""
_TEXTS: Final[dict[tuple[str | int, ...], str]] = {("data", "source"): "stdlib", ("data", "tokenizer"): "bytes"}
"""Keys whose other values are files, and what they may be."""
_FILES: Final = ("hugging_face", "cache")
"""Keys that are always files."""
_PATHS: Final = ("/", "\\", ":", "..", ".py", ".toml", ".json")
"""Parts of words by which the other keys would name a file, or a function in one."""


def submitted_job(text: str, source: str = "job.toml") -> Job:
    """The job in `text`, the content of a submitter's job.toml.

    The model is a preset or written out. InputError names the key that would make the service read a file, import code
    or listen, and what is wrong otherwise.
    """
    if (size := len(text.encode())) > MOST_BYTES:
        raise InputError(f"{source}: {size:,} bytes; the most is {MOST_BYTES:,}")
    table = parse_toml(text, source)
    for name in table:
        if name not in TABLES:
            raise InputError(f"{source}: [{name}]: the operator's choice; leave it out")
    cluster = table.pop("cluster", None)
    if isinstance(cluster, dict) and "matrices" in cluster:
        raise InputError(f"{source}: cluster.matrices: names files; the fleet's links count, so leave it out")
    for place, word in _words(table):
        if place in _TEXTS and word != _TEXTS[place]:
            raise InputError(f"{source}: {key_path(place)}: {word!r} is a file here; leave it {_TEXTS[place]!r}")
        if place[-1] in _FILES or any(part in word for part in _PATHS):
            raise InputError(f"{source}: {key_path(place)}: {word!r} names a file; a submitted job can't")
    return parse_job(text, source)


def _words(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """All texts in a table, with their places."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _words(part, (*place, name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _words(part, (*place, index))
    elif isinstance(value, str):
        yield place, value
