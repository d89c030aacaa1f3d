"""Assignment policies: which of the candidate paths, and which block of slots on it.

A policy is two rules. The rule of slots picks a block of free slots on a path; the rule of paths picks among the
candidates on which there is one. The compiled kernels (`assign_kernel`) know the rules by their place here.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import UsageError
from farpipe.core.plugins import Plugins
from farpipe.core.strict import nearest

SLOT_RULES: Final = ("first", "last", "best")
"""The lowest block that fits; the highest; the smallest (ties: lowest)."""

PATH_RULES: Final = ("in-order", "lowest-slot", "shortest", "min-cuts", "congestion", "cross-domain")
"""The first candidate on which the request fits; the one with the lowest slot; the shortest in km and no other; the one
where taking the block splits fewest free blocks; the one whose fibres are used least; the least weighted sum of km,
congestion and discontinuity of the neighbourhood. Ties always go to the earlier candidate."""


@dataclass(frozen=True)
class AssignmentPolicy:
    """A rule of paths with a rule of slots; `weights` (km, congestion, neighbourhood) are of "cross-domain" alone."""

    name: str
    paths: str
    slots: str
    weights: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def codes(self) -> tuple[int, int, NDArray[np.float64]]:
        """The two rules and the weights as the kernels know them."""
        return PATH_RULES.index(self.paths), SLOT_RULES.index(self.slots), np.array(self.weights)


POLICIES: Final = {
    policy.name: policy
    for policy in (
        AssignmentPolicy("ksp-ff", "in-order", "first"),
        AssignmentPolicy("ff-ksp", "lowest-slot", "first"),
        AssignmentPolicy("sd-ff", "shortest", "first"),
        AssignmentPolicy("best-fit", "in-order", "best"),
        AssignmentPolicy("last-fit", "in-order", "last"),
        AssignmentPolicy("min-cuts", "min-cuts", "first"),
        AssignmentPolicy("congestion-aware", "congestion", "first"),
        # CD-CBA's three terms; their weights were not published: equal here, see docs/reference/optical.md.
        AssignmentPolicy("cd", "cross-domain", "first", (1.0, 1.0, 1.0)),
    )
}
"""The policies by the names that users write. Min-cuts and congestion-aware are XLRON's KMC-FF and KCA-FF (but that a
path on which the request does not fit is never taken)."""


ADDED: Final = Plugins("assignment", "farpipe.assignments", POLICIES, lambda found: isinstance(found, AssignmentPolicy))
"""Assignments of other distributions: an AssignmentPolicy each, of the rules above with other weights."""


def find_policy(name: str) -> AssignmentPolicy:
    """The policy called `name`, farpipe's own or a distribution's; UsageError with the nearest name otherwise."""
    found: AssignmentPolicy | None = ADDED.find(name)
    if found is None:
        names = ADDED.known
        raise UsageError(f"there is no policy {name!r}{nearest(name, names)}; known: {', '.join(names)}")
    return found
