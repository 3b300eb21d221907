import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from noria.services.proxy.capture import StreamCapture, Wants
from noria.services.proxy.sse import Assembler, EventSplitter, data_of, unfold, with_data

STREAM = (
    b": keep-alive\n\n"
    b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    b'event: message\ndata: {"choices":[{"index":0,\ndata:  "delta":{"content":"gr\xc3\xbc\xc3\x9fe"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"!"},"finish_reason":"stop"}]}\r\r'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_a_stream_is_cut_it_reads_the_same(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(places)]
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    assert b"".join(events) + splitter.rest() == STREAM
    for wants in (None, Wants(token_ids=False, logprobs=False)):
        capture = StreamCapture(wants)
        assert b"".join([*map(capture.feed, chunks), capture.end()]) == STREAM
        assert capture.done
        assert capture.error_type is None
        assert capture.completion()["choices"][0]["message"]["content"] == "grüße!"


def test_tool_calls_are_folded_by_index() -> None:
    assembler = Assembler()
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "t0", "type": "function", "function": {"name": "find", "arguments": ""}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "t1", "type": "function", "function": {"name": "buy", "arguments": '{"n"'}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"q":1}'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": ":2}"}}]},
    ]
    for delta in deltas:
        assembler.add({"id": "a", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    assert not assembler.finished
    assembler.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    assembler.add({"choices": [], "usage": {"total_tokens": 9}})
    assert assembler.finished
    answer = assembler.completion()
    assert answer["usage"] == {"total_tokens": 9}
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0] == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "t0", "type": "function", "function": {"name": "find", "arguments": '{"q":1}'}},
                {"id": "t1", "type": "function", "function": {"name": "buy", "arguments": '{"n":2}'}},
            ],
        },
        "finish_reason": "tool_calls",
    }


_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text(min_size=1),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.text(min_size=1), "arguments": st.text()}),
        }
    ),
    min_size=1,
    max_size=3,
)
_messages = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, st.text(min_size=1)),
    st.builds(lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}, _calls),
)


@given(st.lists(_messages, min_size=1, max_size=3), st.booleans())
def test_a_recording_that_is_streamed_again_folds_to_itself(messages: list[dict[str, Any]], with_usage: bool) -> None:
    recorded = {
        "id": "a",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {"index": index, "message": message, "finish_reason": "stop"} for index, message in enumerate(messages)
        ],
        "usage": {"total_tokens": 3},
    }
    capture = StreamCapture(None)
    for event in unfold(recorded, include_usage=with_usage):
        capture.feed(event)
    assert capture.done
    again = capture.completion()
    for choice in again["choices"]:
        if "tool_calls" in choice["message"]:  # a stream opens with an empty content
            choice["message"]["content"] = choice["message"]["content"] or None
    expected = recorded if with_usage else {key: value for key, value in recorded.items() if key != "usage"}
    assert again == expected


def test_only_the_data_of_an_event_is_rewritten() -> None:
    event = b"id: 7\r\nevent: x\r\ndata: {}\r\n\r\n"
    assert data_of(event) == b"{}"
    assert with_data(event, b'{"a":1}') == b'id: 7\nevent: x\ndata: {"a":1}\n\n'
    assert data_of(b": comment\n\n") == b""


def test_tokens_are_gathered_and_taken_out() -> None:
    capture = StreamCapture(Wants(token_ids=False, logprobs=False))
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    chunks = [
        {"id": "a", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"id": "a", "choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [3], "logprobs": logprobs}]},
        {"id": "a", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    out = b"".join(capture.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n") for chunk in chunks)
    assert b"token_ids" not in out
    assert b"logprob" not in out
    tokens = capture.tokens()
    assert tokens is not None
    assert tokens.prompt_token_ids == (1, 2)
    assert tokens.completion_token_ids == (3,)
    assert tokens.logprobs == (-0.5,)
    assert capture.error_type is None  # it ended with a reason, though without [DONE]


def test_what_is_no_json_passes_and_is_not_learnt_from() -> None:
    capture = StreamCapture(Wants(token_ids=False, logprobs=False))
    odd = b'data: nonsense\n\ndata: {"choices": [5]}\n\ndata: [1]\n\n'
    assert capture.feed(odd) == odd
    assert capture.error_type == "malformed_stream"


def test_an_error_inside_a_stream_is_recorded_as_one() -> None:
    capture = StreamCapture(None)
    capture.feed(b'data: {"error": {"message": "out of memory", "type": "server_error"}}\n\ndata: [DONE]\n\n')
    assert capture.error_type == "server_error"
