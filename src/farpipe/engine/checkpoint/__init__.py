"""Checkpoints of a run: their files, when they are written, and resuming from them."""
