"""Who brings the spool into the store: a process of its own beside the proxy's, or a thread in it.

As a process (`python -m noria.services.proxy.writer`) it reads its configuration as the first line of standard input,
then one JSON line for each batch, and answers each with one on standard output. It ends when its input does, so that it
outlives no proxy. It yields the core to the process that answers calls.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from noria.config import Config
from noria.services.proxy.batches import Batches, StoreAway, Written
from noria.services.proxy.spans import SpanExporter
from noria.stores.bodies import Bodies
from noria.stores.online import OnlineStore

NICENESS = 10
_LINE_LIMIT = 1 << 20


class Writer(Protocol):
    """Brings batches into the store, one at a time."""

    async def write(self, path: Path, start: int, end: int) -> Written:
        """Store the next frames of a segment; raises `StoreAway`."""

    async def close(self) -> None:
        """End; what was not written stays in the spool."""


def open_store(config: Config) -> OnlineStore:
    """The online store as services use it, large content in files."""
    bodies = Bodies(config.bodies_dir)
    return OnlineStore(config.store_url, bodies=bodies, inline_max_bytes=config.store.inline_max_bytes)


class ThreadWriter:
    """Writes from a thread of this process."""

    def __init__(self, config: Config, store: OnlineStore) -> None:
        self._spans = SpanExporter.of(config.telemetry)
        self._batches = Batches(store, config.spool_dir, self._spans)
        self._thread = ThreadPoolExecutor(1, "noria-spool-store")

    async def write(self, path: Path, start: int, end: int) -> Written:
        """Store the next frames of a segment; raises `StoreAway`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._batches.write, path, start, end)

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


class ProcessWriter:
    """Writes from a child process, which is started again where it has ended."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        return None if self._process is None else self._process.pid

    async def write(self, path: Path, start: int, end: int) -> Written:
        """Store the next frames of a segment; raises `StoreAway`, also where the child has ended."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"path": str(path), "start": start, "end": end}).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except asyncio.CancelledError:
            self._kill()  # its next answer would be taken for that of another batch
            raise
        except ConnectionError:
            line = b""
        if not line:
            code = await process.wait()
            self._process = None
            raise StoreAway(f"the writer process has ended with code {code}; another one is started")
        answer = json.loads(line)
        if "away" in answer:
            raise StoreAway(answer["away"])
        return Written(**answer)

    async def close(self) -> None:
        """Let the child end; one that does not within seconds is killed."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            self._kill()
            await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "noria.services.proxy.writer",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
            )
            assert self._process.stdin is not None
            tree = {**self._config.model_dump(mode="json"), "root": str(self._config.root)}
            self._process.stdin.write(json.dumps(tree).encode() + b"\n")
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None


def main() -> None:
    """Write batches until standard input ends."""
    # The proxy decides when to end: a signal to the whole process group must not cut off its last batch.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    config = Config.model_validate(json.loads(sys.stdin.readline()))
    spans = SpanExporter.of(config.telemetry)
    batches = Batches(open_store(config), config.spool_dir, spans)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = asdict(batches.write(Path(order["path"]), order["start"], order["end"]))
        except StoreAway as error:
            answer = {"away": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    if spans is not None:
        spans.close()


if __name__ == "__main__":
    main()
