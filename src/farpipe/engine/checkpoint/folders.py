"""Checkpoints in a run directory: listing them and removing them. Needs no torch."""

import contextlib
import math
import os
import re
import shutil
from pathlib import Path
from typing import Final

CHECKPOINTS_NAME: Final = "checkpoints"
SITES_NAME: Final = "sites"
MANIFEST_NAME: Final = "manifest.json"
ABANDONED: Final = ".abandoned"
_FOLDER: Final = re.compile(r"step-(\d{1,15})")


def folder_of(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return checkpoints / f"step-{step}"


def site_folder(run_dir: Path, site: str) -> Path:
    """What `site` alone keeps, of a run with `training.mirror` or `training.elastic`: it is lost with its disk."""
    return run_dir / SITES_NAME / site


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Folders of a run's checkpoints on this machine: the one that all sites share, and those of sites."""
    return [run_dir / CHECKPOINTS_NAME, *sorted((run_dir / SITES_NAME).glob(f"*/{CHECKPOINTS_NAME}"))]


def newest_of_run(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that has a manifest on this machine."""
    found = [(step, folder_of(place, step)) for place in checkpoint_folders(run_dir) for step in _newest_step(place)]
    return max(found, default=(0, None), key=lambda item: item[0])[1]


def run_around(checkpoint: Path) -> Path:
    """The run directory that the folder of a checkpoint lies in."""
    place = checkpoint.parent.parent
    return place.parent.parent if place.parent.name == SITES_NAME else place


def _newest_step(checkpoints: Path) -> list[int]:
    return whole_checkpoints(checkpoints)[:1]


def whole_checkpoints(checkpoints: Path) -> list[int]:
    """The steps of all checkpoints that have a manifest, the newest first."""
    return sorted((step for step, folder in _folders(checkpoints) if (folder / MANIFEST_NAME).exists()), reverse=True)


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    with contextlib.suppress(OSError):
        found = [(_FOLDER.fullmatch(folder.name), folder) for folder in checkpoints.iterdir()]
        return [(int(match[1]), folder) for match, folder in found if match]
    return []


def remove(folder: Path) -> None:
    """Delete a checkpoint, the manifest first; several ranks may do it at once."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_incomplete(checkpoints: Path, before: float = math.inf) -> None:
    """Delete what crashes and full disks have left of steps `before`; only while none of them is being written."""
    for step, folder in _folders(checkpoints):
        if step < before and not (folder / MANIFEST_NAME).exists():
            remove(folder)


def remove_unfinished_files(folder: Path) -> None:
    """Delete what killed processes have left of files of ranks; only when all ranks have written theirs.

    Another rank may be writing its manifest, which is left alone.
    """
    for path in [*_files(folder, ".rank-*.part"), *_files(folder, ".tmp??????")]:  # ours, and those of safetensors
        with contextlib.suppress(OSError):
            path.unlink()


def _files(folder: Path, pattern: str) -> list[Path]:
    """Files of `folder` that match; none where another rank has just renamed or deleted it."""
    with contextlib.suppress(FileNotFoundError):
        return list(folder.glob(pattern))
    return []


def incomplete_after(checkpoints: Path, step: int) -> list[int]:
    """Steps after `step` whose folders have files of ranks but no manifest."""
    return [
        later
        for later, folder in _folders(checkpoints)
        if later > step and not (folder / MANIFEST_NAME).exists() and _files(folder, "rank-*")
    ]


def abandon_after(checkpoints: Path, step: int) -> None:
    """Rename all checkpoints after `step`, whole or not: the training goes on from there without them.

    `step` -1: all of them.
    """
    for later, folder in _folders(checkpoints):
        if later > step:
            target = folder.with_name(folder.name + ABANDONED)
            try:
                folder.rename(target)
            except FileNotFoundError:  # another rank was faster: what is there now is to stay
                continue
            except OSError:  # that of an earlier time is there
                with contextlib.suppress(OSError):
                    if folder.exists():
                        remove(target)
                        folder.rename(target)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
