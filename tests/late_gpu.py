"""A GPU as bad as it may be: what it is given is done only when somebody waits for it. Takes the place of torch.cuda.

Its tensors are CPU tensors. Memory that nobody has written to yet is full of nonsense, and so is what is copied out of
memory that was let go of too soon; so whatever forgets to wait, or to keep, gets the wrong numbers every time.
"""

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque

import torch
from torch.overrides import TorchFunctionMode

INDEX = 3
"""This process's GPU; a new thread's is 0, as with CUDA."""
LIMIT_S = 20.0
_CUDA = 1  # c10::DeviceType
_numbers = itertools.count(1)


class LateStream(torch.Stream):
    """Work in its order; an `eager` stream does it at once."""

    def __new__(cls, gpu, **options):
        return super().__new__(cls, stream_id=next(_numbers), device_index=INDEX, device_type=_CUDA)

    def __init__(self, gpu, *, eager=False):
        self.gpu, self.eager, self.waiting, self.num_done = gpu, eager, deque(), 0

    @property
    def end(self):
        with self.gpu.lock:
            return self.num_done + len(self.waiting)

    def add(self, work):
        with self.gpu.lock:
            self.waiting.append(work)
            if self.eager:
                self.reach(self.end)

    def reach(self, place):
        with self.gpu.lock:
            while self.num_done < place:
                work = self.waiting.popleft()
                work()
                self.num_done += 1

    def wait_stream(self, other):
        place = other.end
        self.add(lambda: other.reach(place))

    def wait_event(self, event):
        self.add(lambda: event.stream.reach(event.place))

    def record_event(self, event):
        event.happen(self)
        return event

    def synchronize(self):
        self.gpu.let_go()
        self.reach(self.end)


class LateEvent:
    """A place in a stream and, with `enable_timing`, when it was reached on the GPU's clock."""

    def __init__(self, gpu, *, enable_timing=False, blocking=False):
        self.gpu, self.is_timed, self.when_ms = gpu, enable_timing, None

    def happen(self, stream):
        def note():
            self.when_ms = self.gpu.now_ms()

        with self.gpu.lock:
            stream.add(note)
            self.stream, self.place = stream, stream.end

    def record(self):
        self.happen(self.gpu.current_stream())

    def synchronize(self):
        assert self.gpu.device_of_thread() == INDEX, "the thread would make itself a context on the first GPU"
        assert self.gpu.may_go.wait(LIMIT_S)
        self.gpu.fail_if_broken()
        self.stream.reach(self.place)

    def elapsed_time(self, end):
        assert self.is_timed
        assert end.is_timed
        return end.when_ms - self.when_ms


class LateGpu(TorchFunctionMode):
    """`eager`: whether what is computed is done at once, as torch computes on a CPU.

    While `may_go` is not set, waits for events of copies take until it is.
    """

    def __init__(self, *, eager=False, now_ns=time.monotonic_ns):
        super().__init__()
        self.lock, self.may_go, self.error, self._now_ns = threading.RLock(), threading.Event(), None, now_ns
        self.may_go.set()
        self.computing, self.used = LateStream(self, eager=eager), []
        self._of_thread = threading.local()
        self.set_device(INDEX)

    # What the code under test uses of torch.cuda

    def Stream(self):  # noqa: N802
        return LateStream(self)

    def Event(self, **options):  # noqa: N802
        return LateEvent(self, **options)

    def current_stream(self, device=None):
        return getattr(self._of_thread, "stream", self.computing)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._of_thread.stream = stream
        yield
        self._of_thread.stream = before

    def current_device(self):
        return self.device_of_thread()

    def set_device(self, device):
        self._of_thread.device = torch.device("cuda", device).index if isinstance(device, int) else device.index

    # What torch's functions do to its tensors

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.pop("pin_memory", False):
            return pinned(nonsense(func(*args, **kwargs)))
        if func is torch.Tensor.is_pinned:
            return hasattr(args[0], "is_in_pinned_memory")
        if func is torch.Tensor.pin_memory:
            return pinned(args[0].clone())
        if func is torch.Tensor.__getitem__ and hasattr(args[0], "is_in_pinned_memory"):
            return pinned(func(*args, **kwargs))
        if func is torch.Tensor.record_stream:
            return self._keep(*args)
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            return self._copy(*args)
        if func is torch.Tensor.to and args[1:2] == (torch.device("cuda", INDEX),) and kwargs == {"non_blocking": True}:
            return self._copy(nonsense(torch.empty_like(args[0])), args[0], keeps=True)
        if func is torch.Tensor.to and any(isinstance(a, torch.device) and a.type == "cuda" for a in args):
            return args[0]  # a copy that waits, of what is there
        return func(*args, **kwargs)

    def _keep(self, tensor, stream):
        self.used.append((tensor, stream))
        stream.add(lambda: tensor)

    def _copy(self, target, source, *, keeps=False):
        """torch keeps page-locked memory (`keeps`) until it is copied, but not that of the GPU; of a part of a tensor
        the rest is taken to be kept by others."""
        assert hasattr(source if keeps else target, "is_in_pinned_memory"), "CUDA would not copy it beside computing"
        is_part = source.nbytes < source.untyped_storage().nbytes()
        kept, reference = source if keeps or is_part else None, weakref.ref(source)

        def work():
            found = kept if keeps else reference()
            with torch._C.DisableTorchFunction():
                nonsense(target) if found is None else target.copy_(found)

        self.current_stream().add(work)
        return target

    # What tests do

    def compute(self, work):
        """Give the computing stream something to do."""
        self.computing.add(work)

    def device_of_thread(self):
        return getattr(self._of_thread, "device", 0)

    def let_go(self):
        assert self.may_go.wait(LIMIT_S)

    def fail_if_broken(self):
        if self.error is not None:
            raise self.error

    def now_ms(self):
        """Its clock began at another time than the host's."""
        return self._now_ns() * 1e-6 + 1e6


def nonsense(tensor):
    """The tensor, filled with what can't be mistaken for a result."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def pinned(tensor):
    """The tensor, said to be in page-locked memory."""
    tensor.is_in_pinned_memory = True
    return tensor
