"""The compiled recursion of `site_paths`."""

import numpy as np

from farpipe.core.step.jit import jit


@jit
def shortest_paths(weight):  # type: ignore[no-untyped-def]
    """(least weight [2^n, n], last site [2^n], site before [2^n, n]) of the paths through every set of n sites.

    The last site is -1 for a set that no path joins, the site before is -1 at a path's start.
    """
    n = weight.shape[0]
    least = np.full((1 << n, n), np.inf)
    previous = np.full((1 << n, n), -1, np.int64)
    last = np.full(1 << n, -1, np.int64)
    for site in range(n):
        least[1 << site, site] = 0.0
    for mask in range(1, 1 << n):
        best = np.inf
        for end in range(n):
            here = least[mask, end]
            if not np.isfinite(here):
                continue
            if here < best:
                best, last[mask] = here, end
            for other in range(n):
                bit = 1 << other
                if mask & bit or not np.isfinite(weight[end, other]):
                    continue
                if here + weight[end, other] < least[mask | bit, other]:
                    least[mask | bit, other] = here + weight[end, other]
                    previous[mask | bit, other] = end
    return least, last, previous
