"""Both ends of a proxy as sockets, so that a test sees the bytes and no HTTP library mends them on the way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

Headers = list[tuple[str, str]]
"""Names in lower case, in the order in which they came."""


@dataclass(frozen=True)
class Asked:
    """A request as the upstream read it; `body` is empty where a handler reads it."""

    line: str
    headers: Headers
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Asked], Awaitable[None]]


@dataclass
class Upstream:
    """An upstream that answers each request with exactly these bytes, or as a handler says."""

    answer: bytes | Handler
    writers: list[asyncio.StreamWriter]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while head := await read_head(reader):
                line, headers = head
                if callable(self.answer):
                    self.asked.append(Asked(line, headers, b""))
                    await self.answer(reader, writer, self.asked[-1])
                else:
                    self.asked.append(Asked(line, headers, await read_body(reader, headers)))
                    writer.write(self.answer)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[str, Headers] | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    line, *fields = head.split("\r\n")[:-2]
    return line, [(name.lower(), value.strip()) for name, _, value in (item.partition(":") for item in fields)]


async def read_body(reader: asyncio.StreamReader, headers: Headers) -> bytes:
    framing = dict(headers)
    if framing.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(framing.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


@dataclass
class Wires:
    """Makes upstreams and connections, and the bytes that go over them."""

    servers: list[asyncio.Server] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    read_body = staticmethod(read_body)

    async def upstream(self, answer: bytes | Handler, port: int = 0) -> Upstream:
        upstream = Upstream(answer, self.writers)
        self.servers.append(await asyncio.start_server(upstream.serve, "127.0.0.1", port, limit=2**20))
        upstream.url = f"http://127.0.0.1:{self.servers[-1].sockets[0].getsockname()[1]}"
        return upstream

    async def connect(self, proxy: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(proxy.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=2**20)
        self.writers.append(writer)
        return reader, writer

    async def answered(self, reader: asyncio.StreamReader) -> tuple[int, Headers]:
        """Status and headers of the answer that comes next."""
        head = await asyncio.wait_for(read_head(reader), 5)
        assert head is not None
        return int(head[0].split()[1]), head[1]

    async def send(self, proxy: Any, sent: bytes) -> tuple[int, Headers, bytes]:
        """Status, headers and body of the answer to a request that closes its connection."""
        reader, writer = await self.connect(proxy)
        writer.write(sent)
        status, headers = await self.answered(reader)
        rest = await asyncio.wait_for(reader.read(), 5)
        if ("transfer-encoding", "chunked") in headers:
            again = asyncio.StreamReader()
            again.feed_data(rest)
            again.feed_eof()
            rest = await read_body(again, headers)
        return status, headers, rest

    def request(self, method: str, path: str, body: bytes | None = None, *headers: str, version: str = "1.1") -> bytes:
        """The bytes of a request; `body` None gives it no length."""
        length = [] if body is None else [f"Content-Length: {len(body)}"]
        lines = [f"{method} {path} HTTP/{version}", "Host: noria", "Connection: close", *headers, *length, "", ""]
        return "\r\n".join(lines).encode("latin-1") + (body or b"")

    def response(self, body: bytes = b"{}", status: str = "200 OK", *headers: str) -> bytes:
        """The bytes of an answer with its length."""
        kind = [] if any(item.startswith("Content-Type") for item in headers) else ["Content-Type: application/json"]
        lines = [f"HTTP/1.1 {status}", *headers, *kind, f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

    def chunked(self, *parts: bytes) -> bytes:
        return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


@pytest.fixture
async def wires() -> AsyncIterator[Wires]:
    wires = Wires()
    yield wires
    for server in wires.servers:
        server.close()
    for writer in wires.writers:
        writer.transport.abort()
    await asyncio.gather(*(writer.wait_closed() for writer in wires.writers), return_exceptions=True)
