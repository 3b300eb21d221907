"""An upstream on loopback that is told byte by byte what to send, and keeps byte by byte what it was sent."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 529: "Overloaded"}


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(frozen=True)
class Answer:
    """What is sent: `pieces`, each in a write of its own.

    `framing` is `chunked`, `length`, or `close` (the body ends with the connection). With `dies` the connection is
    reset after the last piece, before the body has ended. `gate` is waited for before every piece but the first.
    """

    pieces: Sequence[bytes]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/event-stream; charset=utf-8"),)
    framing: str = "chunked"
    dies: bool = False
    gate: asyncio.Semaphore | None = None


@dataclass
class WireUpstream:
    """The running server, and what it sends to whoever asks next."""

    url: str = ""
    answer: Answer = field(default_factory=lambda: Answer([b"data: [DONE]\n\n"]))
    asked: list[Asked] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection was closed by the other side while an answer was being sent."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await _head(reader):
                self.asked.append(await _request(head, reader))
                if not await self._send(self.answer, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed.set()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _send(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        headers = list(answer.headers)
        if answer.framing == "chunked":
            headers.append(("Transfer-Encoding", "chunked"))
        elif answer.framing == "length":
            headers.append(("Content-Length", str(sum(map(len, answer.pieces)) + answer.dies)))
        lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Odd')}", *map(": ".join, headers), "", ""]
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        for place, piece in enumerate(answer.pieces):
            while place and answer.gate is not None and not _left(reader):
                with suppress(TimeoutError):
                    await asyncio.wait_for(answer.gate.acquire(), 0.02)
                    break
            if _left(reader):
                self.closed.set()
                return False
            if piece:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.framing == "chunked" else piece)
                await writer.drain()
            await asyncio.sleep(0)
        if answer.dies:
            writer.transport.abort()
            return False
        if answer.framing == "chunked":
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return answer.framing != "close"


def _left(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def _request(head: bytes, reader: asyncio.StreamReader) -> Asked:
    line, *fields = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = line.split(" ")
    headers = tuple((name, value.strip()) for name, _, value in (one.partition(":") for one in fields))
    lower = {name.lower(): value for name, value in headers}
    body = b""
    if lower.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif "content-length" in lower:
        body = await reader.readexactly(int(lower["content-length"]))
    return Asked(method, target, headers, body)


@asynccontextmanager
async def wire_upstream() -> AsyncIterator[WireUpstream]:
    """A running upstream, and no connection of it afterwards."""
    upstream = WireUpstream()
    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(upstream.serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await server.wait_closed()
