"""Compilation of the kernels of `optical`."""

from typing import Any, Final

from numba import njit

_OPTIONS: Final[dict[str, Any]] = {"cache": True, "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

inner: Final[Any] = njit(**_OPTIONS)
"""For what only other kernels call: wrappers for so many arrays take longer to compile than the functions."""
