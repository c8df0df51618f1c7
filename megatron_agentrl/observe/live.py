"""What a person sees while a run goes on: a live panel on a terminal, plain lines anywhere else.

Reads metrics.jsonl as it grows and is told each process's state; asks no process anything. All is drawn from `tick`,
in the caller's thread. What an earlier start of the run measured says where the run stands, and is not shown again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron_agentrl.observe.metrics import FILE_NAME

#: Supervised steps between two plain lines.
_WARM_START_PERIOD = 50


class LiveView:
    """Use as a context manager and call `tick` about once a second.

    live   True draws the panel, False prints lines, None decides by whether `out` is a terminal
    doing  what goes on while all processes are up and nothing is measured
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        steps: int,
        warm_start_steps: int,
        doing: str = "starting",
        live: bool | None = None,
        out: TextIO | None = None,
    ) -> None:
        self.out = out or sys.stdout
        self.steps, self.warm_start_steps, self.doing = steps, warm_start_steps, doing
        self.panel = _can_draw(self.out) if live is None else live
        self.name = str(run_dir)
        self.started, self._started_at = time.monotonic(), time.time()
        self.measured = False
        """Whether this start of the run has measured anything yet."""
        self.states: dict[str, str] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=10)
        self._path = Path(run_dir) / FILE_NAME
        self._file: int | None = None  # inode of what was read, up to _offset
        self._offset = 0
        self._live: Any = None

    def __enter__(self) -> LiveView:
        if self.panel:
            from rich.console import Console
            from rich.live import Live

            # What goes to standard error is shown above the panel, unless it goes elsewhere (2> file).
            self._live = Live(
                self,
                console=Console(file=self.out, force_terminal=True),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._read()
        if self._live is not None:
            self._live.stop()

    def tick(self, states: dict[str, str]) -> None:
        """Takes each process's state (starting, running, done) and what was measured since."""
        if not self.panel and states != self.states:
            self._print(f"processes: {health(states)}")
        self.states = dict(states)
        self._read()
        if self._live is not None:
            self._live.refresh()

    def phase(self) -> str:
        """Where the run is, as far as its metrics tell."""
        if not self.measured:
            doing = "starting" if "starting" in self.states.values() else self.doing
            return f"{doing}, {self._reached()} reached before" if self.last else doing
        return self._reached()

    def _reached(self) -> str:
        if "train" in self.last:
            return f"step {self.last['train']['step']}/{self.steps}"
        if "eval" in self.last:
            return "first evaluation done, waiting for the first step"
        if "publish" in self.last:
            return "evaluating before the first step"
        if "warm_start" in self.last:
            return f"warm start {self.last['warm_start']['step']}/{self.warm_start_steps}"
        return "starting"

    def seconds_left(self) -> float | None:
        """Until the last step, at the pace of the last ten; None before the second step."""
        if len(self.recent) < 2:
            return None
        pace = (self.recent[-1]["time"] - self.recent[0]["time"]) / (len(self.recent) - 1)
        return pace * max(0, self.steps - self.recent[-1]["step"])

    def __rich__(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True, min_width=len("staleness"))
        grid.add_column(no_wrap=True)  # cut with an ellipsis where the terminal is narrow: the height stays the same
        for name, value in self._rows():
            grid.add_row(name, Text(value))
        return Panel(grid, title=Text(self.name), title_align="left", expand=False)

    def _rows(self) -> list[tuple[str, str]]:
        left = self.seconds_left()
        rows = [
            ("phase", self.phase()),
            ("time", f"{clock(time.monotonic() - self.started)}" + (f", about {clock(left)} left" if left else "")),
        ]
        if (warm := self.last.get("warm_start")) and "train" not in self.last:
            rows.append(("loss", f"{warm['loss']:.3f}"))
        if train := self.last.get("train"):
            recent = [line["reward"] for line in self.recent] or [train["reward"]]
            rows += [
                ("reward", f"{train['reward']:.3f} (last {len(recent)}: {sum(recent) / len(recent):.3f})"),
                ("staleness", f"mean {train['staleness_mean']:.2f}, largest {train['staleness_max']:g}"),
                ("tokens/s", f"{tokens_per_second(list(self.recent)):,.0f} trained"),
            ]
        if held_out := self.last.get("eval"):
            rows.append(("held-out", f"{_success(held_out)} at version {held_out['step']}"))
        return [*rows, ("health", health(self.states))]

    def _read(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._file:  # the trainer has dropped what belongs to a lost attempt, in a new file
                self._file, self._offset = inode, 0
                self.last.clear()
                self.recent.clear()
            file.seek(self._offset)
            chunk = file.read()
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        self.last[line["kind"]] = line
        if line["time"] < self._started_at:  # of an earlier start
            return
        self.measured = True
        if line["kind"] == "train":
            self.recent.append(line)
        if not self.panel and (text := self._text(line)):
            self._print(text)

    def _text(self, line: dict[str, Any]) -> str | None:
        if line["kind"] == "warm_start":
            step = line["step"]
            shown = step % _WARM_START_PERIOD == 0 or step in (1, self.warm_start_steps)
            return f"warm start {step}/{self.warm_start_steps}: loss {line['loss']:.3f}" if shown else None
        if line["kind"] == "train":
            left = self.seconds_left()
            return (
                f"step {line['step']}/{self.steps}: reward {line['reward']:.3f}, "
                f"staleness {line['staleness_mean']:.2f} (largest {line['staleness_max']:g}), "
                f"{tokens_per_second(list(self.recent)):,.0f} trained tokens/s"
                + (f", about {clock(left)} left" if left else "")
            )
        if line["kind"] == "eval":
            said = f"held-out ({line.get('tag')}, version {line['step']}): success {_success(line)} of {line['size']}"
            own = {name.removeprefix("agent/"): value for name, value in line.items() if name.startswith("agent/")}
            return "; ".join([said, *(f"{name} {value:.3f}" for name, value in sorted(own.items()))])
        return None

    def _print(self, text: str) -> None:
        print(f"[{clock(time.monotonic() - self.started)}] {text}", file=self.out, flush=True)


def _can_draw(out: TextIO) -> bool:
    return out.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _success(line: dict[str, Any]) -> str:
    """The share of held-out prompts answered right; none may have been answered at all."""
    return "unknown (no answer)" if line["success"] is None else f"{line['success']:.3f}"


def tokens_per_second(train: list[dict[str, Any]]) -> float:
    """Trained tokens a second over `train` lines: those after the first, by the time since it."""
    if len(train) < 2 or train[-1]["time"] <= train[0]["time"]:
        return 0.0
    return sum(line.get("tokens_trained", 0) for line in train[1:]) / (train[-1]["time"] - train[0]["time"])


def health(states: dict[str, str]) -> str:
    """`2 running; starting: engine-0`."""
    by_state: dict[str, list[str]] = {}
    for name, state in states.items():
        by_state.setdefault(state, []).append(name)
    parts = [f"{len(by_state['running'])} running"] if "running" in by_state else []
    parts += [f"{state}: {', '.join(by_state[state])}" for state in sorted(by_state) if state != "running"]
    return "; ".join(parts) or "–"


def clock(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
