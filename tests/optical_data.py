"""The frozen trace and path tables of NSFNET, kept outside the project; tests that need them are skipped without."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FARPIPE_DATA", "/nonexistent")) / "optical"
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason="FARPIPE_DATA does not name the folder with optical/")
LINKS, TRACE = FOLDER / "nsfnet_links.csv", FOLDER / "nsfnet_trace_250E.csv"
BY_KM, BY_HOPS = FOLDER / "nsfnet_paths_k5_distance.csv", FOLDER / "nsfnet_paths_k5_hops_distance.csv"
