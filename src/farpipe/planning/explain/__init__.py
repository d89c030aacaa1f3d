"""Explain a plan: why not another, what limits it, how sure it is, what else could be done."""

from farpipe.planning.explain.explanation import after_search, explain, explained, with_alternatives, with_fastest

__all__ = ["after_search", "explain", "explained", "with_alternatives", "with_fastest"]
