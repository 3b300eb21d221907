"""A recorded response of `POST /v1/responses` unfolded into the events that stream it."""

from collections.abc import Iterator, Mapping
from typing import Any

from noria.services.proxy.wire.api import Answer, event

_CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "mcp_call": ("mcp_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
    "code_interpreter_call": ("code_interpreter_call_code", "code"),
}
"""Items whose one text is streamed: the name of its events, and the field it fills."""

_PARTS = {
    "output_text": ("output_text", "text"),
    "refusal": ("refusal", "refusal"),
    "reasoning_text": ("reasoning_text", "text"),
}


def unfold(answer: Answer, request: Mapping[str, Any]) -> Iterator[bytes]:
    """The events in their order, numbered: the response begins, each item, the response as a whole."""
    for number, data in enumerate(_events(answer)):
        yield event({**data, "sequence_number": number}, data["type"])


def _events(answer: Answer) -> Iterator[dict[str, Any]]:
    status = answer.get("status", "completed")
    opening = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": opening}
    yield {"type": "response.in_progress", "response": opening}
    for index, item in enumerate(answer.get("output") or ()):
        yield from _item(index, item)
    last = status if status in ("completed", "failed", "incomplete") else "completed"
    yield {"type": f"response.{last}", "response": answer}


def _item(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = item.get("type")
    where = {"output_index": index, "item_id": item.get("id")}
    opening = dict(item)
    if "status" in item:
        opening["status"] = "in_progress"
    if kind in ("message", "reasoning"):
        opening.update({name: [] for name in ("content", "summary") if isinstance(item.get(name), list)})
    text = _CALLS.get(str(kind))
    if text is not None and isinstance(item.get(text[1]), str):
        opening[text[1]] = ""
    yield {"type": "response.output_item.added", "output_index": index, "item": opening}
    if kind in ("message", "reasoning"):
        for place, part in enumerate(item.get("summary") or ()):
            yield from _part(part, {**where, "summary_index": place}, "reasoning_summary", "text")
        for place, part in enumerate(item.get("content") or ()):
            events, field = _PARTS.get(str(part.get("type")), ("", ""))
            yield from _part(part, {**where, "content_index": place}, events, field)
    elif text is not None and isinstance(item.get(text[1]), str):
        yield {"type": f"response.{text[0]}.delta", **where, "delta": item[text[1]]}
        yield {"type": f"response.{text[0]}.done", **where, text[1]: item[text[1]]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part(part: Mapping[str, Any], where: Mapping[str, Any], events: str, field: str) -> Iterator[dict[str, Any]]:
    summary = events == "reasoning_summary"
    part_events = "response.reasoning_summary_part" if summary else "response.content_part"
    text_events = "response.reasoning_summary_text" if summary else f"response.{events}"
    streamed = isinstance(part.get(field), str)
    opening = {**part, field: ""} if streamed else dict(part)
    annotations = part.get("annotations") if streamed else None
    if annotations:
        opening["annotations"] = []
    yield {"type": f"{part_events}.added", **where, "part": opening}
    if streamed:
        more = {"logprobs": part.get("logprobs") or []} if events == "output_text" else {}
        yield {"type": f"{text_events}.delta", **where, "delta": part[field], **more}
        for place, annotation in enumerate(annotations or ()):
            said = {"annotation_index": place, "annotation": annotation}
            yield {"type": "response.output_text.annotation.added", **where, **said}
        yield {"type": f"{text_events}.done", **where, field: part[field], **more}
    yield {"type": f"{part_events}.done", **where, "part": part}
