"""The process group: torch's calls, answered by farpipe's transport."""

import atexit
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from farpipe.core.errors import FarpipeError, InputError, RunError, spoken
from farpipe.engine.executor.peers import TensorPeers
from farpipe.engine.executor.staging import message_memory
from farpipe.engine.rendezvous import TorchStore
from farpipe.engine.replicas.background import BackgroundThread
from farpipe.engine.transport import LinkEvent, PeerError, Rendezvous, Transport, connect
from farpipe.engine.transport.inbox import Allocate
from farpipe.engine.transport.meeting import telling_others
from farpipe.engine.transport.rendezvous import TOKEN_VARIABLE
from farpipe.torch.collectives import GroupCollectives, GroupMessages, reduction_name
from farpipe.torch.options import Options
from farpipe.torch.point_to_point import DEVICES, LENT_BYTES, PointToPoint, expect_path, is_plain
from farpipe.torch.works import FutureWork, raised_as_torch

NAME: Final = "farpipe"
_groups_made = itertools.count()


def register() -> None:
    """Make "farpipe" known to torch.distributed as a backend for tensors on CPUs and CUDA devices."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def link_events(group: "FarpipeGroup | None" = None) -> list[LinkEvent]:
    """Outages, reconnections and retransmissions of `group` (None: the default one) since the last call."""
    found = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(found, FarpipeGroup):
        raise ValueError(f"the group's backend is {dist.get_backend(found)!r}, and only {NAME!r} has link events")
    return found.transport.take_events()


def create(settings: Any, options: Options | None) -> "FarpipeGroup":
    """Connect the ranks of a new group; called by torch on each of them, with `pg_options`.

    ValueError for options that make no sense or differ between the ranks, DistBackendError where a rank does not come.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of the backend {NAME!r} are farpipe.torch.Options, found {type(options).__name__}")
    with raised_as_torch():
        options = options or Options.from_environment()
        transport = _connect(settings, options)
    return FarpipeGroup(transport, str(settings.group_id), options.max_message_bytes)


def _connect(settings: Any, options: Options) -> Transport:
    rank, size, timeout_s = settings.group_rank, settings.group_size, settings.timeout.total_seconds()
    token = os.environ.get(TOKEN_VARIABLE)

    def rendezvous(name: str) -> Rendezvous:
        store = TorchStore(dist.PrefixStore(name, settings.store))  # type: ignore[attr-defined]
        return Rendezvous(store, rank, size, token.encode() if token else None)

    options_meeting, meeting = rendezvous("options"), rendezvous("transport")
    with telling_others(options_meeting):
        introductions = options_meeting.introduce(options.introduction(), timeout_s)
    shift = int(os.environ.get("LOCAL_RANK", "0"))
    shift += next(_groups_made) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with telling_others(meeting):
        config = options.config(rank, introductions, timeout_s, shift)
    return connect(rank, size, config, meeting, allocate=_message_memory())


def _message_memory() -> Allocate:
    """Memory for received messages; page-locked once this process computes on a GPU, not already where there is one.

    Asked sooner, torch would open the machine's first GPU in each process that has not chosen its own yet, and for
    groups of CPU tensors for nothing.
    """
    ordinary, page_locked = message_memory("cpu"), message_memory("cuda")
    return lambda num_bytes: (page_locked if torch.cuda.is_initialized() else ordinary)(num_bytes)  # type: ignore[no-untyped-call]


