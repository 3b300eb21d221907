"""The files of the spool: segments of binary frames, each file locked by the process that owns it.

A frame is a head of fixed size, then a JSON text and two bodies of any bytes. The head has the lengths of the three and
a CRC-32 over all of them, so that a frame that a crash cut off, or a disk spoilt, is known for what it is.
"""

import contextlib
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".spool"

_HEAD = struct.Struct("<4sIQQI")
_MAGIC = b"NSP1"
_BATCH_BYTES = 4_000_000
_BATCH_RECORDS = 1000


class Frame(NamedTuple):
    """One record as bytes."""

    text: bytes
    request: bytes = b""
    response: bytes = b""

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return _HEAD.size + len(self.text) + len(self.request) + len(self.response)

    def buffers(self) -> list[bytes]:
        """What stands in the file, in order."""
        crc = zlib.crc32(self.response, zlib.crc32(self.request, zlib.crc32(self.text)))
        head = _HEAD.pack(_MAGIC, len(self.text), len(self.request), len(self.response), crc)
        return [head, *(part for part in self if part)]


class Spoilt(NamedTuple):
    """Bytes of a segment that are no frame: a disk has changed them."""

    data: bytes
    reason: str


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
        path = folder / f"{time.time_ns():020d}-{os.getpid()}-{number}{SUFFIX}"
        # It gets its name only once it is locked: another process that starts now would take it for abandoned.
        unnamed = path.with_suffix(".new")
        fd = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path)
        return cls(path, fd)

    def append(self, frame: Frame) -> None:
        """Write one frame to the file. Raises `OSError`, and then none of it stays."""
        size = frame.size
        buffers = frame.buffers()
        try:
            written = os.writev(self.fd, buffers)
            if written < size:  # rare: the kernel took a part of it
                rest = memoryview(b"".join(buffers))[written:]
                while rest:
                    rest = rest[os.write(self.fd, rest) :]
        except OSError:
            os.ftruncate(self.fd, self.size)  # half a frame would spoil the next one
            raise
        self.size += size
        self.records += 1
        self.dirty = True

    def remove(self) -> None:
        """Delete the file; its lock ends with it."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


class Batch(NamedTuple):
    """Some frames that stand one after the other, and how many bytes of the file they take."""

    frames: list[Frame | Spoilt]
    size: int


def read_batch(fd: int, start: int, end: int) -> Batch:
    """The frames from `start` on, all that end before `end`: one at least, and about 4 MB or 1,000 at most."""
    frames: list[Frame | Spoilt] = []
    at = start
    while at < end and len(frames) < _BATCH_RECORDS and at - start < _BATCH_BYTES:
        frame, size = _read(fd, at, end)
        frames.append(frame)
        at += size
    return Batch(frames, at - start)


def _read(fd: int, at: int, end: int) -> tuple[Frame | Spoilt, int]:
    lengths = _lengths(fd, at, end)
    if lengths is None:  # nobody knows where the next frame begins
        rest = os.pread(fd, end - at, at)
        return Spoilt(rest, "the head of a frame is spoilt, and with it the rest of its segment"), end - at
    text, request, response, crc = lengths
    size = _HEAD.size + text + request + response
    body = os.pread(fd, size - _HEAD.size, at + _HEAD.size)
    if zlib.crc32(body) != crc:
        return Spoilt(body, "a frame does not have the checksum that it was written with"), size
    return Frame(body[:text], body[text : text + request], body[text + request :]), size


def _lengths(fd: int, at: int, end: int) -> tuple[int, int, int, int] | None:
    """The three lengths and the checksum of the frame at `at`; None if there is none that ends before `end`."""
    head = os.pread(fd, _HEAD.size, at)
    if len(head) < _HEAD.size:
        return None
    magic, text, request, response, crc = _HEAD.unpack(head)
    if magic != _MAGIC or at + _HEAD.size + text + request + response > end:
        return None
    return text, request, response, crc


def abandoned(folder: Path) -> list[Segment]:
    """The segments that no living process holds, oldest first, each without the torn frame that a kill may leave."""
    segments = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:  # stored and deleted by its owner in the meantime
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        size, records = _whole_frames(fd)
        segment = Segment(path, fd, size, records)
        if records and path.exists():
            segments.append(segment)
        else:
            segment.remove()
    return segments


def _whole_frames(fd: int) -> tuple[int, int]:
    """Bytes and records of a segment up to a frame that was cut off at its end."""
    end = os.fstat(fd).st_size
    at = records = 0
    while at < end:
        lengths = _lengths(fd, at, end)
        if lengths is None:
            if _is_torn(fd, at, end):
                return at, records
            return end, records + 1  # spoilt, and not by a kill: it is put aside when its turn comes
        at += _HEAD.size + sum(lengths[:3])
        records += 1
    return at, records


def _is_torn(fd: int, at: int, end: int) -> bool:
    """Whether what begins at `at` is a frame that goes on beyond the end of the file."""
    head = os.pread(fd, _HEAD.size, at)
    return _MAGIC.startswith(head[:4]) if len(head) < _HEAD.size else head.startswith(_MAGIC)


def sync_all(fds: Sequence[int], folder: Path) -> None:
    """Wait until files, and their names in the folder, are on the disk; closes every descriptor. Raises `OSError`."""
    with contextlib.ExitStack() as stack:
        for fd in fds:
            stack.callback(os.close, fd)
        directory = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, directory)
        for fd in (*fds, directory):
            os.fsync(fd)
