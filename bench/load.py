"""The load generator: `python -m bench.load http://127.0.0.1:9000 --kind short --connections 16 --seconds 2`.

A closed loop: each connection sends its next call when the last one's answer is whole and has been compared. When the
time is up no call is begun, and those in flight are waited for, so that the number of calls made is exact.
"""

import argparse
import asyncio
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import uvloop

from bench.calls import KINDS, CallKind
from bench.connection import Answer, Connection, connect, post

LEAST_CALLS = 2
"""Calls by connection that are waited for, however slow the server: fewer have no rate and no percentiles."""
STALL_SECONDS = 60.0
"""How long they, and the last answers, may take after the time is up."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run measured: `calls` ended in `seconds` after the warm-up; the rest is milliseconds of single calls.

    `made` counts every call, those of the warm-up and those that ended too late included.
    """

    calls: int
    made: int
    seconds: float
    p50_ms: float
    p99_ms: float
    first_byte_p50_ms: float

    @property
    def calls_per_second(self) -> float:
        """Calls that ended in the measured time, by second."""
        return self.calls / self.seconds


class WrongAnswer(RuntimeError):
    """A server answered something else than it should; the benchmark's figures would mean nothing."""


class Load:
    """The connections of one run."""

    def __init__(self, url: str, kind: CallKind, check: Callable[[Answer], bool]) -> None:
        self._url = url
        self._request = post(url, kind.request)
        self._check = check
        self._running = 0
        self.made = 0
        self.latencies: list[float] = []
        self.first_bytes: list[float] = []
        self.seconds = 0.0

    async def run(self, connections: int, seconds: float, warm_up: float) -> None:
        """Make calls until the time is up, and longer until each connection has ended `LEAST_CALLS` of them.

        Raises `WrongAnswer` for the first answer that is not as it should be.
        """
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opened = [await self._connect() for _ in range(connections)]
        self._counted_from = perf_counter() + warm_up
        self._deadline = self._counted_from + seconds
        self._running = connections
        self._least = LEAST_CALLS * connections
        try:
            for connection in opened:
                self._send(connection)
            await asyncio.wait_for(self._ended, warm_up + seconds + STALL_SECONDS)
        finally:
            for connection in opened:
                connection.close()

    async def _connect(self) -> Connection:
        connection: Connection

        def on_answer(answer: Answer | None) -> None:
            self._on_answer(connection, answer)

        connection = await connect(self._url, on_answer)
        return connection

    def _send(self, connection: Connection) -> None:
        self.made += 1
        connection.send(self._request)

    def _on_answer(self, connection: Connection, answer: Answer | None) -> None:
        if self._ended.done():
            return
        if answer is None or answer.status != 200 or not self._check(answer):
            self._ended.set_exception(WrongAnswer(_describe(self._url, answer)))
            return
        now = perf_counter()
        if not self.seconds and now >= self._counted_from:
            self.latencies.append(answer.seconds)
            self.first_bytes.append(answer.first_byte)
            if now >= self._deadline and len(self.latencies) >= self._least:
                self.seconds = now - self._counted_from
        if not self.seconds:
            self._send(connection)
            return
        self._running -= 1
        if not self._running:
            self._ended.set_result(None)


def _describe(url: str, answer: Answer | None) -> str:
    if answer is None:
        return f"{url} closed the connection in the middle of a call"
    body = f"{len(answer.body)} bytes that are not the upstream's: {answer.body[:300]!r}"
    return f"{url} answered {answer.status} with {body}"


def measure(
    url: str,
    kind: CallKind,
    connections: int,
    seconds: float,
    *,
    exact: bool = True,
    warm_up: float = 0.3,
) -> Sample:
    """Load one server with calls of one kind.

    Args:
        url: the whole URL of the endpoint.
        kind: what is asked, and the bytes that must come back.
        connections: calls in flight.
        seconds: how long calls are counted at least, after `warm_up` seconds that are not.
        exact: whether the answer must be the upstream's byte for byte; else it must be 200 with a body.
        warm_up: seconds.

    Raises:
        WrongAnswer: an answer was not 200, not the upstream's bytes, or broke off.
        TimeoutError: the server answers too slowly to be measured.
    """
    expected = kind.answer

    def check(answer: Answer) -> bool:
        return answer.body == expected if exact else bool(answer.body)

    load = Load(url, kind, check)
    gc.collect()
    gc.disable()  # a collection in the middle would be measured as the server's latency
    try:
        uvloop.run(load.run(connections, seconds, warm_up))
    finally:
        gc.enable()
    return Sample(
        calls=len(load.latencies),
        made=load.made,
        seconds=load.seconds,
        p50_ms=1e3 * statistics.median(load.latencies),
        p99_ms=1e3 * statistics.quantiles(load.latencies, n=100, method="inclusive")[98],
        first_byte_p50_ms=1e3 * statistics.median(load.first_bytes),
    )


def main() -> None:
    """Load a server and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="base URL, without /v1")
    parser.add_argument("--kind", choices=KINDS, default="short")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--inexact", action="store_true", help="the answer need not be the upstream's bytes")
    given = parser.parse_args()
    url = f"{given.url}/v1/chat/completions"
    sample = measure(url, KINDS[given.kind], given.connections, given.seconds, exact=not given.inexact)
    print(f"{sample.calls_per_second:.0f} calls/s  {sample}")


if __name__ == "__main__":
    main()
