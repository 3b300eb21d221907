import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import CallStatus
from noria.services.proxy.exchange import Ending, Kind
from noria.services.proxy.wire.responses_events import unfold
from noria.services.proxy.wire.to_call import to_call
from tests.noria.services.proxy.wire.exchanges import cut, exchange, places, sse, streamed

USAGE = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
TEXT = {"type": "output_text", "text": "grüße", "annotations": [{"type": "url_citation"}], "logprobs": []}
MESSAGE = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [TEXT]}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "hm"}],
    "content": [{"type": "reasoning_text", "text": "hmm"}],
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c",
    "name": "f",
    "arguments": '{"q":1}',
    "status": "completed",
}
CUSTOM = {"type": "custom_tool_call", "id": "ct_1", "call_id": "d", "name": "sh", "input": "ls"}
CODE = {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "x", "status": "completed"}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}}
REFUSAL = {"type": "message", "id": "msg_2", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
ITEMS = (REASONING, MESSAGE, CALL, CUSTOM, CODE, SEARCH, REFUSAL)


def response(*items: Any, **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": "completed", "output": list(items), "usage": USAGE, **more}


@settings(deadline=None)
@given(st.lists(st.sampled_from(ITEMS), max_size=4), places, st.booleans())
def test_a_response_that_is_unfolded_folds_to_itself(items: list[Any], cuts: list[int], whole_at_end: bool) -> None:
    stream = b"".join(unfold(response(*items), {}))
    if not whole_at_end:  # some servers leave the output of the last event empty
        *events, _ = stream.split(b"event: response.completed\n")
        stream = b"".join(events) + sse({"type": "response.completed", "response": response()}, named=True)
    call = to_call(streamed(Kind.RESPONSE, b"".join(cut(stream, cuts))))
    assert (call.status, call.finish_reasons, call.usage) == (CallStatus.OK, ("completed",), USAGE)
    assert json.loads(call.output) == response(*items)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: str(item["id"]))
def test_what_had_arrived_when_the_client_left(item: dict[str, Any]) -> None:
    stream = b"".join(unfold(response(item), {}))
    without_last = stream.partition(b"event: response.output_item.done")[0]
    call = to_call(streamed(Kind.RESPONSE, without_last, ending=Ending.CLIENT_LEFT))
    assert call.status is CallStatus.CLIENT_DISCONNECT
    arrived = json.loads(call.output)
    assert arrived["status"] == "in_progress"
    expected = {**item, "status": "in_progress"} if "status" in item else item
    assert arrived["output"] == [expected]


def test_deltas_alone_grow_an_item() -> None:
    where = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response(status="in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": {**MESSAGE, "content": []}},
        {"type": "response.output_text.delta", **where, "delta": "grü"},
        {"type": "response.output_text.delta", **where, "delta": "ße"},
        {"type": "response.output_text.annotation.added", **where, "annotation": {"type": "url_citation"}},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "item_id": "x", "delta": "{"},
        {"type": "response.something.new", "output_index": 1, "delta": "?"},
    ]
    call = to_call(streamed(Kind.RESPONSE, sse(*events), ending=Ending.UPSTREAM_DIED))
    text = {"type": "output_text", "text": "grüße", "annotations": [{"type": "url_citation"}]}
    assert json.loads(call.output)["output"] == [{**MESSAGE, "content": [text]}, {"arguments": "{"}]


@pytest.mark.parametrize(
    ("changes", "error_type", "reasons"),
    [
        ({}, None, ("completed",)),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, None, ("max_output_tokens",)),
        ({"status": "incomplete"}, None, ("incomplete",)),
        ({"status": "failed", "error": {"code": "server_error", "message": "m"}}, "server_error", ("failed",)),
        ({"status": "failed", "error": None}, "response_failed", ("failed",)),
        ({"status": "cancelled"}, "response_cancelled", ("cancelled",)),
        ({"status": "queued"}, "response_queued", ()),
        ({"status": None}, None, ()),
        ({"status": ["odd"]}, "response_['odd']", ("['odd']",)),
        ({"output": None}, "no_output", ("completed",)),
    ],
)
def test_how_a_response_ended(changes: dict[str, Any], error_type: str | None, reasons: tuple[str, ...]) -> None:
    answer = response(MESSAGE, **changes)
    call = to_call(exchange(Kind.RESPONSE, {"model": "m"}, json.dumps(answer).encode()))
    assert (call.error_type, call.finish_reasons) == (error_type, reasons)
    assert call.output == json.dumps(answer)


@pytest.mark.parametrize(
    ("event", "error_type"),
    [
        ({"type": "error", "code": "rate_limit_exceeded", "message": "m", "param": None}, "rate_limit_exceeded"),
        ({"type": "error", "error": {"type": "server_error", "message": "m"}}, "server_error"),
        ({"error": {"type": "invalid_request_error", "message": "m"}}, "invalid_request_error"),
        ({"type": "error", "message": "m"}, "error_in_stream"),
        ({"type": "response.failed", "response": response(status="failed", error={"code": "c"})}, "c"),
    ],
)
def test_an_error_in_a_stream(event: dict[str, Any], error_type: str) -> None:
    created = {"type": "response.created", "response": response(status="in_progress", output=[])}
    call = to_call(streamed(Kind.RESPONSE, sse(created, event)))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, error_type)


def test_a_stream_that_does_not_end() -> None:
    stream = sse({"type": "response.created", "response": response(status="in_progress")}, named=True)
    assert to_call(streamed(Kind.RESPONSE, stream)).error_type == "incomplete_stream"
