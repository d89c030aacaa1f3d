"""Memory of a rank's process, for its reports."""

import os
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_figures(device: str) -> dict[str, int]:
    """Return this process's memory: of the machine's now, of the GPU's at most since `forget_peak`, with its pool."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    cuda_peak_bytes = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {"rss_bytes": resident_pages * _PAGE_BYTES, "cuda_peak_bytes": cuda_peak_bytes}


def forget_peak(device: str) -> None:
    """Let the GPU's peak begin here: that of loading weights and of the first steps says nothing about a step."""
    if device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
