"""Manifests that start a run at its sites: a JobGroup of SkyPilot, and a JobSet of Kubernetes per site."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from farpipe import __version__
from farpipe.engine.launch.machines import MASTER_PORT, Group, Machine, by_site, certificates_of, script_of

GROUP_NAME: Final = "skypilot.yaml"
CLAIM: Final = "farpipe-runs"
"""Volume claim with the run directory, in Kubernetes."""
IMAGE: Final = f"farpipe/farpipe:{__version__}"
"""Image of this version, as `Containerfile` makes it; with ``-cuda`` where there are GPUs."""
_LARGE: Final = {"a100-80gb": "A100-80GB", "v100-32gb": "V100-32GB"}
"""Devices whose size of memory is in SkyPilot's name."""
_HOST: Final = '"$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")"'


def skypilot_group(machines: Sequence[Machine], run_dir: Path, max_restarts: int, devices: Mapping[str, str]) -> str:
    """A JobGroup of SkyPilot (docs.skypilot.co, Job Groups; 0.14): a task per group of machines.

    SkyPilot joins no networks of different infrastructures, so the tasks share no rendezvous of its own
    (`inter_connection`): MASTER_ADDR is given. `devices` are the catalogue's names of the sites' GPUs.
    """
    header = "name: farpipe\nexecution: parallel\ninter_connection: false\n"
    tasks = [_task(machines, group, run_dir, max_restarts, devices) for group in by_site(machines)]
    return "---\n".join((header, *tasks))


def _task(
    machines: Sequence[Machine], group: Group, run_dir: Path, max_restarts: int, devices: Mapping[str, str]
) -> str:
    script = script_of(machines, group, run_dir, max_restarts, "SKYPILOT_NODE_RANK", _HOST)
    site, most = group.machines[0].site, max(machine.num_processes for machine in group.machines)
    lines = [
        f"name: {label_of(group.name)}",
        f"num_nodes: {len(group.machines)}",
        "resources:",
        f"  # infra: where {site} is, such as aws/us-west-2 or k8s/context",
        f"  image_id: docker:{IMAGE}{'-cuda' * (site in devices)}",
        *([f"  accelerators: {_accelerator(devices[site])}:{most}"] if site in devices else []),
        f"  ports: {MASTER_PORT}",
        "envs:",
        "  MASTER_ADDR: null",
        "file_mounts:",
        f"  {run_dir.absolute()}: {run_dir.absolute()}",
        f"  {run_dir.absolute().parent}/{certificates_of(site)}: {certificates_of(site)}",
        "run: |",
        *(f"  {line}" for line in script.splitlines()),
    ]
    return "\n".join([*lines, ""])


def _accelerator(device: str) -> str:
    """SkyPilot's name of a device."""
    words = device.upper().split("-")
    if words[0] == "RTX":
        return "".join(words)
    return _LARGE.get(device, words[0])


def jobsets(machines: Sequence[Machine], run_dir: Path, max_restarts: int, *, with_gpus: bool) -> dict[str, str]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) per group of machines, by file name: a pod per machine.

    Sites have a Kubernetes each. JSON is YAML too, so ``kubectl apply -f`` takes it.
    """
    return {
        f"{group.name}.jobset.json": json.dumps(_jobset(machines, group, run_dir, max_restarts, with_gpus), indent=1)
        for group in by_site(machines)
    }


def _jobset(
    machines: Sequence[Machine], group: Group, run_dir: Path, max_restarts: int, with_gpus: bool
) -> dict[str, Any]:
    script = script_of(machines, group, run_dir, max_restarts, "JOB_COMPLETION_INDEX", "$POD_IP")
    most = max(machine.num_processes for machine in group.machines) if with_gpus else 0
    env: list[dict[str, Any]] = [
        {"name": "MASTER_ADDR", "value": machines[0].address},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    mount, count = run_dir.absolute().parent, len(group.machines)
    return jobset(f"farpipe-{label_of(group.name)}", script, count, mount, num_gpus=most, env=env)


def jobset(
    name: str,
    script: str,
    num_machines: int,
    mount: Path,
    *,
    num_gpus: int = 0,
    image: str = IMAGE,
    claim: str = CLAIM,
    env: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A JobSet that runs a script of bash once on every machine; `mount` is where its volume claim is seen there."""
    pod = _pod(script, mount, num_gpus, f"{IMAGE}-cuda" if num_gpus and image == IMAGE else image, claim, env)
    counts = {"parallelism": num_machines, "completions": num_machines, "completionMode": "Indexed"}
    job = {
        "name": "stages",
        "replicas": 1,
        "template": {"spec": counts | {"backoffLimit": 0, "template": {"spec": pod}}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [job]},
    }


def _pod(
    script: str, mount: Path, num_gpus: int, image: str, claim: str, env: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Specification of a machine's pod."""
    container = {
        "name": "farpipe",
        "image": image,
        "command": ["bash", "-c", script],
        "env": [*env],
        "volumeMounts": [{"name": "runs", "mountPath": str(mount)}],
        **({"resources": {"limits": {"nvidia.com/gpu": num_gpus}}} if num_gpus else {}),
    }
    return {
        "restartPolicy": "Never",
        "hostNetwork": True,  # other sites reach the machine, not the pod
        "dnsPolicy": "ClusterFirstWithHostNet",
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}],
    }


def label_of(name: str) -> str:
    """A site's name as both systems take it: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
