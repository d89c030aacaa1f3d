"""The processes of one stage as a mesh of torch, and the torch world of a site that the mesh lies in."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from farpipe.core.errors import InputError
from farpipe.engine.run_settings import TransportSettings

DATA: Final = "data"
"""Mesh dimension of the replicas of a stage that share its weights by FSDP2."""
CONTEXT: Final = "context"
"""Mesh dimension of the processes that share every sequence, and the weights as replicas do."""
TENSOR: Final = "tensor"
"""Mesh dimension of the processes that share every layer of a stage; neighbouring numbers."""


def join_site(store: Store, site: str, process: int, num_processes: int, *, device: str, timeout_s: float) -> None:
    """Make the torch world of the processes at `site`, `process` being this one's number among them.

    Other sites of the run may use the same `store`: NCCL and gloo never see them. A collective that waits longer than
    `timeout_s` breaks. InputError where this build of torch lacks NCCL and the run's `device` needs it.
    """
    # The run's device decides, not what torch was built with: PyPI's torch has NCCL on machines without a GPU too,
    # where asking for it ends every run.
    if device == "cuda" and not dist.is_nccl_available():
        raise InputError("device 'cuda': this build of torch has no NCCL, which processes of a stage on GPUs need")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=PrefixStore(f"site {site}", store),
        rank=process,
        world_size=num_processes,
        timeout=timedelta(seconds=timeout_s),
        # NCCL's communicators are made here, not within the first step, whose seconds count
        device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
    )


@contextmanager
def site_world(
    store: Store, site: str, process: int, num_processes: int, *, device: str, timeout_s: float
) -> Iterator[None]:
    """Context in which torch's world is that of `join_site`."""
    join_site(store, site, process, num_processes, device=device, timeout_s=timeout_s)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage_mesh(device: str, *, data: int, context: int = 1, tensor: int = 1) -> DeviceMesh:
    """The mesh ``(DATA, CONTEXT, TENSOR)`` of this process's stage: torch's world in blocks of neighbours.

    All processes of the world make it at once. InputError if the world does not divide into such blocks.
    """
    world = dist.get_world_size()
    size = data * context * tensor
    if world % size:
        raise InputError(
            f"{world} processes of this site can't be divided into stages of {data} replicas x {context} "
            f"context-parallel x {tensor} tensor-parallel processes; start a multiple of {size}"
        )
    names = ("stage", DATA, CONTEXT, TENSOR)
    every = init_device_mesh(device, (world // size, data, context, tensor), mesh_dim_names=names)
    return every[DATA, CONTEXT, TENSOR]


def process_groups(
    processes: DeviceMesh, degrees: Iterable[int], *, timeout_s: float
) -> dict[tuple[int, int], dist.ProcessGroup | None]:
    """(first process, degree) -> group of that many neighbours in a mesh of one dimension; None for one process alone.

    All processes of the world make them at once; a process uses those that it is in. A collective that waits longer
    than `timeout_s` breaks.
    """
    world = dist.get_process_group_ranks(processes.get_group())
    places = [(first, d) for d in degrees for first in range(0, len(world) - d + 1, d)]
    limit = timedelta(seconds=timeout_s)
    return {
        (first, d): None if d == 1 else dist.new_group(world[first : first + d], timeout=limit) for first, d in places
    }


def longest_collective_s(transport: TransportSettings) -> float:
    """Longest wait inside a collective of a site: its other processes may wait for a link during an outage."""
    return transport.timeout_s + transport.outage_s


def limit_collectives(timeout_s: float) -> None:
    """Let collectives of all groups of this process break after `timeout_s`; torch gives those of meshes 10 minutes
    with NCCL and 30 with gloo, whatever the limit of the world.
    """
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def shares_in(mesh: DeviceMesh) -> DeviceMesh:
    """The one dimension of `mesh` over which weights are divided: DATA, with CONTEXT where sequences are shared.

    All processes make it at once.
    """
    return mesh[DATA, CONTEXT]._flatten("shares") if mesh[CONTEXT].size() > 1 else mesh[DATA]
