"""The fixed, held-out items on which a candidate is compared with what is live. noria.toml names its functions.

An item: a stable id, the request body exactly as the agent would send it (less the model's name), and what the reward
is told, in the shape of later feedback.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from examples.dispatch.data import held_out, is_held_out, normalized
from examples.dispatch.prompts import MAX_TOKENS, REPLY, ROUTER, Message, reply_messages, router_messages
from examples.dispatch.tool import results


def router() -> Iterator[dict[str, Any]]:
    """One item per held-out query, with the tool that is right for it."""
    for query in held_out():
        reference = {"right_function": {"value": 1.0, "explanation": {"expected": query.tool}}}
        yield _item(ROUTER, normalized(query.text), router_messages(query.text), reference)


def reply() -> Iterator[dict[str, Any]]:
    """One item per held-out tool result: by the same hash rule as for queries, and left out by sql/reply.sql alike."""
    for result in results():
        messages = reply_messages(result)
        if is_held_out(messages[-1]["content"]):
            yield _item(REPLY, messages[-1]["content"], messages, {})


def _item(node: str, key: str, messages: list[Message], reference: dict[str, Any]) -> dict[str, Any]:
    return {
        "item": hashlib.sha256(key.encode()).hexdigest()[:16],
        "input": json.dumps({"messages": messages, "max_tokens": MAX_TOKENS[node]}, ensure_ascii=False),
        "reference": reference,
    }
