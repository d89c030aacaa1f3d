"""What the benchmarks over the kernel's WAN have in common."""

import json
from collections.abc import Callable
from typing import Any


def print_where_possible(measure: Callable[[], dict[str, Any]]) -> None:
    """What `measure` finds as JSON; where there can be no WAN of namespaces, the reason why nothing was measured."""
    from farpipe.emulate import namespace
    from farpipe.errors import UsageError

    try:
        namespace.check_possible()
    except UsageError as error:
        print(json.dumps({"not_measured": str(error)}))
        return
    print(json.dumps(measure()))
