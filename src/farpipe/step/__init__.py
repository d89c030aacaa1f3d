"""One step as numbers: the Problem."""

from farpipe.step.chains import Chains
from farpipe.step.memory import Holding, byte_tables, holdings, least_activation_bytes
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
    "Chains",
    "Holding",
    "Hop",
    "Link",
    "Problem",
    "Rank",
    "Stage",
    "Sync",
    "Transfer",
    "byte_tables",
    "holdings",
    "is_inter_site",
    "least_activation_bytes",
    "site_of",
]
