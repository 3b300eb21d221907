"""What the agent says to its model, and how it reads the answers. Agent, cold-start logs and suites share it.

The system prompts are one word each: the default model has two million parameters and is trained on exactly these.
"""

import json
from collections.abc import Mapping
from typing import Any

APP = "dispatch"
ROUTER = "router"
REPLY = "reply"
MODEL = "base"
UNKNOWN_TOOL = "unknown"
MAX_TOKENS = {ROUTER: 24, REPLY: 32}
"""Room for the longest right answer of each node under a small tokenizer, and little more."""

Message = dict[str, str]


def router_messages(query: str) -> list[Message]:
    """Asks which tool is right for what a user wrote."""
    return [{"role": "system", "content": "route"}, {"role": "user", "content": query}]


def reply_messages(result: Mapping[str, Any]) -> list[Message]:
    """Asks for one sentence that tells a user what the tool found."""
    return [{"role": "system", "content": "reply"}, {"role": "user", "content": json.dumps(dict(result))}]


def router_answer(tool: str) -> str:
    """The answer in which a router names a tool."""
    return json.dumps({"name": tool})


def named_tool(answer: str) -> str | None:
    """The name that a router's answer gives, whether or not there is such a tool; None if it is no such JSON object."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    name = parsed.get("name") if isinstance(parsed, dict) else None
    return name if isinstance(name, str) else None
