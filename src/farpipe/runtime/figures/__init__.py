"""What a run tells: reports of steps, metrics, the measured timeline."""
