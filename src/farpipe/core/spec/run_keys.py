"""Keys of a job's runs: metrics, limits, what they do about faults and changes; re-planning while it runs."""

from typing import Annotated, Final

from pydantic import Field

from farpipe.core.spec.part import Count, Flag, Natural, Part, Positive, Text


class MetricsSettings(Part):
    """Destinations of a run's metrics beside ``metrics.jsonl``."""

    log_every_steps: Natural = 10
    """Steps between two lines of rank 0's log, and of stderr where it is no terminal; `0`: no lines."""
    tensorboard: Flag = False
    """Write the metrics for TensorBoard as well, into the run directory's `tensorboard/`."""
    prometheus_port: Annotated[Natural, Field(le=65535)] | None = None
    """Port at which Prometheus reads the metrics, `0` for any that is free."""
    prometheus_host: Text = "127.0.0.1"
    """Address of that port. Metrics have no password; other machines can't reach the loopback interface."""


DAY_S: Final = 86_400.0


class RunKeys(Part):
    """Limits of the job's runs, and what they do about faults and changes."""

    outage_s: Positive = 60.0
    """Longest interruption of a connection that a run survives, in seconds."""
    timeout_s: Positive | None = None
    """Longest wait for one message, in seconds. Default: a minute, or ten predicted steps where that is more."""
    max_restarts: Natural = 0
    """Times that a run that breaks starts again from its newest checkpoint."""
    site_wait_s: Annotated[Positive, Field(exclude_if=lambda limit: limit == DAY_S)] = DAY_S
    """Longest wait for a site that is lost, with `--on-lost-site wait`, in seconds."""
    replan: Flag = False
    """Search for a faster schedule while the run goes on, and switch to it."""
    emulate: Flag = True
    """Delay messages between sites as the job's links would; only where all ranks are on one machine."""


class ReplanSettings(Part):
    """Conditions under which a run is re-planned, and limits of that search."""

    drift: Positive = 0.1
    """A step is odd if its time is off the expected one by this share ..."""
    change: Positive = 0.25
    """... or that of a stage or a message is off what the last decision assumed by this share."""
    sudden_steps: Count = 2
    """Odd steps in a row after which something has changed, if they are off by twice that; the less, the later."""
    settle_steps: Natural = 3
    """First steps of a run from which nothing is concluded."""
    gain: Positive = 0.05
    """Predicted gain in step time (a share) at which an order is taken; half of it must come true."""
    search_s: Positive = 5.0
    """Time that one search may take."""
    watch_steps: Count = 5
    """Steps after which a new order is judged."""
    pause_steps: Natural = 10
    """Steps between a search that changed nothing, or a step back, and the next search."""
