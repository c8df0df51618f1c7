"""The numbers of a run: `metrics.jsonl`, one line an observation, and the same for TensorBoard.

Kinds and their steps: `warm_start` (supervised step), `train` (version the step produced), `publish` (version),
`eval` (version, with a `tag`: before, during, after). Written by one process only, the first trainer rank.
"""

from __future__ import annotations

import json
import numbers
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_agentrl.observe.events import read_lines

FILE_NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsWriter:
    """Appends observations. A resumed run at version k first drops what a lost attempt wrote about later versions."""

    def __init__(self, run_dir: str | Path, tensorboard: bool = True, resume_at: int | None = None) -> None:
        self.path = Path(run_dir) / FILE_NAME
        _cut(self.path, resume_at)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._events: Any = None
        if tensorboard:
            # Imported here: it takes a third of a second that a run without it need not spend. It needs no torch.
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(str(Path(run_dir) / TENSORBOARD))
            if resume_at is not None:
                self._events.add_event(_purge_event(resume_at + 1))

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes one observation. Nested mappings stay nested in the line and become `a/b` in TensorBoard.

        A value named as one of the line's own keys (an agent may call a metric `time`) is written as `NAME_`.
        """
        now = time.time()
        own = {"kind": kind, "step": step, "time": now}
        values = {f"{name}_" if name in own else name: value for name, value in values.items()}
        line = json.dumps({**own, **values}, default=_plain)
        self._file.write(line + "\n")
        if self._events is not None:
            self._events.add_event(_scalars_event(kind, step, now, dict(_scalars(values))))
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(run_dir: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The observations of a run, all or of one kind; empty where none were written yet."""
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        return []
    return [line for line in read_lines(path) if kind is None or line["kind"] == kind]


def _cut(path: Path, resume_at: int | None) -> None:
    """Keeps the warm start and what belongs to versions up to `resume_at`; a new run starts an empty file."""
    if not path.is_file():
        return
    kept = [
        line
        for line in read_lines(path)
        if resume_at is not None and (line["kind"] == "warm_start" or line["step"] <= resume_at)
    ]
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    partial.replace(path)


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, numbers.Real):
            yield f"{prefix}{name}", float(value)


def _scalars_event(kind: str, step: int, now: float, scalars: dict[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in scalars.items()]
    return Event(step=step, wall_time=now, summary=Summary(value=values))


def _purge_event(step: int) -> Any:
    """Tells TensorBoard to forget what an earlier attempt wrote from `step` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(step=step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))


def _plain(value: Any) -> Any:
    """Numbers of numpy and the like, which json does not know."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a metric is a number, text, list or mapping; found {type(value).__name__}")
    return item()
