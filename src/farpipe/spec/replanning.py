"""When a run looks for another order while it goes on."""

from farpipe.spec.part import Count, Natural, Part, Positive


class ReplanSettings(Part):
    """When to plan anew."""

    window_steps: Count = 3
    """Steps in a row that must agree before anything is concluded from them."""
    drift: Positive = 0.1
    """A search begins when all steps of a window take so much longer or shorter than expected (relative) ..."""
    change: Positive = 0.25
    """... or when a stage or a message takes so much longer or shorter than the last search assumed."""
    gain: Positive = 0.05
    """An order is taken when it is predicted to make steps so much shorter (relative); half of it must come true."""
    search_s: Positive = 5.0
    """What one search may take."""
    watch_steps: Count = 5
    """Steps after which a new order is judged."""
    pause_steps: Natural = 10
    """Steps between a search that changed nothing, or a step back, and the next search."""
