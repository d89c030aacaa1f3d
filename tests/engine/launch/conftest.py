"""Settings of all tests in this folder."""

from cli.conftest import farpipe

__all__ = ["farpipe"]
