"""End of a benchmark that can't be measured here."""

import sys
from typing import Final, NoReturn

NOT_MEASURED: Final = 2
"""Exit code of a script that lacks data or rights: its figures on the pages stay as they are."""


def end_unmeasured(reason: str) -> NoReturn:
    """End the script with `reason` on stderr."""
    print(reason, file=sys.stderr)
    sys.exit(NOT_MEASURED)
