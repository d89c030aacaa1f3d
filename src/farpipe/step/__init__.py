"""One step as numbers: the Problem."""

from farpipe.step.problem import (
    FORMAT,
    MAX_MICROBATCHES,
    MAX_SECONDS,
    Hop,
    Link,
    Problem,
    Rank,
    Stage,
    Sync,
    Transfer,
    is_inter_site,
    site_of,
)

__all__ = [
    "FORMAT",
    "MAX_MICROBATCHES",
    "MAX_SECONDS",
    "Hop",
    "Link",
    "Problem",
    "Rank",
    "Stage",
    "Sync",
    "Transfer",
    "is_inter_site",
    "site_of",
]