class FarpipeGroup(dist.ProcessGroup):
    """A torch process group whose messages and collectives go over `transport`; `name` is torch's for it."""

    def __init__(self, transport: Transport, name: str, max_message_bytes: int) -> None:
        super().__init__(transport.rank, transport.world_size)  # type: ignore[call-arg]
        self.transport, self._name = transport, name
        self._messages = PointToPoint(TensorPeers(transport), max_message_bytes)
        sites = [transport.site(rank) for rank in range(transport.world_size)]
        self._collectives = GroupCollectives(transport.rank, sites)
        self._numbers = itertools.count()
        self._beside = BackgroundThread(f"farpipe collectives of {transport.rank}")
        self._closed, self._process = False, os.getpid()
        self.num_pipelines = itertools.count()
        """Numbers for the pipelines over this group, which keep their messages apart."""
        self.before_end: list[Callable[[], None]] = []
        """Calls to make when the group is destroyed, while all ranks are still there."""
        atexit.register(self._leave)

    def getBackendName(self) -> str:  # noqa: N802
        """The name that torch shows."""
        return NAME

    name = getBackendName

    def _get_backend(self, device: Any) -> "FarpipeGroup":
        """The group that sends and receives for `device`: this one for all."""
        return self

    # torch asks a backend for these
    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    def getGroupName(self) -> str:  # noqa: N802
        """The name by which torch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take another name."""
        self._name = name

    # Messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FutureWork:
        """Send the only one of `tensors` to rank `peer` of this group."""
        with raised_as_torch():
            return self._messages.send(_only(tensors), peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FutureWork:
        """Fill the only one of `tensors` with what rank `peer` of this group sends."""
        with raised_as_torch():
            return self._messages.receive(_only(tensors), peer, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> FutureWork:
        """Refuse: ValueError."""
        raise ValueError(
            "farpipe can't receive from any source: every message is asked for by its sender, so that what is received "
            "does not depend on what arrives first; name the source in recv(tensor, src=...)"
        )

    # Collectives: done one after the other by a thread

    def _start(
        self,
        what: str,
        inputs: Sequence[Tensor],
        work: Callable[[list[Tensor], GroupMessages], list[Tensor]],
        outputs: Any,
        *,
        spoils: bool = False,
    ) -> FutureWork:
        """Do `work` on contiguous forms of `inputs` in CPU memory; what it returns is copied to `outputs`.

        Those are copies of short tensors and on request (`spoils`: `work` writes to them, and the caller's stay as they
        are), and else the caller's memory, which is the caller's again when the work is done.
        """
        with raised_as_torch():
            for tensor in (*inputs, *outputs):
                expect_path(tensor)
        line = GroupMessages(self.transport, next(self._numbers), what)
        own = [_host_copy(tensor) if spoils else _on_host(tensor) for tensor in inputs]
        targets = [tensor.detach() for tensor in outputs]
        on_gpu = any(tensor.is_cuda for tensor in targets)

        def fill(results: list[Tensor]) -> None:
            with torch.no_grad():
                for target, result in zip(targets, results, strict=bool(results)):
                    if result.data_ptr() != target.data_ptr():
                        target.copy_(result.view(target.shape))

        def run() -> list[Tensor]:
            with self._aborting(what):
                results = work(own, line)
                line.end()
                if not on_gpu:
                    fill(results)
            return results

        return FutureWork(self._beside.start(run), what, self.transport.check, list(outputs), fill if on_gpu else None)

    @contextmanager
    def _aborting(self, what: str) -> Iterator[None]:
        """End the group on all ranks where the collective `what` fails."""
        try:
            yield
        except FarpipeError as error:
            self.transport.abort(str(error))
            raise
        except RuntimeError as error:  # shapes that don't fit
            self.transport.abort(f"{what}: {error}")
            raise RunError(f"{what}: {error}") from error

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> FutureWork:
        op = _reduction(opts)
        what = _named(f"all_reduce {op}", tensors)
        return self._start(what, tensors, lambda own, line: [self._collectives.all_reduce(own[0], op, line)], tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> FutureWork:
        op, root = _reduction(opts), opts.rootRank
        what = _named(f"reduce {op} to {root}", tensors)
        targets = tensors if root == self.transport.rank else []
        return self._start(
            what,
            tensors,
            lambda own, line: [self._collectives.all_reduce(own[0], op, line)][: len(targets)],
            targets,
            spoils=True,
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> FutureWork:
        root = opts.rootRank
        what = _named(f"broadcast from {root}", tensors)
        return self._start(what, tensors, lambda own, line: [self._collectives.broadcast(own[0], root, line)], tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> FutureWork:
        what, size = _named("all_gather", inputs), self.transport.world_size
        return self._start(
            what,
            inputs,
            lambda own, line: list(self._collectives.all_gather(own[0], line).tensor_split(size)),
            outputs[0],
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> FutureWork:  # noqa: A002
        what = _named("all_gather", [input])
        return self._start(what, [input], lambda own, line: [self._collectives.all_gather(own[0], line)], [output])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> FutureWork:
        op = _reduction(opts)
        what = _named(f"reduce_scatter {op}", outputs)

        def work(own: list[Tensor], line: GroupMessages) -> list[Tensor]:
            return [self._collectives.reduce_scatter(torch.cat([part.view(-1) for part in own]), op, line)]

        return self._start(what, inputs[0], work, outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> FutureWork:  # noqa: A002
        op = _reduction(opts)
        what = _named(f"reduce_scatter {op}", [output])
        return self._start(
            what, [input], lambda own, line: [self._collectives.reduce_scatter(own[0], op, line)], [output], spoils=True
        )

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> FutureWork:
        root = opts.rootRank
        what = _named(f"gather to {root}", inputs)
        targets = outputs[0] if outputs else []
        return self._start(what, inputs, lambda own, line: self._collectives.gather(own[0], root, line), targets)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> FutureWork:
        root = opts.rootRank
        what = _named(f"scatter from {root}", outputs)
        sources = inputs[0] if inputs else []
        return self._start(what, sources, lambda own, line: [self._collectives.scatter(own, root, line)], outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> FutureWork:
        return self._start("all_to_all", inputs, self._collectives.to_all, outputs)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> FutureWork:
        outputs, inputs = _parts(output, output_split_sizes, self), _parts(input, input_split_sizes, self)
        return self._start("all_to_all_single", inputs, self._collectives.to_all, outputs)

    # the names that torch calls from 2.13 on
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> FutureWork:
        def work(_: list[Tensor], line: GroupMessages) -> list[Tensor]:
            self.transport.exchange(f"farpipe.torch {number}", b"", waiting_for="barrier")
            return []

        number = next(self._numbers)
        return self._start("barrier", [], work, [])

    # The end

    def abort(self) -> None:
        """End the group on all ranks; every wait raises."""
        self.transport.abort("the group was aborted")
        self._end()

    def shutdown(self) -> None:
        """Send what is queued and leave; called by `destroy_process_group`. A warning names sends without a receive."""
        if self._closed or os.getpid() != self._process:
            return
        try:
            self._finish()
            lines = self._messages.end()
        except RunError:  # the group is broken, and whoever waited has heard why
            lines = []
        for line in lines:
            warnings.warn(f"farpipe, destroying the group on rank {self.transport.rank}: {line}", stacklevel=2)
        self._end()

    def _finish(self) -> None:
        while self.before_end:
            self.before_end.pop(0)()

    def _end(self) -> None:
        self._closed = True
        atexit.unregister(self._leave)
        try:
            self.transport.close()
        except PeerError as error:
            warnings.warn(f"farpipe, leaving the group on rank {self.transport.rank}: {error}", stacklevel=3)

    def _leave(self) -> None:
        """Leave at the end of a process that has not destroyed the group: the others hear why it ends."""
        if os.getpid() != self._process:  # the group is the parent's
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.transport.abort(spoken(error))
        else:
            with suppress(RunError):
                self._finish()
        self._end()


def farpipe_group(group: Any) -> FarpipeGroup:
    """The group itself if it is farpipe's, or a new one of its ranks, with the options in the environment."""
    found = group or dist.group.WORLD
    if isinstance(found, FarpipeGroup):
        return found
    ranks = dist.get_process_group_ranks(found)
    made = dist.new_group(ranks, backend=NAME, use_local_synchronization=True)
    assert isinstance(made, FarpipeGroup)
    return made


def _only(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise InputError(f"a message is one tensor, found {len(tensors)}")
    return tensors[0]


def _reduction(opts: Any) -> str:
    with raised_as_torch():
        return reduction_name(opts.reduceOp)


def _host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in CPU memory; of what a GPU has it is there when this returns."""
    plain = tensor.detach().resolve_neg()
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor itself if it is long and its memory can be sent; a copy otherwise."""
    return tensor.detach() if tensor.nbytes >= LENT_BYTES and is_plain(tensor) else _host_copy(tensor)


def _named(what: str, tensors: Sequence[Tensor]) -> str:
    with raised_as_torch():
        first = _only(tensors)
    return f"{what} of {first.numel()} x {str(first.dtype).removeprefix('torch.')}"


def _parts(tensor: Tensor, sizes: Sequence[int], group: FarpipeGroup) -> list[Tensor]:
    """The rows of `tensor` for each rank; without `sizes` equal shares."""
    if not sizes and tensor.shape[0] % group.size():
        raise ValueError(f"{tensor.shape[0]} rows can't be shared out evenly among {group.size()} ranks")
    shares = list(sizes) or [tensor.shape[0] // group.size()] * group.size()
    return list(torch.split(tensor, shares))
