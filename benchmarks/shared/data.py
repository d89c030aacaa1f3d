"""Folder of the published tables and traces, which is not part of the project."""

import os
from pathlib import Path

from benchmarks.shared.outcome import end_unmeasured


def data_folder(content: str) -> Path:
    """Folder that FARPIPE_DATA names; where it is not set, the script ends and names what it needs (`content`)."""
    folder = os.environ.get("FARPIPE_DATA")
    return Path(folder) if folder else end_unmeasured(f"FARPIPE_DATA is not set: set it to the folder with {content}")
