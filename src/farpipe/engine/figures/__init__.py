"""Figures of a run: reports of steps, metrics, the measured timeline."""
