"""The folder of a run: made anew, taken up again, or set aside; never overwritten, never used by two starts at once.

A run goes on from its newest checkpoint when only resumable values changed. Anything else in the way is renamed to
NAME.1, NAME.2, … so that nothing is lost.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.load import changed, load_resolved, save
from megatron_agentrl.recipe.schema import Recipe

RECIPE_FILE = "recipe.yaml"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class RunFolder:
    """`resumes_at` is the step of the newest checkpoint, None for a new run. `notes` are lines for the user."""

    path: Path
    resumes_at: int | None
    finished: bool
    notes: list[str]


def newest_checkpoint(run_dir: Path) -> int | None:
    """Largest N of `checkpoints/step_N`. A folder under its final name is complete."""
    steps = [
        int(match[1])
        for path in (run_dir / "checkpoints").glob("step_*")
        if path.is_dir() and (match := re.fullmatch(r"step_(\d+)", path.name))
    ]
    return max(steps, default=None)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the run's name for this process. The lock lies beside the folder, so it outlives a rename of it."""
    lock = path.parent / f".{path.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RecipeError(
            f"{lock}: cannot be written ({error.strerror}); set run_root to a folder you may write"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise RecipeError(
                f"{path}: another start (process {owner}) uses this run folder; stop it, or set run_name to another name"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)  # closing releases the lock


def prepare(recipe: Recipe, path: Path, *, fresh: bool = False) -> RunFolder:
    """Makes `path` ready and writes the resolved recipe into it. Call with the lock held.

    `fresh` sets aside whatever stands there. Raises RecipeError for a folder that is no run folder.
    """
    notes: list[str] = []
    resumes_at: int | None = None
    if path.exists() and not path.is_dir():
        raise RecipeError(f"{path}: is a file, expected a run folder; set run_name to another name")
    if path.exists() and any(path.iterdir()):
        why = "a new one was asked for" if fresh else _why_not_resumable(recipe, path)
        if why is not None:
            aside = _set_aside(path)
            notes.append(f"{path} is set aside as {aside}: {why}")
        else:
            resumes_at = newest_checkpoint(path)
            if _finished(recipe, path):
                return RunFolder(path, resumes_at, True, [f"{path} is finished; raise train.steps to go on"])
            (path / SUMMARY_FILE).unlink(missing_ok=True)  # of fewer steps; written again at the end
            notes.append(f"{path}: going on from step {resumes_at}")
    path.mkdir(parents=True, exist_ok=True)
    save(recipe, path / RECIPE_FILE)  # first: without it the folder counts as somebody else's
    for name in ("logs", "events", "spool", "checkpoints"):
        (path / name).mkdir(exist_ok=True)
    return RunFolder(path, resumes_at, False, notes)


def _finished(recipe: Recipe, path: Path) -> bool:
    """A summary stands there, and no further step is asked for than it was written for."""
    if not (path / SUMMARY_FILE).is_file():
        return False
    step = newest_checkpoint(path)
    reached = step is not None and step >= recipe.train.steps
    # A run may end below train.steps, when data.epochs runs out.
    return reached or load_resolved(path / RECIPE_FILE).train.steps == recipe.train.steps


def _why_not_resumable(recipe: Recipe, path: Path) -> str | None:
    if not (path / RECIPE_FILE).is_file():
        raise RecipeError(
            f"{path}: holds files but no {RECIPE_FILE}, so it is no run folder; set run_name to another name"
        )
    try:
        old = load_resolved(path / RECIPE_FILE)
    except RecipeError as error:
        return f"its recipe cannot be read ({error})"
    others = [str(change) for change in changed(old, recipe) if not change.resumable]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"the recipe differs ({'; '.join(others[:3])}{more})"
    if newest_checkpoint(path) is None:
        return "it holds no checkpoint to go on from"
    return None


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(aside)
