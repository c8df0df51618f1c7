"""The version registry: which policy versions each engine has been given, and which are proven.

A version is proven for an engine when the canary agreed there. Tokens sampled under a version that is published
but not yet proven are held back; under one that failed they are void.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

VersionState = Literal["published", "proven", "failed"]
Verdict = Literal["proven", "held", "void"]


def engine_names(engine: str) -> list[str]:
    """The engines that a receipt's `engine` names."""
    return engine.split(",")


class Versions:
    """State of (engine, version), built up from reports in the order they came."""

    def __init__(self, reports: Iterable[tuple[str, int, VersionState]] = ()) -> None:
        self._states: dict[str, dict[int, VersionState]] = {}
        self._serving: dict[str, int | None] = {}
        for engine, version, state in reports:
            self.report(engine, version, state)

    def report(self, engine: str, version: int, state: VersionState) -> None:
        """A later report about the same version replaces the earlier one. A failed publish takes the engine out
        of service until a version is proven there; a publish under way leaves its proven version serving."""
        self._states.setdefault(engine, {})[version] = state
        if state == "proven":
            self._serving[engine] = version
        elif state == "failed":
            self._serving[engine] = None
        else:
            self._serving.setdefault(engine, None)

    def oldest_serving(self) -> int | None:
        """Oldest proven version among the serving engines; None when no engine serves."""
        return min((version for version in self._serving.values() if version is not None), default=None)

    def judge(self, engine: str, versions: Iterable[int]) -> Verdict:
        """What becomes of a trajectory of `engine` whose tokens carry `versions`: void if one failed there, held
        if one is not proven there, else proven (also when it holds no sampled token).

        The turns of a trajectory may come from several engines (`engine-0,engine-1`), and which of them sampled a
        version is not in the receipt: it is void if it failed on any of them, proven if it is on one. The pool of the
        gateway has held each reply until its own engine proved it.
        """
        engines = [self._states.get(name, {}) for name in engine_names(engine)]
        found = [[states.get(version) for states in engines] for version in versions]
        if any("failed" in states for states in found):
            return "void"
        return "proven" if all("proven" in states for states in found) else "held"

    def engines(self) -> dict[str, int | None]:
        """Engine -> the proven version it serves (None: out of service)."""
        return dict(self._serving)

    def describe(self) -> str:
        """For messages, e.g. `engine-0 proven version 4, engine-1 not serving (version 5 failed)`."""
        parts = []
        for engine, serving in sorted(self._serving.items()):
            if serving is not None:
                parts.append(f"{engine} proven version {serving}")
            else:
                version, state = max(self._states[engine].items())
                parts.append(f"{engine} not serving (version {version} {state})")
        return ", ".join(parts) or "no engine has reported a version"
