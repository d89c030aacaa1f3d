"""The closed loop: measured Timelines correct Problems, plans and orders, beside a run and between runs."""
