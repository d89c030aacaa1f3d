"""Reports of ranks to their launcher, an error or a result, in memory that both have, on no disk.

A full disk is one of the things that ranks have to report, and a launcher that is killed leaves no file behind.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from farpipe.core.errors import FarpipeError, spoken

REPORT_VARIABLE: Final = "FARPIPE_REPORT_FD"
INTERRUPTED: Final = 130
"""Exit code of a process that Ctrl-C has ended."""


def new_report() -> int:
    """Descriptor of an empty report, to be passed on to a rank under the name `REPORT_VARIABLE`."""
    return os.memfd_create("farpipe-report")


def read_report(descriptor: int) -> dict[str, Any]:
    """Return the report that a rank wrote under `reporting_errors`; empty if it wrote nothing or could not."""
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        return report if isinstance(report, dict) else {}
    return {}


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Around all that a rank does: an error that passes through is left for the launcher to show."""
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:  # and not a child that it has forked
            report_error(error)
        raise


def report_error(error: BaseException) -> None:
    """Leave an error for the launcher to show."""
    is_interrupt = isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(OSError, ValueError):
        _leave(
            text=str(error) if is_interrupt and str(error) else spoken(error),
            exit_code=INTERRUPTED if is_interrupt else getattr(error, "exit_code", 1),
            for_user=isinstance(error, FarpipeError) or not isinstance(error, Exception),
            because_of_peer=getattr(error, "because_of_peer", False),
        )


def leave_result(result: Any) -> None:
    """Leave something that JSON knows for the launcher; see `launch`."""
    _leave(result=result)


def report_done(exit_code: int) -> None:
    """Report that this rank has done its work and ends from now on with `exit_code`; what is reported already stays."""
    with contextlib.suppress(OSError, ValueError):
        _leave(done_s=time.monotonic(), end_code=exit_code)


def report_notice(text: str) -> None:
    """Leave a sentence for the user about a rank that has ended well."""
    with contextlib.suppress(OSError, ValueError):
        _leave(notice=text)


def _leave(**items: Any) -> None:
    """Add to the report, if there is a launcher of farpipe's."""
    if (descriptor := os.environ.get(REPORT_VARIABLE)) is not None:
        os.pwrite(int(descriptor), json.dumps(read_report(int(descriptor)) | items).encode(), 0)
