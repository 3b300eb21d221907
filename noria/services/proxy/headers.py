"""Which headers pass, and which are for one hop alone (RFC 9110, section 7.6.1)."""

from collections.abc import Callable

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from noria.services.proxy.identity import foreign_baggage
from noria.services.proxy.masking import masked_header
from noria.services.proxy.upstreams import CREDENTIAL_HEADERS, Upstream

Headers = CIMultiDictProxy[str]

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# aiohttp says the length itself, and answers `Expect` before the body is read.
_NOT_SENT_ON = _HOP_BY_HOP | {"host", "content-length", "expect"}


def request_headers(
    headers: Headers,
    upstream: Upstream,
    is_own_key: Callable[[str], bool],
    *,
    body_changed: bool = False,
    plain: bool = False,
    pass_key: bool = True,
) -> CIMultiDict[str]:
    """The caller's headers as they go on to an upstream.

    Left out are those of one hop, Noria's own, and keys of this proxy, which `is_own_key` knows; where the upstream has
    credentials of its own, or `pass_key` is false, also the caller's. `plain` asks for an answer without content
    coding, since it has to be read on the way.
    """
    sent: CIMultiDict[str] = CIMultiDict()
    own = upstream.credentials
    dropped = _named_by_connection(headers)
    for name, value in headers.items():
        lower = name.lower()
        if lower in _NOT_SENT_ON or lower.startswith("x-noria-") or lower in dropped:
            continue
        if is_own_key(value) or (lower in CREDENTIAL_HEADERS and (own or not pass_key)):
            continue
        if lower == "baggage":
            value = foreign_baggage(value)
            if not value:
                continue
        if body_changed and lower == "content-encoding":
            continue
        if plain and lower == "accept-encoding":
            continue
        sent.add(name, value)
    if own:
        sent.update(own)
    if plain:
        sent["Accept-Encoding"] = "identity"
    return sent


def response_headers(answer: aiohttp.ClientResponse, secrets: tuple[str, ...], *, resized: bool) -> CIMultiDict[str]:
    """The headers of an answer as they go to the caller, the upstream's secrets masked.

    `resized` where the length of the body is told anew.
    """
    passed: CIMultiDict[str] = CIMultiDict()
    dropped = _named_by_connection(answer.headers)
    for name, value in answer.headers.items():
        lower = name.lower()
        if lower in _HOP_BY_HOP or lower in dropped or (resized and lower == "content-length"):
            continue
        passed.add(name, masked_header(value, secrets) if secrets else value)
    return passed


def reason_of(answer: aiohttp.ClientResponse, secrets: tuple[str, ...]) -> str | None:
    """The phrase beside the status of an answer, the upstream's secrets masked."""
    return None if answer.reason is None else masked_header(answer.reason, secrets)


def _named_by_connection(headers: Headers) -> frozenset[str]:
    if "Connection" not in headers:
        return frozenset()
    return frozenset(name.strip().lower() for said in headers.getall("Connection") for name in said.split(","))
