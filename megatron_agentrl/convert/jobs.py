"""Running a conversion: units over threads within a budget of memory, progress, space, and a target that appears whole.

The target is written under `NAME.tmp` and renamed when all of it is on disk. What a killed run leaves has that name and
is removed by the next run, which starts clean: half-written files are never trusted. A lock on the folder, which ends
with the process, keeps two runs apart.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.trainer.complete import publish

T = TypeVar("T")
#: Memory that pieces in work may take together: this many times the largest, and at least FLOOR bytes.
TIMES, FLOOR = 2.0, 256 * 2**20
#: Threads by default: beyond a few, a disk is the limit.
WORKERS = min(8, os.cpu_count() or 1)
#: Part of the free space that file headers, padding and metadata may take beside the tensors.
OVERHEAD = 1.02


class Budget:
    """Admits pieces of work while their sizes fit together; one that is larger than everything runs alone."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._change = limit, 0, threading.Condition()

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        with self._change:
            while self._used and self._used + size > self._limit:
                self._change.wait()
            self._used += size
        try:
            yield
        finally:
            with self._change:
                self._used -= size
                self._change.notify_all()


def run(
    items: Sequence[T],
    work: Callable[[T], None],
    memory: Callable[[T], int],
    nbytes: Callable[[T], int],
    workers: int,
    title: str,
    quiet: bool = False,
) -> None:
    """`work` on every item, over `workers` threads; the first failure stops the others and is raised.

    Args:
        memory: bytes that an item takes while it is worked on.
        nbytes: bytes that it moves, for the bar.
    """
    sizes = [memory(item) for item in items]
    budget = Budget(max(FLOOR, int(TIMES * max(sizes, default=0))))
    queue, lock = iter(zip(items, sizes, strict=True)), threading.Lock()
    failures: list[BaseException] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=quiet) as progress:
        task = progress.add_task(title, total=sum(nbytes(item) for item in items))

        def loop() -> None:
            while not failures:
                with lock:
                    item, size = next(queue, (None, 0))
                if item is None:
                    return
                try:
                    with budget(size):
                        work(item)
                except BaseException as error:
                    failures.append(error)
                    return
                progress.advance(task, nbytes(item))

        threads = [threading.Thread(target=loop, name=f"convert-{number}") for number in range(max(1, workers))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # the interrupt key: the threads end after the item in hand
            failures.append(error)
            for thread in threads:
                thread.join()
            raise
    if failures:
        raise failures[0]


def check_space(target: Path, needed: int) -> None:
    """Raise ConvertError unless the disk of `target` has room for `needed` bytes and what comes with them."""
    free, needed = shutil.disk_usage(target.parent).free, int(needed * OVERHEAD)
    if free < needed:
        raise ConvertError(
            f"{target.parent} has {free / 1e9:.2f} GB free, the result needs {needed / 1e9:.2f} GB; free some space or "
            "choose a target on another disk"
        )


@contextmanager
def target(final: Path, replace: bool = False) -> Iterator[Path]:
    """The folder to write into; renamed to `final` at the end, removed where anything failed.

    Raises:
        ConvertError: `final` is there already (unless `replace`), its parent is not, or another run writes it now.
    """
    final = final.absolute()
    if final.exists() and not replace:
        raise ConvertError(f"{final} exists already; choose another name, or pass --force to replace it")
    if not final.parent.is_dir():
        raise ConvertError(f"{final.parent} is no folder; make it first")
    tmp = final.with_name(f"{final.name}.tmp")
    lock = _lock(tmp)
    try:
        for path in tmp.iterdir():  # what a killed run left
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield tmp
        publish(tmp, final)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(tmp: Path) -> int:
    tmp.mkdir(exist_ok=True)
    handle = os.open(tmp, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ConvertError(f"{tmp} is being written by another run; wait for it, or choose another name") from error
    return handle
