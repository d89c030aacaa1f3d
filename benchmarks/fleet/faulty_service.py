"""A service that kills itself: `farpipe` with fault points around its effects, each met with FAULT's chance.

The points: inside and after the transaction of a decision, before and after an attempt is started or stopped, after a
site has begun its share, and before a follower's or leader's lease is renewed. POINT names the only one that counts.
"""

import os
import random
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa

from farpipe.cli import main
from farpipe.service.door import Door
from farpipe.service.sites import SitesLauncher
from farpipe.service.store import Store

POINTS: Final = ("commit", "write", "before start", "after start", "after begin", "before stop", "after stop", "lease")
CHANCE: Final = float(os.environ.get("FAULT", "0"))
ONLY: Final = os.environ.get("POINT", "")


def fault(point: str) -> None:
    """Die here, perhaps, as a machine does that loses its power."""
    if point and ONLY in ("", point) and random.random() < CHANCE:
        os.write(2, f"dies at {point!r}\n".encode())
        os.kill(os.getpid(), 9)


def around(kind: type, name: str, before: str = "", after: str = "") -> None:
    """Put fault points around a method."""
    method: Callable[..., Any] = getattr(kind, name)

    def call(*given: Any, **named: Any) -> Any:
        fault(before)
        found = method(*given, **named)
        fault(after)
        return found

    setattr(kind, name, call)


if __name__ == "__main__":
    sa.event.listen(sa.engine.Engine, "commit", lambda db: fault("commit") if db.in_transaction() else None)
    around(Store, "write", after="write")
    around(Store, "leads", before="lease")
    around(SitesLauncher, "start", "before start", "after start")
    around(SitesLauncher, "stop", "before stop", "after stop")
    around(Door, "_begin", after="after begin")
    main()
