"""Predict a step: timelines, waits, slack, memory curves."""

from farpipe.simulate.samples import makespans_s
from farpipe.simulate.simulate import simulate
from farpipe.simulate.slack import Slack, data_with_slack, slack
from farpipe.simulate.timeline import Timeline

__all__ = ["Slack", "Timeline", "data_with_slack", "makespans_s", "simulate", "slack"]
