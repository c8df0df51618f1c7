"""Folders that are complete wherever they have their name, and the mark by which a distributed checkpoint proves it.

Everything is written under another name and gets its own by one rename, when it is on disk. A checkpoint's mark lists
its files with their sizes, so that a copy that lost some is found too. No torch: the conversion tools read marks alike.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The mark's file, and the version of what it says.
MARK, FORMAT = "complete.json", 1


class IncompleteCheckpoint(RuntimeError):
    """The folder is no complete checkpoint; the message says what is missing."""


def check(folder: Path) -> dict[str, Any]:
    """Return the mark of a complete checkpoint.

    Raises:
        IncompleteCheckpoint: naming what is missing.
    """
    path = folder / MARK
    if not path.is_file():
        raise IncompleteCheckpoint(f"{folder}: no {MARK}, the checkpoint was not completed; use another one")
    try:
        mark = json.loads(path.read_text())
        files, found = mark["files"].items(), mark["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteCheckpoint(f"{folder}: {MARK} is damaged ({error!r}); use another checkpoint") from error
    if found != FORMAT:
        raise IncompleteCheckpoint(
            f"{folder}: format {found!r}, expected {FORMAT}; use it with the version that wrote it"
        )
    for name, size in files:
        now = (folder / name).stat().st_size if (folder / name).is_file() else None
        if now != size:
            what = "is missing" if now is None else f"has {now} bytes"
            raise IncompleteCheckpoint(
                f"{folder}: {name} {what}, {size} bytes were written; copy it again or use another checkpoint"
            )
    return mark


def write_mark(folder: Path, facts: Mapping[str, Any]) -> None:
    """Declare what lies in the folder complete: every file with its size, and `facts` beside them."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / MARK).write_text(json.dumps({"format": FORMAT, **facts, "files": files}, indent=1))


def publish(partial: Path, final: Path, aside: str = "{}.replaced.tmp") -> None:
    """Make `partial` durable and give it its name, also on disk when this returns. A folder that had the name goes; for
    a moment it is called `aside`."""
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    older = final.with_name(aside.format(final.name))
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():
        final.rename(older)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(older, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
