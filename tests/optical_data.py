"""Data of optical tests: a step over light paths; a frozen trace and path tables of NSFNET."""

from pathlib import Path

from benchmarks.optical import optical_training

FOLDER = Path(__file__).parent / "optical" / "data"
LINKS, TRACE = FOLDER / "nsfnet_links.csv", FOLDER / "nsfnet_trace.csv"
BY_KM, BY_HOPS = FOLDER / "nsfnet_paths_by_km.csv", FOLDER / "nsfnet_paths_by_hops.csv"

pipeline_problem = optical_training.pipeline_problem
"""A Problem of one stage per rank with messages between all stages, over links to be lit."""
