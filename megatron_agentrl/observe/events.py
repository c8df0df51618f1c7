"""What each process did and when: spans and points as JSON lines in `events/PROCESS.jsonl`.

A line is one `write` to a file opened for append. A killed process leaves at most one torn line at the end, which a
restarted one cuts off before it goes on in the same file. Times are wall-clock seconds, so that processes can be laid side by side.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class EventLog:
    """The event file of one process (`process` is ROLE-I, e.g. trainer-0). Safe to use from several threads."""

    def __init__(self, run_dir: str | Path, process: str) -> None:
        self.process = process
        self.path = Path(run_dir) / "events" / f"{process}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_torn_line(self._descriptor)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Records start and stop of the block. Fields added to the yielded dict are recorded too.

        A block that raises is recorded with `error` (the exception's class) and the exception goes on.
        """
        start = time.time()
        try:
            yield fields
        except BaseException as error:
            fields["error"] = type(error).__name__
            raise
        finally:
            self._write({"name": name, "start": start, "stop": time.time(), **fields})

    def record(self, name: str, start: float, stop: float, **fields: Any) -> None:
        """Records a span that was timed elsewhere (wall-clock seconds)."""
        self._write({"name": name, "start": start, "stop": stop, **fields})

    def point(self, name: str, **fields: Any) -> None:
        """Records a moment."""
        self._write({"name": name, "time": time.time(), **fields})

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, event: dict[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(event, default=str) + "\n").encode())


def _cut_torn_line(descriptor: int) -> None:
    """Cuts what stands behind the last newline; it would otherwise spoil the line that is written next."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 1 << 20, max(0, size - (1 << 20)))
    os.ftruncate(descriptor, size - len(tail) + tail.rfind(b"\n") + 1)


def read_events(run_dir: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Process name -> its events, in order of writing."""
    folder = Path(run_dir) / "events"
    return {path.stem: list(read_lines(path)) for path in sorted(folder.glob("*.jsonl"))}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file that another process may be writing: a torn last line is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and line.strip():
                yield json.loads(line)
