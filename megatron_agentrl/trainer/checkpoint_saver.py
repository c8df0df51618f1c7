"""When a run's checkpoints are written: while everybody waits, or in the background of the next steps.

In the background (checkpoint.asynchronous) a save stops training only while the state is copied to the host and the
coordinator's snapshot of the same version is taken; a thread of each rank writes its part. What is written becomes a
checkpoint at the first `poll` at which every rank has finished: until then there is only `step_N.tmp`, which a resume
passes over. One save is in flight at most. What a checkpoint is, is `trainer.checkpoint`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron_agentrl.trainer import checkpoint
from megatron_agentrl.trainer.topology import own_device

#: Seconds that an ending process gives its writer to stop at the next tensor.
GRACE = 5.0


class LateSave(RuntimeError):
    """A rank did not finish writing in time."""


class Saver:
    """The saves of one run. Every method is collective.

    Args:
        folder: the run's checkpoint folder.
        asynchronous: write in the background.
        keep: newest complete checkpoints to keep; older ones are removed when a new one is complete.
        deadline: seconds that a background write may take, counted from its start.
        on_complete: called on every rank with each checkpoint that has become complete.
    """

    def __init__(
        self,
        folder: Path,
        *,
        asynchronous: bool,
        keep: int,
        deadline: float,
        on_complete: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self._folder, self._asynchronous, self._keep, self._deadline = folder, asynchronous, keep, deadline
        self._on_complete = on_complete
        self._started: checkpoint.Started | None = None
        self._thread: threading.Thread | None = None
        self._since = 0.0

    def save(
        self,
        models: list[Any],
        optimizer: Any,
        step: int,
        extra: dict[str, Any],
        before_complete: Callable[[Path], None] | None = None,
    ) -> Path | None:
        """Save as `checkpoint.save`; returns the complete checkpoint, None where it is now being written.

        Raises:
            CheckpointException, LateSave: the save before this one failed, or is not finished.
        """
        self.wait()
        self._started = checkpoint.start(
            self._folder, models, optimizer, step, extra, before_complete, copy=self._asynchronous
        )
        if not self._asynchronous:
            self._started.write()
            return self._finish()
        self._since = time.monotonic()
        # A run that ends by an error does not wait for it: the checkpoint is then incomplete.
        atexit.register(self._abandon)
        self._thread = threading.Thread(target=self._started.write, name=f"checkpoint step_{step}", daemon=True)
        self._thread.start()
        return None

    def poll(self) -> Path | None:
        """Between two steps: the checkpoint that has become complete, None where there is none or it is being written.

        Raises:
            CheckpointException: a rank failed to write; on every rank, so that the run ends.
            LateSave: a rank is still writing after the deadline.
        """
        if self._thread is None:
            return None
        late = self._unfinished()
        if not late:
            return self._finish()
        # The first rank's clock judges for all: a rank that raised alone would leave the others in a collective.
        box = [time.monotonic() - self._since]
        dist.broadcast_object_list(box, src=0)
        if box[0] > self._deadline:
            assert self._started is not None
            raise LateSave(
                f"{self._started.tmp}: ranks {late} are still writing after {box[0]:.0f} s (deadlines.checkpoint="
                f"{self._deadline:g}); look at the file system, or raise it"
            )
        return None

    def wait(self) -> Path | None:
        """Complete the save in flight, if there is one.

        Raises:
            CheckpointException, LateSave: see `poll`.
        """
        if self._thread is None:
            return None
        self._thread.join(max(0.0, self._since + self._deadline - time.monotonic()))
        while (done := self.poll()) is None:
            time.sleep(0.1)  # another rank's clock is ahead
        return done

    def _abandon(self) -> None:
        """At the end of the process. A thread that still runs Python code when the interpreter goes down makes the
        process abort ("terminate called without an active exception"); one that hangs in the file system does not."""
        if self._started is not None and self._thread is not None:
            self._started.abandoned.set()
            self._thread.join(GRACE)

    def _unfinished(self) -> list[int]:
        """The ranks that are still writing, the same list on every rank."""
        assert self._thread is not None
        writing = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=own_device())
        writing[dist.get_rank()] = self._thread.is_alive()
        dist.all_reduce(writing)
        return writing.nonzero().flatten().tolist()

    def _finish(self) -> Path:
        assert self._started is not None
        started, self._started, self._thread = self._started, None, None
        atexit.unregister(self._abandon)
        try:
            done = checkpoint.finish(started)
        except CheckpointException as error:
            error.add_note(f"the checkpoint {started.final} was not written; {started.tmp} is incomplete")
            raise
        if dist.get_rank() == 0:
            checkpoint.prune(self._folder, self._keep)
        self._on_complete(done)
        return done
