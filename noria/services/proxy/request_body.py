"""Request bodies: read within the limit; those of the proxy's own endpoints undone from their coding and checked."""

from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from noria.contracts.access import without_keys
from noria.contracts.errors import InvalidRecord
from noria.services.proxy.refusal import TooLarge
from noria.services.proxy.wire.decode import DecodedTooLarge, decode_body
from noria.services.proxy.wire.json_text import parse

_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(request: web.Request, model: type[_Model], limit: int) -> _Model:
    """The body as `model` has it.

    Raises `TooLarge` over `limit` bytes, compressed or not; `InvalidRecord` for what is no JSON or breaks the model,
    with the field, the rule and the value.
    """
    raw = await read_bytes(request, limit)
    try:
        value = parse(decode_body(raw, request.headers.get("Content-Encoding", ""), limit))
        return model.model_validate(value)
    except DecodedTooLarge as error:
        raise too_large(limit) from error
    except ValidationError as error:
        raise InvalidRecord(_explain(error)) from error
    except ValueError as error:
        raise InvalidRecord(f"the request body is not JSON: {error}") from error


async def read_bytes(request: web.Request, limit: int) -> bytes:
    """The body as it came. Raises `TooLarge` over `limit` bytes.

    Not request.read(): its limit is that of the application, which passes other bodies on without reading them.
    """
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    content = request.content
    body = await content.readany()
    if not content.at_eof():  # mostly it is: then nothing is copied
        whole = bytearray(body)
        while not content.at_eof() and len(whole) <= limit:
            whole += await content.readany()
        body = bytes(whole)
    if len(body) > limit:
        raise too_large(limit)
    return body


def too_large(limit: int) -> TooLarge:
    """The refusal of a body over the limit."""
    return TooLarge(f"the request body is over {limit} bytes; proxy.max_body_bytes sets the limit")


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "body"
    rule = first["msg"].removeprefix("Value error, ")
    # A rule of our own has the value in its text already; a missing field has none, and its input is the whole body.
    seen = "" if first["type"] in ("value_error", "missing") else f", not {_short(first['input'])}"
    return without_keys(f"{where}: {rule}{seen}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
