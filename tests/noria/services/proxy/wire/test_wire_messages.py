import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import CallStatus
from noria.services.proxy.exchange import Ending, Kind
from noria.services.proxy.wire import messages
from noria.services.proxy.wire.to_call import to_call
from tests.noria.services.proxy.wire.exchanges import exchange, sse, streamed

START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 25, "cache_read_input_tokens": 3, "output_tokens": 1},
    },
}
STOP = {"type": "message_stop"}


def begin(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def grow(index: int, kind: str, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **delta}}


def end(reason: str, **usage: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}


def test_blocks_of_every_sort_are_folded() -> None:
    stream = sse(
        START,
        begin(0, type="thinking", thinking="", signature=""),
        {"type": "ping"},
        grow(0, "thinking_delta", thinking="Let me "),
        grow(0, "thinking_delta", thinking="see"),
        grow(0, "signature_delta", signature="c2ln"),
        {"type": "content_block_stop", "index": 0},
        begin(1, type="text", text=""),
        begin(2, type="tool_use", id="tu_1", name="find", input={}),
        grow(2, "input_json_delta", partial_json=""),
        grow(1, "text_delta", text="grü"),
        grow(2, "input_json_delta", partial_json='{"q": "ü'),
        grow(1, "text_delta", text="ße"),
        grow(1, "citations_delta", citation={"type": "char_location", "cited_text": "a"}),
        grow(1, "citations_delta", citation={"type": "char_location", "cited_text": "b"}),
        grow(2, "input_json_delta", partial_json='"}'),
        begin(3, type="tool_use", id="tu_2", name="now", input={}),
        grow(1, "brand_new_delta", novelty="n", text="!"),
        end("tool_use", output_tokens=15, server_tool_use={"web_search_requests": 1}),
        {**end("tool_use", output_tokens=17, input_tokens=None), "context_management": {"applied_edits": []}},
        STOP,
        named=True,
    )
    call = to_call(streamed(Kind.MESSAGE, stream))
    assert call.status is CallStatus.OK
    assert call.finish_reasons == ("tool_use",)
    usage = {
        "input_tokens": 25,
        "cache_read_input_tokens": 3,
        "output_tokens": 17,
        "server_tool_use": {"web_search_requests": 1},
    }
    assert call.usage == usage
    cited = [{"type": "char_location", "cited_text": "a"}, {"type": "char_location", "cited_text": "b"}]
    assert json.loads(call.output) == {
        **START["message"],
        "content": [
            {"type": "thinking", "thinking": "Let me see", "signature": "c2ln"},
            {"type": "text", "text": "grüße!", "citations": cited, "novelty": "n"},
            {"type": "tool_use", "id": "tu_1", "name": "find", "input": {"q": "ü"}},
            {"type": "tool_use", "id": "tu_2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "usage": usage,
        "context_management": {"applied_edits": []},
    }


def test_an_input_that_was_cut_off_stays_text() -> None:
    stream = sse(
        START,
        begin(0, type="tool_use", id="t", name="f", input={}),
        grow(0, "input_json_delta", partial_json='{"q": "'),
    )
    call = to_call(streamed(Kind.MESSAGE, stream, ending=Ending.CLIENT_LEFT))
    assert call.status is CallStatus.CLIENT_DISCONNECT
    assert call.error_type == "client_left"
    assert json.loads(call.output)["content"] == [{"type": "tool_use", "id": "t", "name": "f", "input": '{"q": "'}]
    assert call.usage == START["message"]["usage"]  # type: ignore[index]


def test_an_error_in_a_stream() -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    call = to_call(streamed(Kind.MESSAGE, sse(START, error, named=True)))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "overloaded_error")
    assert json.loads(call.output)["error"] == error["error"]


def test_a_stream_that_does_not_end() -> None:
    call = to_call(streamed(Kind.MESSAGE, sse(START, begin(0, type="text", text="a"), named=True)))
    assert (call.status, call.error_type) == (CallStatus.UPSTREAM_ERROR, "incomplete_stream")


def test_unstreamed_answers() -> None:
    message = {"type": "message", "content": [], "stop_reason": "end_turn", "usage": {"input_tokens": 1}}
    call = to_call(exchange(Kind.MESSAGE, {"model": "claude"}, json.dumps(message).encode()))
    assert (call.status, call.finish_reasons, call.usage) == (CallStatus.OK, ("end_turn",), {"input_tokens": 1})
    call = to_call(exchange(Kind.MESSAGE, {"model": "claude"}, b"{}"))
    assert call.error_type == "no_content"
    error = b'{"type":"error","error":{"type":"not_found_error","message":"model: x"}}'
    call = to_call(exchange(Kind.MESSAGE, {"model": "x"}, error, http_status=404))
    assert call.error_type == "not_found_error"
    assert to_call(exchange(Kind.MESSAGE, {"model": "x"}, error)).error_type == "not_found_error"


_input = st.dictionaries(st.text(), st.text() | st.integers(-1000, 1000) | st.none(), max_size=3)
_blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}),
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": st.text(), "citations": st.lists(_input, min_size=1, max_size=2)}
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": st.text(), "signature": st.text()}),
    st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": st.text()}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": st.text(), "name": st.text(), "input": _input}),
    st.fixed_dictionaries({"type": st.just("web_search_tool_result"), "content": st.lists(_input, max_size=2)}),
)


@settings(deadline=None)
@given(st.lists(_blocks, max_size=4))
def test_a_message_that_is_unfolded_folds_to_itself(blocks: list[dict[str, Any]]) -> None:
    message = {
        **START["message"],  # type: ignore[dict-item]
        "content": blocks,
        "stop_reason": "end_turn",
    }
    call = to_call(streamed(Kind.MESSAGE, b"".join(messages.unfold(message, {}))))
    assert call.status is CallStatus.OK
    assert json.loads(call.output) == message
