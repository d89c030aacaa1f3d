"""Reading job.toml, and parts of a job from the catalogue for use from Python."""

import copy
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from farpipe.core.arguments import expect_kind
from farpipe.core.catalog import device_row, model_row
from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import Cluster, Device, Site
from farpipe.core.spec.hugging_face import read_config
from farpipe.core.spec.job import Job
from farpipe.core.spec.model import Model
from farpipe.core.spec.write import as_toml
from farpipe.core.spec.written import WrittenClusterFile, WrittenDevice, WrittenJob, WrittenModel, WrittenSite
from farpipe.core.strict import key_path, parse_toml, read_text, seen_from, validate

_VALUES: Final = (str, int, float, list, tuple, Mapping, type(None))


def load_job(source: Path | str | Job, changes: Mapping[str, Any] | None = None, *, option: str = "") -> Job:
    """Read the job in a file, or take a job, and change values of it.

    `changes` maps dotted keys of job.toml, as `put` reads them (``"cluster.links.latency"``), to values as they are
    written there (``"80 ms"``); None removes a key. The job is checked as a whole, as if its file said so. Errors name
    the changed keys, after the `option` that they were given with.

    Raises InputError that names file, key path and value for a file that can't be read, is not TOML, has unknown or
    missing keys, or asks for something impossible, and for a change of a place that the job does not have.
    """
    expect_kind("load_job: source", source, (str, Path, Job), "the path of a job.toml, or a Job")
    expect_kind("load_job: changes", changes or {}, Mapping, 'keys and values, such as {"training.num_steps": 7}')
    for key, value in (changes or {}).items():
        expect_kind("load_job: changes", key, str, 'keys and values, such as {"training.num_steps": 7}')
        expect_kind(f"load_job: changes: {key}", value, _VALUES, "a value as in job.toml, or None to remove the key")
    if isinstance(source, Job):
        return _changed(parse_toml(source.to_toml(), "job"), changes, "job", option) if changes else source
    if changes:
        return _changed(load_table(source), changes, str(source), option)
    return parse_job(read_text(source), str(source), Path(source).parent)


def _changed(table: dict[str, Any], changes: Mapping[str, Any], source: str, option: str) -> Job:
    """The job of `table` with `changes`."""
    named = [f"{option} {key}".lstrip() for key in changes]
    for name, (key, value) in zip(named, changes.items(), strict=True):
        put(table, key, value, f"{source} with {name}")
    text = as_toml(*((f"[{header}]", section) for header, section in table.items() if isinstance(section, dict)))
    job = job_of(table, f"{source} with {', '.join(named)}")
    # The text stays, so that in further changes a number of a link means the same entry as in this one.
    return job.model_copy(update={"text": text})


