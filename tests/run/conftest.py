"""Settings of all tests in this folder."""

from cli.conftest import farpipe
from runtime.conftest import _one_thread_per_rank

__all__ = ["_one_thread_per_rank", "farpipe"]
