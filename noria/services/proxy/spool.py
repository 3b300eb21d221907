"""The durable write path: a record is in an append-only file before its answer leaves, and in the store soon after.

Segments of frames stand in the spool folder. A writer brings them into the store batch by batch, and a segment is
deleted once all of it is there, so that memory stays bounded however long the store is away. What a killed process
leaves behind, the next one replays; calls are idempotent by their uid and scores by their key.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from noria.services.proxy.batches import StoreAway, Written
from noria.services.proxy.records import Record, encode
from noria.services.proxy.segments import Segment, abandoned, sync_all
from noria.services.proxy.writer import Writer

SEGMENT_BYTES = 16_000_000
SYNC_SECONDS = 0.1

_FIRST_RETRY = 0.1
_LAST_RETRY = 5.0

_log = logging.getLogger("noria.services.proxy")


class Spool:
    """Append records now, have them in the store soon. One per process; a folder may be shared by several processes."""

    def __init__(
        self,
        folder: Path,
        writer: Writer,
        *,
        fsync: Literal["always", "interval", "never"] = "interval",
        flush_seconds: float = 0.05,
        max_bytes: int = 2_000_000_000,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder = folder
        self._writer = writer
        self._fsync = fsync
        self._flush_seconds = flush_seconds
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._segments: deque[Segment] = deque()
        self._active: Segment | None = None
        self._made = 0
        self._appended = 0
        self._stored = 0
        self._synced = 0
        self._bytes = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._syncing: asyncio.Task[None] | None = None
        self._sync_thread = ThreadPoolExecutor(1, "noria-spool-sync")
        self.max_bytes = max_bytes
        self.unrecorded = 0
        """Records that were dropped because the spool was full or could not be written."""
        self.rejected = 0
        """Records that could not be stored and were put aside."""
        self.recorded: Counter[str] = Counter()
        """Calls that are in the store, by their status."""
        self.spans_dropped = 0
        """Spans that no collector took."""

    @property
    def depth_bytes(self) -> int:
        """Bytes that are not in the store yet."""
        return self._bytes

    @property
    def depth_records(self) -> int:
        """Records that are not in the store yet."""
        return self._appended - self._stored

    # Life

    async def start(self) -> None:
        """Take over what dead processes left, and begin to bring it into the store."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for segment in await asyncio.to_thread(abandoned, self._folder):
            self._segments.append(segment)
            self._appended += segment.records
            self._bytes += segment.size
        if self._appended:
            _log.info("replaying %d records (%d bytes) from the spool", self._appended, self._bytes)
            self._wake.set()
        self._tasks.append(asyncio.create_task(self._flush_forever()))
        if self._fsync == "interval":
            self._tasks.append(asyncio.create_task(self._sync_forever()))

    async def close(self, timeout: float = 10.0) -> None:
        """Bring what is left into the store, for at most `timeout` seconds; the rest stays for the next process."""
        self._closing = True
        self._wake.set()
        self._hurry.set()
        flusher, *others = self._tasks
        await asyncio.wait((flusher,), timeout=timeout)
        for task in (flusher, *others):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fsync != "never":
            await self._sync()
        for _, waiting in self._waiting:
            waiting.cancel()
        left = self.depth_records
        if left:
            _log.warning("%d records stay in the spool, the next start replays them", left)
        await self._writer.close()
        self._sync_thread.shutdown(wait=True)
        while self._segments:
            segment = self._segments.popleft()
            if left:
                os.close(segment.fd)
            else:
                segment.remove()

    # Writing

    def append(self, record: Record) -> bool:
        """Write one record to the file, without waiting for the disk; False if it was dropped, which is counted."""
        try:
            frame = encode(record)
            size = frame.size
            if self._bytes + size > self._max_bytes:
                return self._drop(f"the spool holds {self._bytes} bytes, proxy.spool_max_bytes is {self._max_bytes}")
            self._segment().append(frame)
        except (OSError, TypeError, ValueError) as error:
            return self._drop(f"{type(error).__name__}: {error}")
        self._bytes += size
        self._appended += 1
        self._wake.set()
        return True

    async def write(self, record: Record) -> bool:
        """`append`, then wait for the disk if `proxy.spool_fsync` is `always`; calls at one time share one fsync."""
        if not self.append(record):
            return False
        if self._fsync == "always":
            ticket = self._appended
            while self._synced < ticket:
                if self._syncing is None or self._syncing.done():
                    self._syncing = asyncio.create_task(self._sync())
                await asyncio.shield(self._syncing)
        return True

    async def flushed(self) -> None:
        """Return once everything appended before this call is in the store, or was put aside."""
        if self._stored >= self._appended:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._appended, waiting))
        self._hurry.set()
        await waiting

    def lose(self, why: str) -> None:
        """Count a record that could not even be made."""
        self._drop(why)

    def _drop(self, why: str) -> bool:
        if self.unrecorded == 0:
            _log.error("records are being dropped: %s", why)
        self.unrecorded += 1
        return False

    def _segment(self) -> Segment:
        if self._active is None or self._active.size >= self._segment_bytes:
            self._made += 1
            self._active = Segment.create(self._folder, self._made)
            self._segments.append(self._active)
        return self._active

    # To the disk

    async def _sync_forever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await self._sync()

    async def _sync(self) -> None:
        ticket = self._appended
        # Duplicated, since a segment may be stored and closed while the disk is busy.
        fds = [os.dup(segment.fd) for segment in self._segments if segment.dirty]
        for segment in self._segments:
            segment.dirty = False
        if fds:
            try:
                await asyncio.get_running_loop().run_in_executor(self._sync_thread, sync_all, fds, self._folder)
            except OSError as error:
                _log.error("the disk does not take the spool: %s", error)
        self._synced = max(self._synced, ticket)

    # To the store

    async def _flush_forever(self) -> None:
        retry = _FIRST_RETRY
        while True:
            if self._stored >= self._appended:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            if not self._waiting and not self._closing:  # more records in one transaction cost the store less
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._flush_seconds)
            self._hurry.clear()
            segment = self._first_unstored()
            try:
                written = await self._writer.write(segment.path, segment.stored, segment.size)
            except Exception as error:  # of whatever kind: the records are safe, and the next try may succeed
                if retry == _FIRST_RETRY:
                    level = logging.WARNING if isinstance(error, StoreAway) else logging.ERROR
                    _log.log(level, "the online store does not take records, they wait in the spool: %s", error)
                if self._closing:
                    return
                await asyncio.sleep(retry)
                retry = min(retry * 2, _LAST_RETRY)
                continue
            if retry != _FIRST_RETRY:
                _log.info("the online store takes records again")
                retry = _FIRST_RETRY
            self._advance(segment, written)

    def _advance(self, segment: Segment, written: Written) -> None:
        segment.stored += written.size
        self._bytes -= written.size
        self._stored += written.records
        self.rejected += written.rejected
        self.recorded.update(written.statuses)
        self.spans_dropped = written.spans_dropped
        self._remove_stored()
        waiting, self._waiting = self._waiting, []
        for target, future in waiting:
            if self._stored < target:
                self._waiting.append((target, future))
            elif not future.done():
                future.set_result(None)

    def _first_unstored(self) -> Segment:
        self._remove_stored()
        return self._segments[0]

    def _remove_stored(self) -> None:
        while self._segments and self._segments[0] is not self._active:
            if self._segments[0].stored < self._segments[0].size:
                return
            self._segments.popleft().remove()
