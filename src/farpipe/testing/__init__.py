"""Checks for orders, fleet policies, links and launchers of your own: `check_order`, `check_policy`, `check_link`,
`check_launcher`.

Each tries the thing on many cases and raises AssertionError with every rule that it broke, a line each. farpipe's own
are held to the same checks.
"""

from farpipe.testing.launchers import check_launcher
from farpipe.testing.links import check_link
from farpipe.testing.orders import check_order
from farpipe.testing.policies import check_policy

__all__ = ["check_launcher", "check_link", "check_order", "check_policy"]
