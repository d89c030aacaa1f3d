"""The host memory that messages lie in."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from farpipe.errors import RunError
from farpipe.transport.inbox import Allocate
from farpipe.units import format_bytes


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """An uninitialised tensor; `pinned`: in page-locked memory, which a GPU copies to and from beside its computing.

    torch keeps page-locked memory in a pool of its own: what is let go of goes back there, and is handed out again when
    the copies that use it are over. RunError when the system gives no more.
    """
    if not pinned:
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = format_bytes(torch.empty(shape, dtype=dtype, device="meta").nbytes)
        raise RunError(
            f"no page-locked host memory for a message of {size}: {str(error).partition(chr(10))[0]}; run fewer ranks "
            "on this machine or make microbatches smaller"
        ) from None


def message_memory(device: str) -> Allocate:
    """The transport's memory for received messages: torch's, aligned for its kernels; for "cuda" page-locked."""
    return partial(_allocate, pinned=device == "cuda")


def _allocate(num_bytes: int, *, pinned: bool) -> memoryview:
    return host_tensor((num_bytes,), torch.uint8, pinned=pinned).numpy().data
