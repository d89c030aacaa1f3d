"""Settings of a run that looks for another order while it goes on."""

from typing import Annotated

from pydantic import AliasChoices, Field

from farpipe.spec.part import Count, Natural, Part, Positive


class ReplanSettings(Part):
    """Conditions under which a run is planned anew, and limits of that search."""

    drift: Positive = 0.1
    """Steps are odd that take so much longer or shorter than expected (relative) ..."""
    change: Positive = 0.25
    """... or in which a stage or a message takes so much longer or shorter than the last decision assumed."""
    sudden_steps: Count = 2
    """Odd steps in a row after which something has changed, if they are off by twice that; the less, the later."""
    settle_steps: Annotated[Natural, Field(validation_alias=AliasChoices("settle_steps", "warm_up_steps"))] = 3
    """First steps of a run from which nothing is concluded; earlier documents say `warm_up_steps`."""
    gain: Positive = 0.05
    """An order is taken when it is predicted to make steps so much shorter (relative); half of it must come true."""
    search_s: Positive = 5.0
    """Time that one search may take."""
    watch_steps: Count = 5
    """Steps after which a new order is judged."""
    pause_steps: Natural = 10
    """Steps between a search that changed nothing, or a step back, and the next search."""
