"""Play it on paper: the compiled kernel, timelines, memory curves."""

from farpipe.simulate.replicas import in_turns
from farpipe.simulate.simulate import simulate
from farpipe.simulate.timeline import Timeline

__all__ = ["Timeline", "in_turns", "simulate"]
