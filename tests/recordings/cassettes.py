"""Reads the HTTP calls out of VCR cassettes in source distributions, as they crossed the wire.

What a cassette is not faithful in, and what is made of it here:

- Bodies are text, decoded by the client that was recorded. Where the headers still name a `content-encoding`, the text
  is compressed again, so headers and bytes agree; the bytes are not the upstream's own then, the text is.
- Characters that were split between two TCP segments are whole: cuts are the test's to make, not the recording's.
- `content-length` and `transfer-encoding` speak of bodies that are no longer so; they are left out.
- Some bodies were scrubbed of secrets and some were edited by hand; they count as recorded.
"""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import brotli
import yaml

from noria.services.proxy.exchange import KINDS, Kind

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_REPLAYED = frozenset({"content-length", "transfer-encoding", "connection", "date", "set-cookie", "keep-alive"})
_ENCODERS = {"gzip": gzip.compress, "br": brotli.compress, "deflate": zlib.compress}


@dataclass(frozen=True)
class Recorded:
    """One recorded HTTP call. `kind` is None where it is no call of an API that the proxy records."""

    source: str
    method: str
    host: str
    path: str
    kind: Kind | None
    request_headers: tuple[tuple[str, str], ...]
    request: bytes
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    """The response as it crossed the wire, compressed where the headers say so."""
    text: str
    """The response as the cassette has it."""

    @property
    def content_type(self) -> str:
        return self._header("content-type")

    @property
    def content_encoding(self) -> str:
        return self._header("content-encoding")

    @property
    def streamed(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    def _header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")


def recorded_calls(sdists: list[Path]) -> Iterator[Recorded]:
    """Every HTTP call in every cassette, in a fixed order."""
    for sdist in sdists:
        with tarfile.open(sdist) as archive:
            members = [one for one in archive if one.isfile() and _is_cassette(one.name)]
            for member in sorted(members, key=lambda one: one.name):
                file = archive.extractfile(member)
                assert file is not None
                for number, interaction in enumerate(yaml.load(file.read(), _LOADER)["interactions"]):
                    yield _recorded(f"{member.name}#{number}", interaction)


def _is_cassette(name: str) -> bool:
    return "/cassettes/" in name and name.endswith((".yaml", ".yml"))


def _recorded(source: str, interaction: dict[str, Any]) -> Recorded:
    request, response = interaction["request"], interaction["response"]
    url = urlsplit(request["uri"])
    headers = tuple((name, value) for name, value in _headers(response) if name.lower() not in _NOT_REPLAYED)
    text = (response["body"] or {}).get("string") or ""
    body = text.encode()
    for name, value in headers:
        if name.lower() == "content-encoding":
            body = _ENCODERS[value](body)
    return Recorded(
        source=source,
        method=request["method"],
        host=url.netloc,
        path=url.path,
        kind=_kind(request["method"], url.path),
        request_headers=tuple(_headers(request)),
        request=_bytes(request["body"]),
        status=response["status"]["code"],
        headers=headers,
        body=body,
        text=text,
    )


def _kind(method: str, path: str) -> Kind | None:
    """By the end of the path: Azure and OpenRouter serve the same APIs below other prefixes."""
    if method != "POST":
        return None
    return next((kind for ending, kind in KINDS.items() if path.endswith(ending.removeprefix("/v1"))), None)


def _headers(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, values in (message.get("headers") or {}).items():
        for value in values if isinstance(values, list) else [values]:
            yield name, value


def _bytes(body: Any) -> bytes:
    if body is None:
        return b""
    return body if isinstance(body, bytes) else str(body).encode()
