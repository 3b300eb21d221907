"""What the proxy itself answers when it cannot answer: errors in the shape of the OpenAI API."""

import json

from aiohttp import web

from noria.contracts.errors import DirectiveRefused, InvalidRecord, NoriaError, NotFound


class PinnedMiss(NotFound):
    """A pinned node made a call that the origin trace has no recording for, and `proxy.miss_policy` is `fail`."""


class StoreUnavailable(NoriaError, RuntimeError):
    """The online store does not answer, and this request cannot do without it."""


class TooLarge(InvalidRecord):
    """A request body over `proxy.max_body_bytes`."""


_STATUS: tuple[tuple[type[NoriaError], int, str], ...] = (
    (TooLarge, 413, "body_too_large"),
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
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_response(status: int, message: str, code: str) -> web.Response:
    """An error that the OpenAI SDKs read."""
    kind = "invalid_request_error" if status < 500 else "upstream_error"
    return web.Response(status=status, body=error_body(message, code, kind), content_type="application/json")


def refusal_response(error: NoriaError) -> tuple[web.Response, str]:
    """The answer to a refused call, and its error code."""
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    response = error_response(status, str(error), code)
    if status < 500:
        response.headers["x-should-retry"] = "false"  # the OpenAI SDKs would try a 409 again
    return response, code
