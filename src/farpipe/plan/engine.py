"""What farpipe's own engine can run, stated once: `plan` tells it, `train` plans under it."""

from typing import Any, Final

from farpipe.cost import Layout
from farpipe.spec import Job, Pins

RUNNABLE: Final[dict[str, int]] = {"tensor": 1}
"""Degrees that the engine can run no other value of: it does not divide layers over devices."""


def engine_obstacle(layout: Layout) -> str:
    """What of a layout the engine can't run, as ``tensor = 8``; empty where it can run all of it."""
    return ", ".join(f"{key} = {getattr(layout, key)}" for key in RUNNABLE if getattr(layout, key) != RUNNABLE[key])


def within_engine(job: Job) -> tuple[Job, str]:
    """The job with what the user left open pinned to what the engine can run, and these pins in words.

    A degree that the user has pinned to another value stays; `engine_obstacle` tells of it.
    """
    open_keys = [key for key in RUNNABLE if getattr(job.layout, key) is None]
    pinned: dict[str, Any] = {key: RUNNABLE[key] for key in open_keys}
    layout: Pins = job.layout.model_copy(update=pinned)
    told = ", ".join(f"layout.{key} = {value}" for key, value in pinned.items())
    return job.model_copy(update={"layout": layout}), told
