"""When the engines had work: the union of all requests in flight, as intervals. Not per engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

#: Opens a span of the event log; `EventLog.span` of `observe` has this form.
Span = Callable[..., AbstractContextManager[object]]


class BusyClock:
    """Counts requests in flight; each stretch with at least one becomes a span `engine_busy`."""

    def __init__(self, span: Span | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._span = span
        self._clock = clock
        self._began = clock()
        self._since = 0.0
        self._open: AbstractContextManager[object] | None = None
        self.in_flight = 0
        self.intervals = 0
        self._seconds = 0.0

    def __enter__(self) -> BusyClock:
        if self.in_flight == 0:
            self._since = self._clock()
            self.intervals += 1
            if self._span is not None:
                self._open = self._span("engine_busy")
                self._open.__enter__()
        self.in_flight += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._seconds += self._clock() - self._since
            if self._open is not None:
                self._open.__exit__(None, None, None)
                self._open = None

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        return self._seconds + (self._clock() - self._since if self.in_flight else 0.0)

    @property
    def fraction(self) -> float:
        """Busy share of the time since the start."""
        return self.seconds / max(self._clock() - self._began, 1e-9)
