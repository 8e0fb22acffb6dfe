"""A limit in bytes per second, as a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_SECONDS = 0.05


class Throttle:
    """Lets `rate` bytes per second through, and bursts of a twentieth of a second after a pause."""

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._paid_until = clock() - BURST_SECONDS

    def take(self, count: int) -> None:
        """Return when `count` bytes may go out; they are paid for by the calls that follow."""
        now = self._clock()
        self._paid_until = max(self._paid_until, now - BURST_SECONDS)
        if self._paid_until > now:
            self._sleep(self._paid_until - now)
        self._paid_until += count / self._rate
