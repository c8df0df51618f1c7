"""The ledger's file: SQLite in WAL mode, held by one process.

Only SQL lives here: schema, loading, upserts of whole rows, snapshots and the rewind of a resume. What a transition
means is `coordinator.ledger`'s. A commit writes everything that changed since the last one, so its cost is one
fsync however many rows there are.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.coordinator.rows import STALE, Failure, Group, LedgerError, Sample
from megatron_agentrl.coordinator.versions import VersionState
from megatron_agentrl.trajectory.types import Receipt

SCHEMA_VERSION = 1
SNAPSHOT_NAME = "ledger.sqlite"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups (
    task_id TEXT PRIMARY KEY, kind TEXT NOT NULL, admission INTEGER NOT NULL, prompt INTEGER NOT NULL,
    position INTEGER, round INTEGER NOT NULL, eval_id TEXT, state TEXT NOT NULL, reason TEXT NOT NULL, step INTEGER
) WITHOUT ROWID;
CREATE INDEX groups_by_position ON groups (position) WHERE kind = 'train';
CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE samples (
    task_id TEXT NOT NULL, sample INTEGER NOT NULL, state TEXT NOT NULL, asked INTEGER NOT NULL, worker TEXT NOT NULL,
    failures BLOB NOT NULL, receipt BLOB, PRIMARY KEY (task_id, sample)
) WITHOUT ROWID;
CREATE TABLE plans (
    step INTEGER PRIMARY KEY, state TEXT NOT NULL, body BLOB NOT NULL, metrics BLOB, planned REAL NOT NULL, trained REAL
);
CREATE TABLE versions (
    report INTEGER PRIMARY KEY, engine TEXT NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL,
    gap REAL, seconds REAL, time REAL NOT NULL, start INTEGER NOT NULL
);
CREATE TABLE evals (
    eval_id TEXT PRIMARY KEY, tag TEXT NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL, result BLOB
) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (event INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
"""

_GROUP = "INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?,?,?)"
_SAMPLE = "INSERT OR REPLACE INTO samples VALUES (?,?,?,?,?,?,?)"

_encode = msgspec.json.encode
_receipt = msgspec.json.Decoder(Receipt).decode
_failures = msgspec.json.Decoder(list[Failure]).decode


