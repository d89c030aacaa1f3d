"""Rate at which something in the background may send over a link without holding up a training's steps."""

import threading
import time
from typing import Final

LEAST_SHARE: Final = 0.02
"""Part of a link that is taken where steps leave nothing: else nothing would ever arrive."""
_NEWEST_COUNTS: Final = 0.3
"""Weight of the newest step in the mean of their lengths."""
CHUNK_S: Final = 0.01
"""Time for which a chunk may occupy the link: a step's message waits no longer for it."""
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 16 << 10, 1 << 20


class FreeRate:
    """A share of what steps leave free of a link, divided among its senders; each takes its `turn`.

    Steps send `step_bytes` each over a link of `bandwidth_bytes_per_s`; None: the link is unknown, and any rate is
    allowed. May be used by several threads.
    """

    def __init__(
        self, bandwidth_bytes_per_s: float | None, step_bytes: float, share: float, num_senders: int = 1
    ) -> None:
        self._bandwidth, self._step_bytes = bandwidth_bytes_per_s, step_bytes
        self._share, self._num_senders = share, num_senders
        self._step_s = 0.0
        self._is_idle = False
        self._lock = threading.Lock()
        self._free_s = 0.0

    def step_took(self, step_s: float) -> None:
        """Take note of the length of a step; the latest ones count most."""
        self._step_s += (_NEWEST_COUNTS if self._step_s else 1.0) * (step_s - self._step_s)

    def no_steps(self) -> None:
        """No step is running any more: the whole link is free."""
        self._is_idle = True

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of this sender now; None: any."""
        whole = self._bandwidth
        if whole is None:
            return None
        if self._is_idle or not self._step_bytes:
            return (1.0 if self._is_idle else self._share) * whole / self._num_senders
        free = whole - self._step_bytes / self._step_s if self._step_s else 0.0
        return max(self._share * free, LEAST_SHARE * whole) / self._num_senders

    @property
    def chunk_bytes(self) -> int:
        """Most bytes that should be sent at once."""
        rate = self.bytes_per_s
        if rate is None:
            return MOST_CHUNK_BYTES
        return round(min(max(CHUNK_S * rate * self._num_senders, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))

    def turn(self, num_bytes: int) -> float:
        """Seconds to wait before so many bytes may be sent; they count as sent from then on."""
        rate = self.bytes_per_s
        if rate is None:
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            start_s = max(self._free_s, now_s - CHUNK_S)  # what was not sent in time is lost, but for a moment
            self._free_s = start_s + num_bytes / rate
        return max(0.0, start_s - now_s)
