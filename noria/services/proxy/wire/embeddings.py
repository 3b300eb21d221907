"""`POST /v1/embeddings`: never streamed, but in one of two formats."""

import base64
import struct
from collections.abc import Mapping
from typing import Any

from noria.services.proxy.wire.api import Answer, Api, error_type_of
from noria.services.proxy.wire.choices import usage


def fault(answer: Mapping[str, Any]) -> str | None:
    """`no_data` where a response has no list of embeddings."""
    data = answer.get("data")
    if isinstance(data, list) and data:
        return None
    return error_type_of(answer.get("error"), "no_data")


def in_format(answer: Answer, request: Mapping[str, Any]) -> Answer | None:
    """The answer with its embeddings as `encoding_format` asks (floats, or base64 of float32); None if they are so.

    The SDKs ask for base64 by themselves, so one caller's recording may be another's in the wrong format.
    """
    as_text = request.get("encoding_format") == "base64"
    data = answer.get("data")
    if not isinstance(data, list):
        return None
    items = []
    for item in data:
        vector = item.get("embedding") if isinstance(item, dict) else None
        if isinstance(vector, list) and as_text:
            packed = struct.pack(f"<{len(vector)}f", *vector)
            items.append({**item, "embedding": base64.b64encode(packed).decode()})
        elif isinstance(vector, str) and not as_text:
            packed = base64.b64decode(vector, validate=True)
            items.append({**item, "embedding": list(struct.unpack(f"<{len(packed) // 4}f", packed))})
        else:
            return None
    return {**answer, "data": items}


def _finish_reasons(answer: Mapping[str, Any]) -> tuple[str, ...]:
    return ()


API = Api(None, None, fault, _finish_reasons, usage)
