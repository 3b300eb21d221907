"""What the proxy itself answers when it cannot answer: errors in the shape of the OpenAI API."""

import json
import math

from aiohttp import web

from noria.contracts.access import without_keys
from noria.contracts.errors import DirectiveRefused, InvalidRecord, NoriaError, NotFound


class PinnedMiss(NotFound):
    """A pinned node made a call that the origin trace has no recording for, and `proxy.miss_policy` is `fail`."""


class StoreUnavailable(NoriaError, RuntimeError):
    """The online store does not answer, and this request cannot do without it."""


class TooLarge(InvalidRecord):
    """A request body over `proxy.max_body_bytes`."""


class HeadersTooLarge(InvalidRecord):
    """Request headers over `proxy.max_header_bytes`."""


class Unauthorized(NoriaError, PermissionError):
    """A request without an API key where one is needed, or with one that opens nothing."""


class Forbidden(NoriaError, PermissionError):
    """A request whose key is good, but not for this."""


class TooMany(NoriaError, RuntimeError):
    """A call over one of the proxy's limits; `retry_after` seconds later another may be taken."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotReady(NoriaError, RuntimeError):
    """The proxy cannot serve yet: its store has another schema, or it is not known which keys there are."""


class NotSupported(NoriaError, NotImplementedError):
    """What this proxy cannot pass on, such as a WebSocket."""


_STATUS: tuple[tuple[type[NoriaError], int, str], ...] = (
    (TooLarge, 413, "body_too_large"),
    (HeadersTooLarge, 431, "headers_too_large"),
    (Unauthorized, 401, "invalid_api_key"),
    (Forbidden, 403, "forbidden"),
    (TooMany, 429, "rate_limit_exceeded"),
    (NotReady, 503, "not_ready"),
    (NotSupported, 501, "not_supported"),
    (InvalidRecord, 400, "invalid_request"),
    (DirectiveRefused, 403, "directive_refused"),
    (PinnedMiss, 409, "no_recording"),
    (NotFound, 404, "not_found"),
    (StoreUnavailable, 503, "store_unavailable"),
)
REFUSALS: tuple[type[NoriaError], ...] = tuple(kind for kind, _, _ in _STATUS)
"""Errors with which the proxy refuses a request before any upstream sees it."""


def error_body(message: str, code: str, kind: str) -> bytes:
    """`{"error": {...}}` as https://platform.openai.com/docs/guides/error-codes has it."""
    message = without_keys(message)  # it may repeat what was sent
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_response(status: int, message: str, code: str) -> web.Response:
    """An error that the OpenAI SDKs read."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "upstream_error")
    return web.Response(status=status, body=error_body(message, code, kind), content_type="application/json")


def refusal_response(error: NoriaError) -> tuple[web.Response, str]:
    """The answer to a refused call, and its error code."""
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    response = error_response(status, str(error), code)
    if isinstance(error, TooMany):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, (NotReady, StoreUnavailable)):
        response.headers["Retry-After"] = "1"
    elif status < 500:
        response.headers["x-should-retry"] = "false"  # the OpenAI SDKs would try a 409 again
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response, code


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "service_unavailable_error",
}
"""`error.type` by status, where it says more than whose fault it is."""
