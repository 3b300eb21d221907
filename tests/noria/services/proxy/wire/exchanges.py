"""Exchanges, events and cuts for the tests of the wire formats."""

import itertools
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from noria.services.proxy.exchange import Ending, Exchange, Kind

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def exchange(kind: Kind, request: Any, response: bytes = b"", **more: Any) -> Exchange:
    """A whole exchange with status 200, unless the test says otherwise."""
    fixed: dict[str, Any] = {
        "uid": "0190-u",
        "kind": kind,
        "ending": Ending.WHOLE,
        "tenant": "t",
        "app": "a",
        "process_node": "n",
        "trace_id": "1" * 32,
        "request_time": NOW,
        "response_time": NOW,
        "duration_ms": 12.5,
        "request": request if isinstance(request, bytes) else json.dumps(request).encode(),
        "response": response,
        "http_status": 200,
        "content_type": "application/json",
    }
    return Exchange(**{**fixed, **more})


def streamed(kind: Kind, response: bytes, **more: Any) -> Exchange:
    """An exchange whose answer was a stream."""
    request = more.pop("request", {"model": "m", "stream": True})
    return exchange(kind, request, response, **{"content_type": "text/event-stream; charset=utf-8", **more})


def sse(*chunks: Mapping[str, Any] | bytes, end: str = "\n", named: bool = False) -> bytes:
    """The chunks as events; `named` gives each its type as the event's name, as Anthropic and Responses do."""
    out = []
    for chunk in chunks:
        if isinstance(chunk, bytes):
            out.append(chunk)
            continue
        name = f"event: {chunk['type']}{end}" if named else ""
        out.append(f"{name}data: {json.dumps(chunk)}{end}{end}".encode())
    return b"".join(out)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """The stream in pieces."""
    bounds = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(bounds)]


places = st.lists(st.integers(0, 1 << 20), max_size=12)
"""Where to cut a stream; taken modulo its length."""