def value_of(word: str) -> Any:
    """A value as in a job.toml; what is not a TOML value is text, so that ``30 ms`` needs no quotes."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def put(here: Any, key: str, value: Any, source: str, place: tuple[str | int, ...] = ()) -> None:
    """Put `value` at the dotted `key` below `here`, which is at `place`; None removes the key, or an entry.

    In a list (sites, links) a site's name, a link's ``a>b`` or a number chooses one entry; without it all are changed.
    """
    if isinstance(here, list):
        named = [index for index, entry in enumerate(here) if key in (str(index), *_names(entry))]
        if value is None and named:
            del here[named[0]]
            return
        for index, rest in _entries(here, key, source, place):
            put(here[index], rest, value, source, (*place, index))
        return
    if not isinstance(here, dict):
        raise InputError(f"{source}: {key_path(place)} is a value, not a table, so it has no {key!r}")
    first, dot, rest = key.partition(".")
    if dot:
        if isinstance(here.get(first), str):  # a preset alone, to which something is added
            here[first] = {"preset": here[first]}
        put(here.setdefault(first, {}), rest, value, source, (*place, first))
    elif value is None:
        here.pop(first, None)
    else:
        here[first] = copy.deepcopy(value)


def _entries(entries: list[Any], key: str, source: str, place: tuple[str | int, ...]) -> Iterator[tuple[int, str]]:
    """Entries that `key` chooses, each with the rest of the key."""
    if not entries:
        raise InputError(f"{source}: the job has no {key_path(place)}")
    for index, entry in enumerate(entries):
        for name in (str(index), *_names(entry)):
            if key.startswith(f"{name}."):
                yield index, key.removeprefix(f"{name}.")
                return
    if key.partition(".")[0].isdecimal():
        raise InputError(f"{source}: {key_path(place)} has entries 0 to {len(entries) - 1}")
    yield from ((index, key) for index in range(len(entries)))


def _names(entry: Any) -> list[str]:
    """Names of an entry: a site's name, a link's ends."""
    if not isinstance(entry, dict):
        return []
    between = entry.get("between")
    ends = [between, between[::-1]] if isinstance(between, list) and len(between) == 2 else []
    ends += [[entry["from"], entry["to"]]] if {"from", "to"} <= set(entry) else []
    return [str(entry["name"])] if "name" in entry else [f"{a}>{b}" for a, b in ends]


def parse_job(text: str, source: str = "job.toml", folder: Path | None = None) -> Job:
    """The job in `text`, the content of a job.toml in `folder`; `source` is what errors call it."""
    written = validate(WrittenJob, _found_from(folder, parse_toml(text, source)), source, toml=text)
    return written.resolve().model_copy(update={"text": text})


def load_table(path: Path | str) -> dict[str, Any]:
    """The table in the file at `path`, unchanged but for files beside it, which get their folder; InputError
    where it can't be read or is not TOML.
    """
    return _found_from(Path(path).parent, parse_toml(read_text(path), str(path)))


def _found_from(folder: Path | None, table: dict[str, Any]) -> dict[str, Any]:
    """`table`, with the names of matrices as seen from where farpipe runs."""
    cluster = table.get("cluster")
    matrices = cluster.get("matrices") if isinstance(cluster, dict) else None
    if folder is None or not isinstance(matrices, dict):
        return table
    for key in ("throughput", "rtt", "egress"):
        if isinstance(name := matrices.get(key), str):
            matrices[key] = str(seen_from(folder, name))
    return table


def job_of(table: dict[str, Any], source: str) -> Job:
    """The job that a table of job.toml describes; `source` is what errors call it."""
    job: Job = validate(WrittenJob, table, source).resolve()
    return job


def load_model(path: Path | str) -> Model:
    """The model in the file at `path`: a config of Hugging Face (.json), or a TOML with [model], such as a job."""
    if Path(path).suffix == ".json":
        return read_config(path)
    table = parse_toml(read_text(path), str(path))
    if "model" not in table:
        raise InputError(f"{path}: there is no table [model]")
    return validate(WrittenModel, table["model"], str(path), prefix="model").resolve()


def load_cluster(path: Path | str) -> Cluster:
    """The cluster of the job in the file at `path`, or of a file that has nothing else; InputError as `load_job`."""
    text = read_text(path)
    table = _found_from(Path(path).parent, parse_toml(text, str(path)))
    if set(table) - {"cluster"}:
        return parse_job(text, str(path), Path(path).parent).cluster
    return validate(WrittenClusterFile, table, str(path), toml=text).resolve()


def preset_model(name: str) -> Model:
    """The catalogue's model of that name, ``"llama-3-8b"`` for example; ValueError if there is none."""
    row = model_row(name)
    return Model.model_validate({"name": row.name, **row.shape})


def preset_device(name: str) -> Device:
    """The catalogue's device of that name, ``"h100"`` for example; ValueError if there is none."""
    row = device_row(name)
    return Device.model_validate({key: getattr(row, key) for key in Device.model_fields})


def preset_site(name: str, device: str, num_devices: int) -> Site:
    """A site called `name` with `num_devices` of the catalogue's `device` and the links that a file gets by default."""
    return WrittenSite(
        name=name, device=WrittenDevice(preset=preset_device(device).name), num_devices=num_devices
    ).resolve()
