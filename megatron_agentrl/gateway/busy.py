"""When the gateway had requests at the engines: the union of all in flight, as intervals. Not per engine."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Start and stop, in seconds since the epoch, so that intervals of several processes compare.
Interval = tuple[float, float]


class BusyClock:
    """A context manager around each request; counts those in flight and keeps the intervals with at least one."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._began = clock()
        self._since = 0.0
        self._seconds = 0.0
        self._untaken: list[Interval] = []
        self.in_flight = 0

    def __enter__(self) -> BusyClock:
        if self.in_flight == 0:
            self._since = self._clock()
        self.in_flight += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._cut()

    def _cut(self) -> None:
        now = self._clock()
        self._seconds += now - self._since
        self._untaken.append((self._since, now))
        self._since = now

    def take(self) -> list[Interval]:
        """Intervals since the last call; one that is still open is cut at now, so a killed process loses little."""
        if self.in_flight:
            self._cut()
        taken, self._untaken = self._untaken, []
        return taken

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        return self._seconds + (self._clock() - self._since if self.in_flight else 0.0)

    @property
    def fraction(self) -> float:
        """Busy share of the time since the start."""
        return self.seconds / max(self._clock() - self._began, 1e-9)
