"""Every recorded call to a model API through a real upstream server and a real proxy: bytes, headers and record."""

import io
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from noria.services.proxy.exchange import KINDS
from noria.services.proxy.relay import UID_HEADER
from tests.noria.services.proxy.wire.exchanges import cut
from tests.noria.services.proxy.wire.upstream import Answer, wire_upstream
from tests.recordings.cassettes import Recorded
from tests.recordings.check import check_record

pytestmark = pytest.mark.recordings

_OF_THE_CONNECTION = frozenset({"host", "content-length", "connection", "transfer-encoding", "keep-alive"})
_HOSTS = ("api.openai.com", "api.anthropic.com")
"""Whose other calls (files, token counts) go through as well, unrecorded."""
_PATHS = {kind: path for path, kind in KINDS.items()}


async def test_every_recorded_call_goes_through(
    recordings: list[Recorded], report: Any, start_proxy: Callable[..., Awaitable[Any]]
) -> None:
    chosen = random.Random(0)
    went: Counter[str] = Counter()
    uids: dict[str, Recorded] = {}
    async with wire_upstream() as upstream, aiohttp.ClientSession(auto_decompress=False) as client:
        proxy = await start_proxy({"up": upstream.url})
        for recorded in recordings:
            if recorded.kind is None and recorded.host not in _HOSTS:
                continue
            path = recorded.path if recorded.kind is None else _PATHS[recorded.kind]
            cuts = [chosen.randrange(1 + len(recorded.body)) for _ in range(20 if recorded.streamed else 2)]
            upstream.answer = Answer(cut(recorded.body, cuts), recorded.status, recorded.headers)
            headers = [one for one in recorded.request_headers if one[0].lower() not in _OF_THE_CONNECTION]
            async with client.request(
                recorded.method, proxy.url + path, data=io.BytesIO(recorded.request), headers=headers
            ) as response:
                assert await response.read() == recorded.body, recorded.source
                assert response.status == recorded.status
                for name, value in recorded.headers:
                    assert value in response.headers.getall(name), (recorded.source, name)
                if recorded.kind is not None:
                    uids[response.headers[UID_HEADER]] = recorded
            assert upstream.asked[-1].body == recorded.request
            assert upstream.asked[-1].target == path
            went[f"{recorded.kind or 'unrecorded'} {'streamed' if recorded.streamed else 'unstreamed'}"] += 1
        await proxy.calls()
        rows = proxy.store.calls_after(0, 5_000)
        calls = {row.uid: proxy.store.call(row.id) for row in rows}
        went["with a large body kept by its hash"] = sum("large" in row.attributes for row in rows)
    report("went through the proxy", went)
    assert calls.keys() == uids.keys()
    assert len(calls) == 1188
    for uid, recorded in uids.items():
        check_record(recorded, calls[uid])
