"""The files of the spool: segments of JSON lines, each locked by the process that owns it."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from noria.contracts.call import Call, Score, ScoreSource
from noria.contracts.call_json import call_from_json, call_to_json
from noria.contracts.errors import InvalidRecord

REJECTED = "rejected.jsonl"
"""Beside the segments: the records that the store refused, with the reason."""

_BATCH_BYTES = 4_000_000
_BATCH_RECORDS = 1000


@dataclass(slots=True)
class Segment:
    """One file of the spool. `stored` bytes from its start are in the store; `dirty` is what no fsync has seen."""

    path: Path
    fd: int
    size: int = 0
    records: int = 0
    stored: int = 0
    dirty: bool = False

    @classmethod
    def create(cls, folder: Path, number: int) -> "Segment":
        """A new, locked segment; names sort by age."""
        path = folder / f"{time.time_ns():020d}-{os.getpid()}-{number}.jsonl"
        # It gets its name only once it is locked: another process that starts now would take it for abandoned.
        unnamed = path.with_suffix(".new")
        fd = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path)
        return cls(path, fd)

    def append(self, line: bytes) -> None:
        """Write one line to the file. Raises `OSError`, and then none of it stays."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self.fd, line[written:])
        except OSError:
            os.ftruncate(self.fd, self.size)  # half a line would spoil the next one
            raise
        self.size += len(line)
        self.records += 1
        self.dirty = True

    def batch(self, size: int) -> list[bytes]:
        """The next whole lines before byte `size` that are not stored yet: one at least, and about 4 MB at most."""
        wanted = _BATCH_BYTES
        while True:
            data = os.pread(self.fd, min(wanted, size - self.stored), self.stored)
            if b"\n" in data:
                return [line + b"\n" for line in data.split(b"\n")[:-1][:_BATCH_RECORDS]]
            if len(data) < wanted:
                raise InvalidRecord(f"{self.path.name} has no line at byte {self.stored}, though it has {size} bytes")
            wanted *= 2  # a line longer than a batch

    def remove(self) -> None:
        """Delete the file; its lock ends with it."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def encode(record: Call | Score) -> bytes:
    """One record as a line of a segment."""
    if isinstance(record, Call):
        entry: dict[str, Any] = {"call": call_to_json(record)}
    else:
        entry = {"score": {**asdict(record), "at": record.at.isoformat()}}
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Call | Score:
    """Read what `encode` wrote. Raises `ValueError`, `KeyError` or `TypeError`, `InvalidRecord` among them."""
    entry = json.loads(line)
    if "call" in entry:
        return call_from_json(entry["call"])
    if "score" not in entry:
        raise InvalidRecord(f"a line of the spool holds a call or a score, not {sorted(entry)}")
    score = entry["score"]
    return Score(**{**score, "source": ScoreSource(score["source"]), "at": datetime.fromisoformat(score["at"])})


def abandoned(folder: Path) -> list[Segment]:
    """The segments that no living process holds, oldest first, each without the torn line that a kill may leave."""
    segments = []
    for path in sorted(folder.glob("*.jsonl")):
        if path.name == REJECTED:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:  # stored and deleted by its owner in the meantime
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        size, records = _whole_lines(fd)
        segment = Segment(path, fd, size, records)
        if records and path.exists():
            segments.append(segment)
        else:
            segment.remove()
    return segments


def _whole_lines(fd: int) -> tuple[int, int]:
    position = size = records = 0
    while block := os.pread(fd, 1 << 20, position):
        found = block.count(b"\n")
        if found:
            records += found
            size = position + block.rindex(b"\n") + 1
        position += len(block)
    return size, records


def sync_all(fds: Sequence[int], folder: Path) -> None:
    """Wait until files, and their names in the folder, are on the disk; closes every descriptor. Raises `OSError`."""
    with contextlib.ExitStack() as stack:
        for fd in fds:
            stack.callback(os.close, fd)
        directory = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, directory)
        for fd in (*fds, directory):
            os.fsync(fd)
