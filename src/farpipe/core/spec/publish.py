"""Weights that a training publishes while it runs, for rollouts or evaluation elsewhere."""

from typing import Annotated

from pydantic import Field

from farpipe.core.spec.part import Count, Flag, Natural, Part, Positive


class PublishSettings(Part):
    """When and where a run publishes its weights."""

    every_steps: Count = 10
    """Steps between two versions; the last step makes one too."""
    port: Annotated[Natural, Field(le=65535)] = 0
    """Port at which subscribers find the first process of a machine, the next ones take the next; `0`: any that is
    free, as `publish.json` in the run directory says."""
    share: Annotated[Positive, Field(le=1)] = 0.8
    """Share, of what the steps leave free of a link between sites, that versions may take."""
    master_weights: Flag = False
    """Publish the optimizer's float32 weights. Default: the weights that the model computes with, in
    `training.precision`."""
    max_subscribers: Count = 16
    """Subscribers at one time; more are refused. A process keeps up to two versions of its weights for each."""
