"""Whole runs through the command line, with every part real: helpers of the end-to-end tests."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


@dataclass
class Finished:
    """A finished command: the run folder, what it printed, its exit code."""

    folder: Path
    stdout: str
    stderr: str
    code: int

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self, kind: str) -> list[dict]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "megatron_agentrl.app.cli", *words]


def start(*words: str) -> subprocess.Popen:
    env = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(
        command(*words), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, verb: str, *overrides: str, timeout: float = 900) -> Finished:
    """Runs `megatron-agentrl VERB recipe=quickstart …` with the run folder `folder` and waits for its end."""
    words = [verb, "recipe=quickstart", f"run_root={folder.parent}", f"run_name={folder.name}", *overrides]
    process = start(*words)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.kill()
    if verb in ("eval", "sft"):
        folder = folder.with_name(f"{folder.name}-{verb}")  # these two keep out of the run's own folder
    return Finished(folder, stdout, stderr, process.returncode)


def tree(process: subprocess.Popen) -> list[psutil.Process]:
    """Every process below a started command, grandchildren included."""
    return psutil.Process(process.pid).children(recursive=True)


def survivors(processes: list[psutil.Process]) -> list[str]:
    """Which of them still run, by command line."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
    return found


def wait_for(condition, seconds: float, what: str):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what}: not after {seconds} s")
