"""A first job.toml from a few words: a model, sites such as ``zurich=8xh100``, a link such as ``20ms,100G``."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from farpipe.core.catalog import device_names, device_row, link_row, model_names
from farpipe.core.errors import InputError
from farpipe.core.spec.load import load_model, parse_job, preset_model
from farpipe.core.spec.model import Model
from farpipe.core.spec.write import toml_value
from farpipe.core.strict import nearest
from farpipe.core.units import BYTES_PER_S, SECONDS, parse

SEQUENCE_LENGTH: Final = 4096
TOKENS_PER_STEP: Final = 1 << 20
"""Tokens of one optimizer step where the batch is not given: about 1 M, as models of 7 to 70 B parameters train."""
_SITE: Final = re.compile(r"\s*(?P<name>[^=\s]+)\s*=\s*(?P<count>[1-9][\d_]*)\s*[x*]\s*(?P<device>\S+)\s*")
_SHORT_RATE: Final = re.compile(r"(?P<number>[\d.]+)\s*(?P<prefix>[kMGT])")
_ASSUMED: Final = "assumed"
SCHEMA_LINE: Final = "#:schema https://github.com/farpipe/farpipe/raw/main/docs/reference/job.schema.json"
"""By which editors (Even Better TOML, taplo) complete and check the file."""

Table = Mapping[str, tuple[Any, str]]
"""Key -> its value, and a remark on it."""


def first_job(
    model: str,
    sites: Sequence[str],
    links: Sequence[str] = (),
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> str:
    """The text of a job.toml in which what was assumed says so.

    `model`: a preset, or a folder with a Hugging Face ``config.json``. `sites`: ``NAME=COUNTxDEVICE`` each, several may
    share a string with commas between them. `links`: ``LATENCY,BANDWIDTH`` or a preset for all pairs of sites, or
    ``A:B=...`` for one. InputError names the word that can't be read, with the nearest known one.
    """
    given = [_site(word) for text in sites for word in text.split(",") if word.strip()]
    if not given:
        raise InputError("sites: give at least one, as zurich=8xh100")
    names = [name for name, _, _ in given]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"sites: there is already a site called {twice[0]!r}; give each a name of its own")
    key, shape = _model(model)
    length = sequence_length or min(SEQUENCE_LENGTH, shape.max_sequence_length or SEQUENCE_LENGTH)
    batch = global_batch or max(1, TOKENS_PER_STEP // length)
    training: Table = {
        "sequence_length": (length, "" if sequence_length else _ASSUMED),
        "global_batch": (batch, "sequences in one optimizer step" + ("" if global_batch else f"; {_ASSUMED}")),
        "precision": (_precision([device for _, device, _ in given]), _ASSUMED),
    }
    tables: list[tuple[str, Table]] = [("[model]", {key: (model, shape.size_text)}), ("[training]", training)]
    tables += [("[[cluster.sites]]", _site_table(*site)) for site in given]
    tables += [("[[cluster.links]]", table) for table in _links(names, links)]
    head = f'{SCHEMA_LINE}\n# Lines marked "{_ASSUMED}" are a guess: check them. All keys: docs/reference/job.md.\n'
    text = "\n".join([head, *(_section(header, table) for header, table in tables)])
    parse_job(text, "the job")
    return text


def _section(header: str, table: Table) -> str:
    lines = [header]
    for key, (value, remark) in table.items():
        lines.append(f"{key} = {toml_value(value)}" + (f"  # {remark}" if remark else ""))
    return "\n".join(lines) + "\n"


def _model(name: str) -> tuple[str, Model]:
    """The key of [model] that `name` belongs to, and the shape."""
    if (Path(name) / "config.json").is_file():
        return "hugging_face", load_model(Path(name) / "config.json")
    try:
        return "preset", preset_model(name)
    except ValueError:
        hint = nearest(name, model_names()) or f"; known: {', '.join(model_names())}"
        raise InputError(
            f"model: {name!r} is neither a preset nor a folder with a Hugging Face config.json{hint}"
        ) from None


def _site(word: str) -> tuple[str, str, int]:
    """(name, device, number of devices) of ``zurich=8xh100``."""
    found = _SITE.fullmatch(word)
    if found is None:
        raise InputError(f"sites: expected NAME=COUNTxDEVICE such as zurich=8xh100, found {word.strip()!r}")
    try:
        device_row(found["device"])
    except ValueError:
        hint = nearest(found["device"], device_names()) or f"; known: {', '.join(device_names())}"
        raise InputError(f"sites: {found['name']}: there is no device {found['device']!r}{hint}") from None
    return found["name"], found["device"], int(found["count"])


def _site_table(name: str, device: str, num_devices: int) -> Table:
    return {"name": (name, ""), "device": (device, ""), "num_devices": (num_devices, "")}


def _precision(devices: Sequence[str]) -> str:
    """bf16 where all `devices` have a rate for it, else fp16 or fp32."""
    rows = [device_row(device) for device in devices]
    return next(name for name in ("bf16", "fp16", "fp32") if all(name in row.peak_flops for row in rows))


def _links(names: Sequence[str], words: Sequence[str]) -> list[Table]:
    """A table for every pair of sites that has a link."""
    pairs = [*combinations(names, 2)]
    if not pairs and words:
        raise InputError(f"link: {words[0]!r}: there is one site, so no link")
    for_all = [word for word in words if "=" not in word]
    if len(for_all) > 1:
        raise InputError(f"link: {for_all[1]!r}: one was given for all pairs; name the sites, as a:b={for_all[1]}")
    found = {pair: _figures(for_all[0]) for pair in pairs} if for_all else {}
    for word in words:
        ends, is_pair, figures = word.partition("=")
        if is_pair:
            found[_pair(ends, pairs)] = _figures(figures)
    if (missing := [pair for pair in pairs if pair not in found]) and not words:
        raise InputError(f"link: give the one between {' and '.join(missing[0])}, as 20ms,100G (latency one way)")
    return [{"between": (list(pair), "")} | dict(figures) for pair, figures in found.items()]


def _pair(ends: str, pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    names = tuple(name.strip() for name in ends.split(":"))
    for pair in pairs:
        if names in (pair, pair[::-1]):
            return pair
    known = ", ".join(":".join(pair) for pair in pairs)
    raise InputError(f"link: {ends!r} is no pair of sites; expected one of {known}")


def _figures(word: str) -> Table:
    """Latency and bandwidth of ``20ms,100G``, or a preset."""
    latency, comma, bandwidth = word.partition(",")
    if not comma:
        try:
            return {"preset": (link_row(word.strip()).name, "")}
        except ValueError as error:
            raise InputError(f"link: expected LATENCY,BANDWIDTH such as 20ms,100G, or a preset: {error}") from None
    rate = rate_text(bandwidth)
    try:
        parse(latency, SECONDS, "20 ms")
        parse(rate, BYTES_PER_S, "100 Gbit/s")
    except ValueError as error:
        raise InputError(f"link: {word!r}: {error}") from None
    return {"latency": (_spaced(latency), "one way: half of what ping shows"), "bandwidth": (rate, "")}


def rate_text(word: str) -> str:
    """``100G`` as ``100 Gbit/s``."""
    short = _SHORT_RATE.fullmatch(word.strip())
    return f"{short['number']} {short['prefix']}bit/s" if short else _spaced(word)


def _spaced(quantity: str) -> str:
    """``20ms`` as ``20 ms``."""
    return re.sub(r"^([\d.]+)\s*(?=\D)", r"\1 ", quantity.strip())
