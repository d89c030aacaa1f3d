"""Calls of Python functions, the part of a layer's cost that starves a GPU."""

import sys
import threading
from collections.abc import Callable
from typing import Any


def python_calls(run: Callable[[], Any]) -> int:
    """Number of Python functions that ``run()`` calls, those that autograd's own threads call as well."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found - 1
