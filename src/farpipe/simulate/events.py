"""The events of one step as arrays: what a Timeline is made of."""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from farpipe.step import COLLECTIVE_KINDS

MESSAGE_KINDS: Final = ("forward", "backward", *COLLECTIVE_KINDS)

ACTION_DTYPE: Final = np.dtype(
    [
        ("rank", "i4"),
        ("stage", "i4"),
        ("kind", "i4"),
        ("microbatch", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)
"""One action; `kind` is its place in KINDS."""

MESSAGE_DTYPE: Final = np.dtype(
    [
        ("link", "i4"),
        ("kind", "i4"),
        ("stage", "i4"),
        ("microbatch", "i4"),
        ("source", "i4"),
        ("target", "i4"),
        ("bytes", "f8"),
        ("ready_s", "f8"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("arrival_s", "f8"),
    ]
)
"""One message: `stage` is its producer's, `link` an index into `links` (-1: a hop without a link).

It was ready when its producer ended, was on the link from `start_s` to `end_s` and reached the consumer at
`arrival_s`. Collectives have microbatch -1; gathers and reduces, which are of several
replicas, have their own rank as source and target.
"""


@dataclass(frozen=True, repr=False)
class Events:
    """Every action and message of one step; `actions` are sorted by rank, then start."""

    source: Literal["predicted", "measured"]
    num_ranks: int
    links: tuple[str, ...]
    actions: NDArray[np.void]
    messages: NDArray[np.void]
    copies: tuple[int, ...] = ()
    """Per link how many replicas send a message like each of these there, one after the other; empty: one everywhere.

    Collectives are of all replicas together.
    """
    between: tuple[bool, ...] = ()
    """Per link whether it joins two sites; empty: as their names say."""
