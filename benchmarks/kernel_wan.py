"""Parts that the benchmarks over the kernel's WAN share."""

import json
from collections.abc import Callable
from typing import Any


def print_where_possible(measure: Callable[[], dict[str, Any]]) -> None:
    """Print the result of `measure` as JSON, or the reason for which there can be no WAN of namespaces."""
    from farpipe.emulate import namespace
    from farpipe.errors import UsageError

    try:
        namespace.check_possible()
    except UsageError as error:
        print(json.dumps({"not_measured": str(error)}))
        return
    print(json.dumps(measure()))
