"""Reading job.toml, and parts of a job from the catalogue for use from Python."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farpipe.core.catalog import device_row, model_row
from farpipe.core.errors import InputError
from farpipe.core.spec.cluster import Cluster, Device, Site
from farpipe.core.spec.hugging_face import read_config
from farpipe.core.spec.job import Job
from farpipe.core.spec.model import Model
from farpipe.core.spec.written import WrittenClusterFile, WrittenDevice, WrittenJob, WrittenModel, WrittenSite
from farpipe.core.strict import parse_toml, read_text, seen_from, validate


def load_job(source: Path | str | Job, changes: Mapping[str, Any] | None = None) -> Job:
    """Read the job in a file, or take a job, and change values of it.

    `changes` maps keys of job.toml, with dots and counting from 0 (``"cluster.links.0.latency"``), to values as
    they are written there (``"80 ms"``); None removes a key. The job is checked as a whole, as if its file said so.

    Raises InputError that names file, key path and value for a file that can't be read, is not TOML, has unknown or
    missing keys, or asks for something impossible, and for a change of a place that the job does not have.
    """
    if isinstance(source, Job):
        return _changed(parse_toml(source.to_toml(), "job"), changes, "job") if changes else source
    if changes:
        return _changed(load_table(source), changes, str(source))
    return parse_job(read_text(source), str(source), Path(source).parent)


def _changed(table: dict[str, Any], changes: Mapping[str, Any], source: str) -> Job:
    for key, value in changes.items():
        *outer, last = key.split(".")
        inner: Any = table
        for depth, word in enumerate(outer, 1):
            inner = _inside(inner, word, source, key, ".".join(outer[:depth]))
        at: Any = _index(inner, last, source, key) if isinstance(inner, list) else last
        if value is not None:
            inner[at] = value
        elif isinstance(inner, list) or last in inner:
            del inner[at]
    return job_of(table, source)


def _inside(table: Any, word: str, source: str, key: str, place: str) -> Any:
    """The table or list under `word`, made where a table lacks it."""
    found = table[_index(table, word, source, key)] if isinstance(table, list) else table.setdefault(word, {})
    if not isinstance(found, dict | list):
        raise InputError(f"{source}: {key}: {place} is a value, {found!r}, not a table")
    return found


def _index(items: list[Any], word: str, source: str, key: str) -> int:
    if word.isdecimal() and int(word) < len(items):
        return int(word)
    raise InputError(f"{source}: {key}: expected a number from 0 to {len(items) - 1} in the place of {word!r}")


def parse_job(text: str, source: str = "job.toml", folder: Path | None = None) -> Job:
    """The job in `text`, the content of a job.toml in `folder`; `source` is what errors call it."""
    written = validate(WrittenJob, _found_from(folder, parse_toml(text, source)), source, toml=text)
    return written.resolve().model_copy(update={"text": text})


def load_table(path: Path | str) -> dict[str, Any]:
    """The table in the file at `path`, as it stands there but for files beside it, which have their folder; InputError
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
    """The job that a table of job.toml stands for; `source` is what errors call it."""
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
