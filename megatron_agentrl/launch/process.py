"""One child process of a run: started in a group of its own, its output in a file, and gone when told.

A child is the leader of its session, so that it and everything it starts can be stopped as one group. Two things
keep a killed supervisor from leaving processes behind: the kernel kills each child when its parent dies, and a
guardian (`launch.guardian`) kills what those children had started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child:
    """A running process and its log. `name` is ROLE-I."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.name = name
        self.pid = popen.pid
        self.log = log
        self._popen = popen
        self._log_start = log_start
        self.pidfd = os.pidfd_open(popen.pid)  # becomes readable when the process ends

    def exit_code(self) -> int | None:
        """None while it runs; the exit code; minus the signal that ended it."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Asks the process itself to stop; it stops what it started."""
        if self.exit_code() is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Ends whatever is left of the process and of all it started, and reaps it."""
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines this start wrote to its log."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-count:]

    def how_it_ended(self) -> str:
        """`exit code 3` or `signal SIGKILL`."""
        code = self.exit_code()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        hint = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{hint}"


def start(name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Starts `argv` with both output streams appended to `log` and `env` on top of this process's environment."""
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()

    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)

    with log.open("ab") as output:
        log_start = output.seek(0, os.SEEK_END)
        output.write(f"--- {time.strftime('%F %T')} {' '.join(argv)}\n".encode())
        output.flush()
        popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=in_child,
        )
    return Child(name, popen, log, log_start)


class Guardian:
    """Kills the groups it was told of as soon as this process is gone, however it went."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("guardian.py"))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """To be called when every group is gone."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line.encode())
        self._popen.stdin.flush()
