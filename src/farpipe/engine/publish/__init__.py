"""Weights out: a training publishes them while it runs, and subscribers elsewhere get them, equal to the bit."""
