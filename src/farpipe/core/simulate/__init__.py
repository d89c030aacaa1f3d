"""Predict a step: timelines, waits, slack, memory curves."""

from farpipe.core.simulate.simulate import makespans_s, simulate, steps_in_a_row, timeline_of
from farpipe.core.simulate.slack import Slack, data_with_slack, slack
from farpipe.core.simulate.timeline import Timeline

__all__ = ["Slack", "Timeline", "data_with_slack", "makespans_s", "simulate", "slack", "steps_in_a_row", "timeline_of"]
