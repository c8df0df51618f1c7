"""Ties a process's life to its parent's, so that nothing of an engine survives the death of what started it.

The kernel does it (PR_SET_PDEATHSIG), so it also holds when the parent is killed with SIGKILL. It is bound to the
*thread* that started the process: start engines from a thread that lives as long as they should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: Set in the environment of our engines, so that the vLLM plugin leaves everybody else's vLLM alone.
ENV = "MEGATRON_AGENTRL_DIE_WITH_PARENT"

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL for this process when the one that started it dies.

    `parent` is the process id that must still be the parent; the process kills itself when it already is not
    (it died before the call). Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_tied_forks_of: int | None = None


def tie_forked_children() -> None:
    """Every process that this one forks from now on (and that those fork) dies with the one that forked it."""
    global _tied_forks_of
    if _tied_forks_of is None:
        os.register_at_fork(after_in_child=_tie_forked_child)
    _tied_forks_of = os.getpid()


def _tie_forked_child() -> None:
    global _tied_forks_of
    parent, _tied_forks_of = _tied_forks_of, os.getpid()
    die_with_parent(parent)


def register() -> None:
    """vLLM general plugin: ties the engine and worker processes that vLLM spawns to the process that started them."""
    if os.environ.get(ENV) != "1":
        return
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:  # the API server itself is tied by its entry point
        die_with_parent(parent.pid)
