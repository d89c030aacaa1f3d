"""Reports of ranks to their launcher, an error or a result, in memory that both have, on no disk.

A full disk is one of the things that ranks have to report, and a launcher that is killed leaves no file behind.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from farpipe.errors import FarpipeError

REPORT_VARIABLE: Final = "FARPIPE_REPORT_FD"


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
    try:
        yield
    except Exception as error:
        report_error(error)
        raise


def report_error(error: Exception) -> None:
    """Leave an error for the launcher to show."""
    descriptor = os.environ.get(REPORT_VARIABLE)
    if descriptor is None:  # not under farpipe's launcher
        return
    report = {
        "text": str(error),
        "exit_code": getattr(error, "exit_code", 1),
        "for_user": isinstance(error, FarpipeError),
        "because_of_peer": getattr(error, "because_of_peer", False),
    }
    with contextlib.suppress(OSError, ValueError):
        os.pwrite(int(descriptor), json.dumps(report).encode(), 0)


def leave_result(result: Any) -> None:
    """Leave something that JSON knows for the launcher; see `launch`."""
    os.pwrite(int(os.environ[REPORT_VARIABLE]), json.dumps({"result": result}).encode(), 0)
