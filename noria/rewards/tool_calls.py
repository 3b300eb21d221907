"""A function call that a model wrote, against the one that was right."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from noria.rewards.field_f1 import field_f1


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a tool by name, with its arguments."""

    name: str
    arguments: Mapping[str, object]


def parse_tool_calls(output: str) -> list[FunctionCall] | None:
    """The calls that an answer makes, in order; None if it is not JSON of a form that is known.

    Known are `{"name", "arguments"}` (arguments optional, as an object or as JSON text), OpenAI's
    `[{"type": "function", "function": {"name", "arguments"}}]`, an object with such a list under `tool_calls`, and a
    list of the first form.
    """
    try:
        parsed = json.loads(output)
    except (ValueError, RecursionError):
        return None
    if isinstance(parsed, dict) and isinstance(parsed.get("tool_calls"), list):
        parsed = parsed["tool_calls"]
    calls = [_call(item) for item in (parsed if isinstance(parsed, list) else [parsed])]
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else None


def compare_tool_calls(output: str, expected: Sequence[tuple[str, Mapping[str, Sequence[object]]]]) -> dict[str, float]:
    """Parts of a reward, each in [0, 1], for an answer that should make the `expected` calls in order.

    expected   (name, {argument: accepted values}) per call, with the values' meaning of `field_f1`

    valid      1 if the answer is JSON of function calls
    name       share of calls, of the longer side, that name the right tool at their place
    arguments  mean over the same calls of the F1 of their arguments; 0 for a call of the wrong tool

    No call expected and none made is 1 in each part.
    """
    calls = parse_tool_calls(output)
    if calls is None:
        return {"valid": 0.0, "name": 0.0, "arguments": 0.0}
    places = max(len(calls), len(expected))
    if places == 0:
        return {"valid": 1.0, "name": 1.0, "arguments": 1.0}
    matched = [
        field_f1(call.arguments, accepted)
        for call, (name, accepted) in zip(calls, expected, strict=False)
        if call.name == name
    ]
    return {"valid": 1.0, "name": len(matched) / places, "arguments": sum(matched) / places}


def _call(item: object) -> FunctionCall | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return FunctionCall(item["name"], arguments) if isinstance(arguments, dict) else None
