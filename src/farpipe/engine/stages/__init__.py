"""Computation of a stage, and import of others' weights."""
