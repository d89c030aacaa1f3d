"""Parts that the benchmarks over the kernel's WAN share."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.shared.outcome import end_unmeasured


def print_where_possible(measure: Callable[[], dict[str, Any]]) -> None:
    """Print the result of `measure` as JSON; where there can be no WAN of namespaces, end with the reason."""
    from farpipe.core.errors import UsageError
    from farpipe.engine.links import namespace

    try:
        namespace.check_possible()
    except UsageError as error:
        end_unmeasured(str(error))
    print(json.dumps(measure()))
