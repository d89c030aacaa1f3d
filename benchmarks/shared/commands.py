"""Commands of farpipe in processes of their own."""

import subprocess
import sys


def farpipe(*arguments: object, timeout_s: float | None = None) -> str:
    """Standard output of ``farpipe ARGUMENTS``; a failed command is an error."""
    command = [sys.executable, "-m", "farpipe", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout_s).stdout
