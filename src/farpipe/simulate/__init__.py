"""Play it on paper: the compiled kernel, timelines, memory curves."""

from farpipe.simulate.simulate import simulate
from farpipe.simulate.timeline import Timeline

__all__ = ["Timeline", "simulate"]
