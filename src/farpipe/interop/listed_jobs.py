"""Jobs as a cluster lists them: their times, and those of Kubernetes with the devices that their pods ask for."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

from farpipe.core.strict import as_utc
from farpipe.interop.cells import whole


@dataclass(frozen=True)
class ListedJob:
    """A job as its scheduler lists it."""

    name: str
    submitted: datetime | None
    duration_s: float | None
    """Time on its devices; None: it has not ended, or never began."""
    num_devices: int
    tenant: str
    left_out: str = ""
    """Reason for which a fleet can't run it, in words; empty: it may."""
    is_start_assumed: bool = False
    """True where the list does not tell its start, so that it counts from its creation."""


_KINDS: Final = (
    *("Workload", "Job", "JobSet", "RayJob", "PyTorchJob", "MPIJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob"),
)
"""Kinds of records that are jobs: of Kueue, Kubernetes and Volcano, JobSet, KubeRay and Kubeflow's trainer."""
_BEGINS: Final = ("Admitted", "Running")
_ENDS: Final = ("Finished", "Completed", "Complete", "Succeeded", "Failed", "Aborted", "Terminated")
"""Conditions with whose moment a job begins and ends."""


def jobs_of_kubernetes(source: str, rows: Sequence[Any], zone: tzinfo) -> Iterator[ListedJob]:
    """Jobs from ``kubectl get ... -o json``, from their last start to their end; what another record here stands for
    counts once, and a record of another kind is named."""
    owners = [{*_owners(row)} for row in rows]
    workloads = (of_row for row, of_row in zip(rows, owners, strict=True) if row.get("kind") == "Workload")
    admitted = {owner for of_row in workloads for owner in of_row}
    known = {_key(row) for row in rows} - admitted
    names = Counter(_name(row) for row in rows)
    for index, (row, of_row) in enumerate(zip(rows, owners, strict=True)):
        name = _name(row) if names[_name(row)] == 1 else f"{_name(row)} ({row.get('kind')})"
        if _key(row) in admitted or known & of_row:
            yield _left_out(name, "that are in the list twice")
        elif row.get("kind") not in _KINDS:
            yield _left_out(name, f"of a kind that is not read ({row.get('kind')!s:.40})")
        else:
            yield _job(name, row, f"{source}: items[{index}]", zone)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['metadata'].get('namespace', 'default')}/{row['metadata']['name']}"


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("kind"), _name(row)


def _owners(row: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for one in row["metadata"].get("ownerReferences") or ():
        yield one.get("kind"), f"{row['metadata'].get('namespace', 'default')}/{one.get('name')}"


def _left_out(name: str, why: str) -> ListedJob:
    return ListedJob(name, None, None, 0, "", why)


def _job(name: str, row: Mapping[str, Any], place: str, zone: tzinfo) -> ListedJob:
    meta, spec, status = row["metadata"], row["spec"], row.get("status") or {}
    begin, end = _ends(status)
    is_assumed = begin is None and end is not None and row["kind"] == "JobSet"  # it tells no start
    span = {"begin": meta.get("creationTimestamp") if is_assumed else begin, "end": end}
    return ListedJob(
        name,
        moment(meta.get("creationTimestamp"), f"{place}: creationTimestamp", zone),
        span_s(span, "begin", "end", place, zone),
        sum(whole(count, place) * _gpus_of_pod(pod["spec"], place) for count, pod in _pods(spec)),
        str(spec.get("queueName") or spec.get("queue") or meta.get("namespace") or ""),
        is_start_assumed=is_assumed,
    )


def _ends(status: Mapping[str, Any]) -> tuple[Any, Any]:
    """Moments of the last start and of the end, by conditions or by the status itself."""
    when = {name: at for item in status.get("conditions") or () for name, at in _conditions(item)}
    begin = next(filter(None, map(when.get, _BEGINS)), None) or status.get("startTime") or when.get("Resumed")
    end = next(filter(None, map(when.get, _ENDS)), None) or status.get("completionTime") or status.get("endTime")
    return begin, end


def _conditions(item: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(name, moment) of a condition that holds: Kueue's has a type and "True", Volcano's its phase as status."""
    if item.get("status") != "False":
        yield item.get("type") or str(item.get("status")), item.get("lastTransitionTime")
    elif item.get("type") == "Suspended":
        yield "Resumed", item.get("lastTransitionTime")


def _pods(spec: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Templates of pods of a job of any kind, each with how many of them run at a time."""
    for part in (*(spec.get("podSets") or ()), *(spec.get("tasks") or ())):
        yield part.get("count", part.get("replicas", 1)), part["template"]
    for part in spec.get("replicatedJobs") or ():
        for count, pod in _pods(part["template"]["spec"]):
            yield count * part.get("replicas", 1), pod
    for key in (key for key in spec if key.endswith("ReplicaSpecs")):
        for part in spec[key].values():
            yield part.get("replicas", 1), part["template"]
    if ray := spec.get("rayClusterSpec"):
        yield 1, ray["headGroupSpec"]["template"]
        for part in ray.get("workerGroupSpecs") or ():
            yield part.get("replicas", 1) * part.get("numOfHosts", 1), part["template"]
    if "template" in spec:
        yield min(spec.get("parallelism", 1), spec.get("completions") or math.inf), spec["template"]


_DEVICE: Final = re.compile(
    r".+/(gpu(\.shared)?|tpu|npu|dcu|mlu|xpu|gaudi\d?|neuron(device)?|i915|xe|vgpu(-number)?|Ascend\d\w*|mig-[\w.]+)"
)
"""Extended resources that count devices, or parts of them that a pod gets as one (MIG, vGPU); none of memory or cores:
NVIDIA, AMD, Intel (GPU, Gaudi), Google, AWS, Huawei, Cambricon, Hygon, Kunlunxin, Volcano's vGPU."""


def _gpus_of_pod(spec: Mapping[str, Any], place: str) -> int:
    """Devices of any vendor that the containers of a pod ask for (``nvidia.com/gpu``, ``huawei.com/Ascend910``)."""
    asked = [box.get("resources") or {} for box in spec["containers"]]
    wanted = [{**(one.get("limits") or {}), **(one.get("requests") or {})} for one in asked]
    counts = [count for one in wanted for name, count in one.items() if _DEVICE.fullmatch(name)]
    return sum(whole(count, f"{place}: resources") for count in counts)


def span_s(row: Mapping[str, Any], begin: str, end: str, place: str, zone: tzinfo) -> float | None:
    ends = moment(row.get(begin), f"{place}: {begin}", zone), moment(row.get(end), f"{place}: {end}", zone)
    return None if ends[0] is None or ends[1] is None else (ends[1] - ends[0]).total_seconds()


def moment(text: Any, place: str, zone: tzinfo) -> datetime | None:
    """A moment in ISO 8601, of `zone` if it names none, or in seconds since 1970; None where there is none."""
    if text in (None, "", "Unknown", "None"):
        return None
    if re.fullmatch(r"\d{9,11}(\.\d+)?", str(text)):
        return datetime.fromtimestamp(float(text), UTC)
    return as_utc(str(text), place, zone)
