"""Measures of fragmentation of the free spectrum."""

from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from farpipe.optical.spectrum import Grid, free_masks


@dataclass(frozen=True)
class Fragmentation:
    """Means over the fibres that have free slots, but for `used_share`, which is over all."""

    used_share: float
    """Taken slots over all slots."""
    external: float
    """1 - largest free block / free slots: 0 when all free slots lie together."""
    entropy: float
    """Sum over free blocks of b/N ln(N/b) (Wright, Parker, Lord, OFC 2015), in nats; 0 when the fibre is empty."""
    num_blocks: float
    """Number of free blocks."""


def fragmentation(free: NDArray[np.uint64], grid: Grid) -> Fragmentation:
    """The metrics of a spectrum given as masks of free slots."""
    blocks = [free_blocks(mask) for mask in free_masks(free)]
    some = [there for there in blocks if there]
    total = sum(map(sum, blocks))
    mean = max(1, len(some))
    return Fragmentation(
        used_share=1 - total / (len(blocks) * grid.num_slots),
        external=sum(1 - max(there) / sum(there) for there in some) / mean,
        entropy=sum(b / grid.num_slots * log(grid.num_slots / b) for there in some for b in there) / mean,
        num_blocks=sum(map(len, some)) / mean,
    )


def free_blocks(mask: int) -> list[int]:
    """The lengths of the runs of ones, lowest first."""
    return [len(run) for run in f"{mask:b}"[::-1].split("0") if run]