class Store:
    """Opens (or makes) the file and keeps it locked until `close`; a second opener gets LedgerError at once."""

    def __init__(self, path: str | Path, identity: str) -> None:
        self.path = Path(path)
        self.db = sqlite3.connect(self.path, isolation_level=None, timeout=0.0, check_same_thread=False)
        try:
            # EXCLUSIVE before the first read: then WAL needs no shared memory, and no other process gets in.
            self.db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = FULL")
            self.db.execute("BEGIN EXCLUSIVE")
            self.db.execute("COMMIT")
            if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                self._create(identity)
        except sqlite3.DatabaseError as error:
            self.db.close()
            raise LedgerError(
                f"{self.path}: {error}; another coordinator holds it, or it is not a ledger that can be written"
            ) from error
        try:
            check(self.path, dict(self.db.execute("SELECT key, value FROM meta")), identity)
        except LedgerError:
            self.db.close()
            raise

    def _create(self, identity: str) -> None:
        values = {
            "schema": SCHEMA_VERSION,
            "ledger": uuid.uuid4().hex,
            "identity": identity,
            "commits": 0,
            "admitted": 0,
            "cursor": 0,
            "start": 0,
        }
        self.db.executescript(f"BEGIN; {_SCHEMA}")
        self.db.executemany("INSERT INTO meta VALUES (?,?)", values.items())
        self.db.execute("COMMIT")

    def close(self) -> None:
        self.db.close()

    def meta(self, key: str) -> Any:
        return self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]

    # ---- writing -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        self.db.execute("UPDATE meta SET value = value + 1 WHERE key = 'commits'")
        self.db.execute("COMMIT")

    def put_meta(self, **values: int) -> None:
        self.db.executemany("UPDATE meta SET value = ? WHERE key = ?", [(v, k) for k, v in values.items()])

    def put_groups(self, groups: Iterable[Group]) -> None:
        self.db.executemany(
            _GROUP,
            [
                (g.task_id, g.kind, g.order, g.prompt, g.position, g.round, g.eval_id, g.state, g.reason, g.step)
                for g in groups
            ],
        )

    def put_samples(self, samples: Iterable[tuple[str, Sample]]) -> None:
        self.db.executemany(
            _SAMPLE,
            [
                (
                    task_id,
                    s.index,
                    s.state,
                    s.asked,
                    s.worker,
                    _encode(s.failures),
                    None if s.receipt is None else _encode(s.receipt),
                )
                for task_id, s in samples
            ],
        )

    def put_plan(self, step: int, body: bytes) -> None:
        self.db.execute("INSERT INTO plans VALUES (?,'planned',?,NULL,?,NULL)", (step, body, time.time()))

    def put_trained(self, step: int, metrics: bytes) -> None:
        self.db.execute(
            "UPDATE plans SET state = 'trained', metrics = ?, trained = ? WHERE step = ?", (metrics, time.time(), step)
        )

    def put_version(self, engine: str, version: int, state: str, gap: float | None, seconds: float | None) -> None:
        self.db.execute(
            "INSERT INTO versions SELECT NULL,?,?,?,?,?,?,value FROM meta WHERE key = 'start'",
            (engine, version, state, gap, seconds, time.time()),
        )

    def put_eval(self, eval_id: str, tag: str, version: int, state: str, result: bytes | None) -> None:
        self.db.execute("INSERT OR REPLACE INTO evals VALUES (?,?,?,?,?)", (eval_id, tag, version, state, result))

    def put_counts(self, counts: dict[str, int]) -> None:
        self.db.executemany("INSERT OR REPLACE INTO counters VALUES (?,?)", counts.items())

    def put_event(self, kind: str, body: dict[str, Any]) -> None:
        self.db.execute("INSERT INTO events VALUES (NULL,?,?,?)", (time.time(), kind, _encode(body)))

    def prune(self, step: int) -> None:
        """Lets go of what no resume at `step` or later reads: plan bodies of the steps before it, and the samples of
        groups and evals that had their outcome by then. The groups themselves stay: they are the account."""
        self.begin()
        run = self.db.execute
        run("UPDATE plans SET body = x'' WHERE step < ? AND length(body) > 0", (step,))
        old = "SELECT max(admission) FROM groups WHERE kind = 'train' AND step < ?"
        run(
            f"""DELETE FROM samples WHERE task_id IN (SELECT task_id FROM groups WHERE kind = 'train' AND (
                (state = 'trained' AND step < ?) OR (state IN ('dropped', 'failed') AND admission < ({old}))))""",
            (step, step),
        )
        gone = "SELECT eval_id FROM evals WHERE state = 'done' AND version < ?"
        run(f"DELETE FROM samples WHERE task_id IN (SELECT task_id FROM groups WHERE eval_id IN ({gone}))", (step,))
        run(f"DELETE FROM groups WHERE eval_id IN ({gone})", (step,))
        self.end()

    # ---- reading -----------------------------------------------------------------------------------------------

    def live_groups(self) -> Iterator[Group]:
        """Training groups that are neither trained nor given up, and the groups of open evals, as they were asked."""
        which = """(g.kind = 'train' AND g.state IN ('in_flight', 'complete', 'planned'))
                   OR g.eval_id IN (SELECT eval_id FROM evals WHERE state = 'open')"""
        samples: dict[str, list[Sample]] = {}
        for task_id, index, state, asked, worker, failures, receipt in self.db.execute(
            f"SELECT s.* FROM samples s JOIN groups g USING (task_id) WHERE {which} ORDER BY s.task_id, s.sample"
        ):
            kept = None if receipt is None else _receipt(receipt)
            samples.setdefault(task_id, []).append(Sample(index, state, asked, worker, 0.0, _failures(failures), kept))
        for row in self.db.execute(f"SELECT * FROM groups g WHERE {which} ORDER BY kind, admission, task_id"):
            task_id, kind, order, prompt, position, round, eval_id, state, reason, step = row
            yield Group(task_id, kind, order, prompt, samples[task_id], position, round, eval_id, state, reason, step)

    def group_counts(self) -> dict[str, int]:
        """State -> number of training groups."""
        return dict(self.db.execute("SELECT state, count(*) FROM groups WHERE kind = 'train' GROUP BY state"))

    def returned(self) -> list[tuple[int, int]]:
        """(position, next round) of the prompts whose latest group was dropped as stale."""
        return self.db.execute(
            """SELECT position, max(round) + 1 FROM groups WHERE kind = 'train' GROUP BY position
               HAVING sum(state = 'dropped' AND reason = ?) = count(*) ORDER BY position""",
            (STALE,),
        ).fetchall()

    def positions(self) -> tuple[int, int]:
        """(different stream positions that have a group, positions that have more than one group that counts)."""
        different = self.db.execute("SELECT count(DISTINCT position) FROM groups WHERE kind = 'train'").fetchone()[0]
        double = self.db.execute(
            """SELECT count(*) FROM (SELECT 1 FROM groups WHERE kind = 'train' GROUP BY position
               HAVING sum(NOT (state = 'dropped' AND reason = ?)) > 1 OR max(position) >= ?)""",
            (STALE, self.meta("cursor")),
        ).fetchone()[0]
        return different, double

    def plan(self, step: int) -> bytes | None:
        row = self.db.execute("SELECT body FROM plans WHERE step = ?", (step,)).fetchone()
        return None if row is None else row[0]

    def pruned_steps(self) -> int:
        """Steps below this one have no plan body any more."""
        return self.db.execute("SELECT coalesce(max(step) + 1, 0) FROM plans WHERE length(body) = 0").fetchone()[0]

    def checkpoint_before(self, step: int) -> int | None:
        """The newest step below `step` for which a checkpoint was noted."""
        bodies = self.db.execute("SELECT body FROM events WHERE kind = 'checkpoint'")
        steps = [msgspec.json.decode(body)["step"] for (body,) in bodies]
        return max((noted for noted in steps if noted < step), default=None)

    def plan_counts(self) -> tuple[int, int]:
        """(plans made, plans trained). Plans are made and trained in order of step, from 0."""
        return self.db.execute("SELECT count(*), coalesce(sum(state = 'trained'), 0) FROM plans").fetchone()

    def version_reports(self) -> list[tuple[str, int, VersionState]]:
        """Reports of the present start, in order."""
        return self.db.execute(
            "SELECT engine, version, state FROM versions WHERE start = ? ORDER BY report", (self.meta("start"),)
        ).fetchall()

    def evals(self) -> list[tuple[str, str, int, str, bytes | None]]:
        return self.db.execute("SELECT eval_id, tag, version, state, result FROM evals ORDER BY eval_id").fetchall()

    def counts(self) -> dict[str, int]:
        return dict(self.db.execute("SELECT name, value FROM counters"))

    # ---- snapshot and resume -----------------------------------------------------------------------------------

    def snapshot(self, folder: Path) -> Path:
        """Writes the whole ledger into `folder` as one file; the final name appears only when all of it is on disk."""
        final = folder / SNAPSHOT_NAME
        partial = folder / f"{SNAPSHOT_NAME}.tmp"
        partial.unlink(missing_ok=True)
        copy = sqlite3.connect(partial)
        try:
            self.db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        finally:
            copy.close()
        _fsync(partial)
        partial.replace(final)
        _fsync(folder)
        return final

    def restore(self, snapshot: Path) -> None:
        """Replaces everything by the snapshot's content, in one transaction."""
        source = _open_read_only(snapshot)
        try:
            source.backup(self.db)
        finally:
            source.close()

    def rewind(self, step: int) -> None:
        """Brings the ledger to the start of `step`: what was trained from there on is planned again, what waited for
        a worker or an engine of the previous start is queued again, versions and open evals are forgotten."""
        self.begin()
        run = self.db.execute
        for table in ("plans", "groups"):
            run(f"UPDATE {table} SET state = 'planned' WHERE state = 'trained' AND step >= ?", (step,))
            run(f"UPDATE {table} SET state = 'trained' WHERE state = 'planned' AND step < ?", (step,))
        run("UPDATE samples SET state = 'queued', receipt = NULL WHERE state IN ('asked', 'held')")
        run("UPDATE meta SET value = value + 1 WHERE key = 'start'")
        gone = "SELECT eval_id FROM evals WHERE state = 'open' OR version > ?"
        run(f"DELETE FROM samples WHERE task_id IN (SELECT task_id FROM groups WHERE eval_id IN ({gone}))", (step,))
        run(f"DELETE FROM groups WHERE eval_id IN ({gone})", (step,))
        run(f"DELETE FROM evals WHERE eval_id IN ({gone})", (step,))
        self.end()

    def forget_plans(self, step: int) -> None:
        """Takes the plans from `step` on apart: their groups are complete again. Inside a transaction."""
        self.db.execute("DELETE FROM plans WHERE step >= ?", (step,))
        self.db.execute(
            "UPDATE groups SET state = 'complete', step = NULL WHERE state = 'planned' AND step >= ?", (step,)
        )


def check(path: Path, meta: dict[str, Any], identity: str) -> None:
    """LedgerError when the file of these meta values is of another schema or was begun with other prompts."""
    if (found := meta.get("schema")) != SCHEMA_VERSION:
        raise LedgerError(f"{path}: schema {found}, this program reads {SCHEMA_VERSION}; start a new run")
    if meta.get("identity") != identity:
        raise LedgerError(
            f"{path}: the run began with other prompts, order or seed than the recipe gives now; restore the prompt "
            f"file and data settings, or start a run under a new run_name"
        )


def peek(snapshot: Path) -> dict[str, Any]:
    """The meta values of a snapshot file."""
    db = _open_read_only(snapshot)
    try:
        return dict(db.execute("SELECT key, value FROM meta"))
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{snapshot}: not a ledger ({error}); resume from another checkpoint") from error
    finally:
        db.close()


def _open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
