"""Another order while a user's pipeline runs: announced by rank 0, taken by all ranks before the same step.

Rank 0 sends, when it begins a step, the order that the next one is to have; the others take that message when they
begin the next one. It had a whole step to arrive, so no rank waits for it, and steps need no exchange between them.
"""

import json
from collections.abc import Callable, Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from farpipe.core.step import Schedule
from farpipe.engine.executor.commands import Watch
from farpipe.engine.transport import Tag, Transport

KIND: Final = "sync"
NO_MICROBATCH: Final = -1
"""Microbatch in the names of announcements, which keeps them apart from a collective's pieces."""


class OrderChanges:
    """One rank's part in going over to other orders between two steps."""

    def __init__(
        self, transport: Transport, first_tag: int, watch: Watch | None, share: Callable[[bytes], bytes]
    ) -> None:
        """`watch` proposes orders: on rank 0, or of several pipelines that share weights on rank 0 of the first.

        `share` gives each of these rank 0s the bytes of the first one; called at the same time by all of them.
        """
        self._transport, self._first_tag, self._watch, self._share = transport, first_tag, watch, share
        self._coming: dict[int, bytes] = {}
        self._step = 0

    def begin(self) -> Schedule | None:
        """Order of the step that begins now if it is another than before; on all ranks, ahead of its actions."""
        step = self._step
        self._step += 1
        if self._transport.rank == 0:
            for coming in (step, step + 1) if step == 0 else (step + 1,):
                self._announce(coming)
        text = self._take(step)
        if not text:
            return None
        if self._watch is not None and step:
            self._watch.swapped.put(step - 1)
        return Schedule.from_json(text.decode(), f"order of step {step}")

    def end(self) -> None:
        """Take what was announced for the step that does not come."""
        if self._step:
            self._take(self._step)

    def _announce(self, step: int) -> None:
        text = self._share(self._proposal(step))
        self._coming[step] = text
        for rank in range(1, self._transport.world_size):
            self._transport.send(rank, KIND, self._tag(step), text)

    def _proposal(self, step: int) -> bytes:
        """The order that `step` is to have; nothing where it has that of the step before."""
        if self._watch is None:
            return b""
        schedule = self._watch.first_order if step == 0 else None
        if step and not self._watch.proposals.empty():
            schedule = self._watch.proposals.get()
        return b"" if schedule is None else json.dumps(schedule.to_data()).encode()

    def _take(self, step: int) -> bytes:
        if self._transport.rank == 0:
            return self._coming.pop(step)
        waiting_for = f"rank 0 to announce the order of step {step}"
        return bytes(self._transport.receive(0, KIND, self._tag(step), waiting_for=waiting_for)[0])

    def _tag(self, step: int) -> Tag:
        return Tag(self._first_tag + step, 0, NO_MICROBATCH)


def shared_mesh(modules: Iterable[nn.Module]) -> DeviceMesh | None:
    """Mesh of the processes that share these stages' weights (FSDP, tensor parallelism), each in a pipeline of its own;
    None where weights are not shared. The largest, if parameters are divided in several ways."""
    meshes = {p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor)}
    return max(meshes, key=DeviceMesh.size, default=None)


def is_first(mesh: DeviceMesh | None) -> bool:
    """True on the first process of `mesh`, and where there is none."""
    return mesh is None or not any(mesh.get_coordinate() or ())


def from_first(mesh: DeviceMesh | None, data: bytes) -> bytes:
    """The first process's `data`, on all processes of `mesh`, over torch's own groups of it."""
    for group in [] if mesh is None else mesh.get_all_groups():  # from (0, j) to (i, j), then from (i, 0) to (i, j)
        assert mesh is not None
        size = torch.tensor([len(data)], device=mesh.device_type)
        dist.broadcast(size, group=group, group_src=0)
        if int(size):
            found = torch.zeros(int(size), dtype=torch.uint8, device=mesh.device_type)
            if dist.get_rank(group) == 0:
                found.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(found, group=group, group_src=0)
            data = found.cpu().numpy().tobytes()
    return data
