"""A WAN on one machine: links with a latency and a rate, shared by all processes of a run."""

from farpipe.emulate.links import EmulatedLinks, LinkShape, Passage

__all__ = ["EmulatedLinks", "LinkShape", "Passage"]
