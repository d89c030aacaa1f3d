"""Faults of code that users give, such as modules and orders: what went wrong, and where in their code."""

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Final

from farpipe.errors import spoken

_OURS: Final = Path(__file__).parent
_LIBRARIES: Final = re.compile(rf"<|{re.escape(str(Path(os.__file__).parent))}/(?!(site|dist)-packages/)")
_PACKAGES: Final = re.compile("/(?:site|dist)-packages/")
"""Files whose frames say less about a fault than those of the code that called them."""


def fault_in(error: BaseException) -> str:
    """An error in words, with the innermost line of the user's code that it came through, or else of farpipe's."""
    frames = traceback.extract_tb(error.__traceback__)
    known = [f for f in frames if not _LIBRARIES.match(f.filename) and not _PACKAGES.search(f.filename)] or frames
    users = [frame for frame in known if not Path(frame.filename).is_relative_to(_OURS)]
    place = (users or known)[-1:]
    return spoken(error) + "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in place)


def end_fork_of(process: int, error: BaseException | None = None) -> None:
    """End this process at once if it is not `process`: a child that the user's code has forked, and let come back.

    It shares the connections and files of `process`, and goodbyes or lines of its own there would be wrong.
    """
    if os.getpid() == process:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None or (isinstance(error, SystemExit) and not error.code) else 1)
