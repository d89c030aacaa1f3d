"""Reading job.toml."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from farpipe.spec.cluster import Cluster
from farpipe.spec.job import Job
from farpipe.spec.written import WrittenClusterFile, WrittenJob
from farpipe.strict import parse_toml, read_text, validate


def load_job(path: Path | str) -> Job:
    """The job in the file at `path`.

    Raises InputError that names file, key path and value for a file that can't be read, is not TOML, has unknown or
    missing keys, or asks for something impossible.
    """
    return parse_job(read_text(path), str(path), Path(path).parent)


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
    """`table`, with the folder before the names of matrices that are in it; others are seen from where farpipe runs."""
    cluster = table.get("cluster")
    matrices = cluster.get("matrices") if isinstance(cluster, dict) else None
    if folder is None or not isinstance(matrices, dict):
        return table
    for key in ("throughput", "rtt", "egress"):
        name = matrices.get(key)
        with suppress(OSError, ValueError):  # what is no path at all is told when it is read
            if isinstance(name, str) and (folder / name).is_file():
                matrices[key] = str(folder / name)
    return table


def job_of(table: dict[str, Any], source: str) -> Job:
    """The job that a table of job.toml stands for; `source` is what errors call it."""
    job: Job = validate(WrittenJob, table, source).resolve()
    return job


def load_cluster(path: Path | str) -> Cluster:
    """The cluster of the job in the file at `path`, or of a file that has nothing else; InputError as `load_job`."""
    text = read_text(path)
    table = _found_from(Path(path).parent, parse_toml(text, str(path)))
    if set(table) - {"cluster"}:
        return parse_job(text, str(path), Path(path).parent).cluster
    return validate(WrittenClusterFile, table, str(path), toml=text).resolve()
