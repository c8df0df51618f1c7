"""Append-only spool files: payloads framed by length and CRC-32, found again by `Where`.

One writer per process owns `<name>-<number>.spool` files and rolls to the next number at a size. A
record is one `write()`, so a killed writer leaves at most one torn record at the end of its last
file; reopening cuts it off. Everything else that does not match its checksum is damage, and is
refused with file and offset. Not a queue: who reads what, and when, is the coordinator's business.

Frame: magic "ARLS", payload length (u32), CRC-32 of the payload (u32), CRC-32 of those twelve bytes
(u32), payload; little-endian. The header has a checksum of its own so that a flipped length is seen
as damage, not as a torn tail that may be cut.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_agentrl.trajectory import codec
from megatron_agentrl.trajectory.types import Trajectory, Where

MAGIC = b"ARLS"
_HEAD = struct.Struct("<4sII")
_HEAD_CRC = struct.Struct("<I")
HEADER_BYTES = _HEAD.size + _HEAD_CRC.size
#: Folder of the spool inside a run folder.
FOLDER = "spool"


class SpoolError(RuntimeError):
    """A spool cannot be written or read as asked: a second writer, a bad name, a missing file."""


class SpoolCorrupt(SpoolError):
    """Bytes of a spool file do not match their checksum."""


class SpoolWriter:
    """Appends trajectories to `<run_dir>/spool/<name>-<number>.spool`. One per process and name.

    roll_bytes  a file that has reached this size is closed and the next number begins
    """

    def __init__(self, run_dir: str | os.PathLike[str], name: str, roll_bytes: int = 256 << 20) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SpoolError(f"spool name {name!r}: expected letters, digits, '-' or '_'")
        self._folder = Path(run_dir) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._roll_bytes = roll_bytes
        numbers = [int(found[1]) for path in self._folder.iterdir() if (found := self._pattern.fullmatch(path.name))]
        self._number = max(numbers, default=0)
        self._fd = self._open()

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self._name) + r"-(\d{6})\.spool")

    def _open(self) -> int:
        """Opens (or reopens) the file of the present number, cuts a torn tail and takes the lock."""
        path = self._folder / f"{self._name}-{self._number:06d}.spool"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = sum(HEADER_BYTES + where.length for where, _ in scan(path))
            if self._end < os.fstat(fd).st_size:
                os.ftruncate(fd, self._end)
        except BlockingIOError:
            os.close(fd)
            raise SpoolError(f"{path} has another writer; give each process a spool name of its own") from None
        except BaseException:
            os.close(fd)
            raise
        self._file = f"{FOLDER}/{path.name}"
        return fd

    def append(self, trajectory: Trajectory) -> Where:
        """Writes one trajectory and says where it lies."""
        return self.append_bytes(codec.encode(trajectory))

    def append_bytes(self, payload: bytes) -> Where:
        """Writes one payload with a single write() and says where it lies."""
        if self._end >= self._roll_bytes:
            self.close()
            self._number += 1
            self._fd = self._open()
        crc = zlib.crc32(payload)
        head = _HEAD.pack(MAGIC, len(payload), crc)
        record = head + _HEAD_CRC.pack(zlib.crc32(head)) + payload
        written = os.write(self._fd, record)
        if written != len(record):
            os.ftruncate(self._fd, self._end)
            raise SpoolError(
                f"{self._file}: {written} of {len(record)} bytes written at {self._end}; is the disk full?"
            )
        where = Where(file=self._file, offset=self._end + HEADER_BYTES, length=len(payload), crc32=crc)
        self._end += len(record)
        return where

    def close(self) -> None:
        """Flushes the present file to the disk and closes it."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


class SpoolReader:
    """Reads payloads by `Where`; keeps files open between reads. Only files inside the run's spool are read."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = Path(run_dir)
        self._fds: dict[str, int] = {}

    def read(self, where: Where) -> Trajectory:
        """The trajectory at `where`. Raises SpoolCorrupt when its bytes are not those that were written."""
        return codec.decode(self.read_bytes(where))

    def read_bytes(self, where: Where) -> bytes:
        """The payload at `where`, proven by the CRC of the receipt."""
        payload = os.pread(self._descriptor(where.file), where.length, where.offset)
        if len(payload) != where.length:
            raise SpoolCorrupt(
                f"{where.file} at offset {where.offset}: {len(payload)} bytes found, {where.length} expected"
            )
        if (crc := zlib.crc32(payload)) != where.crc32:
            raise SpoolCorrupt(
                f"{where.file} at offset {where.offset}: CRC-32 {crc:08x} found, {where.crc32:08x} expected"
            )
        return payload

    def _descriptor(self, file: str) -> int:
        if file not in self._fds:
            if not re.fullmatch(FOLDER + r"/[A-Za-z0-9_-]+\.spool", file):
                raise SpoolError(f"{file!r} is not a spool file name (expected {FOLDER}/NAME-NUMBER.spool)")
            try:
                self._fds[file] = os.open(self._run_dir / file, os.O_RDONLY)
            except OSError as error:
                raise SpoolError(
                    f"{self._run_dir / file} cannot be read ({error.strerror}); was the spool moved?"
                ) from error
        return self._fds[file]

    def close(self) -> None:
        """Closes all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def scan(path: str | os.PathLike[str]) -> Iterator[tuple[Where, bytes]]:
    """All whole records of one spool file in order; stops silently at a torn tail, refuses damage.

    A tail is torn when the file ends before the record does, or when nothing but zero bytes follow (a
    file system may extend a file before its data reaches the disk). Raises SpoolCorrupt.
    """
    path = Path(path)
    name = f"{FOLDER}/{path.name}"
    with path.open("rb") as file:
        offset = 0
        while header := file.read(HEADER_BYTES):
            if len(header) < HEADER_BYTES:
                return
            magic, length, crc = _HEAD.unpack_from(header)
            if magic != MAGIC or zlib.crc32(header[: _HEAD.size]) != _HEAD_CRC.unpack_from(header, _HEAD.size)[0]:
                if _only_zeros(header, file):
                    return
                raise SpoolCorrupt(f"{path} at offset {offset}: the record header does not match its checksum")
            payload = file.read(length)
            if len(payload) < length:
                return
            if zlib.crc32(payload) != crc:
                raise SpoolCorrupt(
                    f"{path} at offset {offset + HEADER_BYTES}: CRC-32 {zlib.crc32(payload):08x} found, {crc:08x} expected"
                )
            yield Where(file=name, offset=offset + HEADER_BYTES, length=length, crc32=crc), payload
            offset += HEADER_BYTES + length


def _only_zeros(header: bytes, file) -> bool:
    while header:
        if header.strip(b"\0"):
            return False
        header = file.read(1 << 20)
    return True
