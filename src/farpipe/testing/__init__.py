"""Checks for orders, fleet policies and links of your own: `check_order`, `check_policy`, `check_link`.

Each tries the thing on many cases and raises AssertionError with every rule that it broke, a line each. farpipe's own
are held to the same checks.
"""

from farpipe.testing.links import check_link
from farpipe.testing.orders import check_order
from farpipe.testing.policies import check_policy

__all__ = ["check_link", "check_order", "check_policy"]
