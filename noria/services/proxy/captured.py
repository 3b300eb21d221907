"""The bytes of answers in flight, kept for their records: in memory up to a bound over all calls, then on disk."""

import tempfile
from pathlib import Path
from typing import IO


class CaptureMemory:
    """How many bytes all captures hold in memory; one that would go beyond `limit` moves to a nameless file."""

    def __init__(self, limit: int, folder: Path) -> None:
        self.limit = limit
        self.folder = folder
        self.used = 0
        self.spilled = 0
        """Answers that went to disk."""


class Captured:
    """What has arrived of one answer, in order."""

    __slots__ = ("_chunks", "_file", "_memory", "_size")

    def __init__(self, memory: CaptureMemory) -> None:
        self._memory = memory
        self._chunks: list[bytes] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, chunk: bytes) -> None:
        """Keep one more piece. Raises `OSError` where it has to go to a disk that does not take it."""
        if self._file is not None:
            self._file.write(chunk)
            return
        memory = self._memory
        if memory.used + len(chunk) > memory.limit:
            self._file = tempfile.TemporaryFile(dir=memory.folder)  # noqa: SIM115
            memory.spilled += 1
            self._file.writelines((*self._chunks, chunk))
            self._forget()
            return
        self._chunks.append(chunk)
        self._size += len(chunk)
        memory.used += len(chunk)

    def whole(self) -> bytes:
        """All of it."""
        if self._file is not None:
            self._file.seek(0)
            return self._file.read()
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def close(self) -> None:
        """Give memory and file back; safe to repeat."""
        if self._file is not None:
            self._file.close()
        self._forget()

    def _forget(self) -> None:
        self._memory.used -= self._size
        self._size = 0
        self._chunks = []
