"""Benchmarks: a folder for each page of docs/reference/benchmarks, `shared` for what several folders need.

Run one from the project's root: ``python -m benchmarks.engine.soak``. All that print figures: ``make bench``.
"""
