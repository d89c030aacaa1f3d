"""Disks of tests that fill up soon."""

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(path, size_kib):
    """A file system of its own; needs root."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can't be mounted here: not root, or mounting is not allowed")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
