"""Streams of chat completions and text completions, folded into what an unstreamed call would have returned."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.contracts.call import CallStatus
from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire import chat, completions
from noria.services.proxy.wire.to_call import to_call
from tests.noria.services.proxy.wire.exchanges import sse, streamed

DONE = b"data: [DONE]\n\n"


def chunk(delta: Any = None, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": {} if delta is None else delta, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


def folded(*chunks: Any, done: bool = True, **request: Any) -> dict[str, Any]:
    """The recorded answer of a stream that is ok."""
    asked = {"model": "m", "stream": True, **request}
    call = to_call(streamed(Kind.CHAT, sse(*chunks) + DONE * done, request=asked))
    assert call.error_type is None
    assert call.status is CallStatus.OK
    answer: dict[str, Any] = json.loads(call.output)
    return answer


def message(*deltas: Any) -> dict[str, Any]:
    """The message that the deltas grow into."""
    answer = folded(*[chunk(delta) for delta in deltas], chunk(finish="stop"))
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def tool(index: int | None = None, call_id: str | None = None, name: str | None = None, **more: Any) -> dict[str, Any]:
    """One tool call's delta; what is None is left out."""
    function = {"name": name, **more}
    found = {"index": index, "id": call_id, "type": "function" if call_id else None}
    return {
        **{key: value for key, value in found.items() if value is not None},
        "function": {key: value for key, value in function.items() if key != "name" or value is not None},
    }


def calls(*deltas: Any) -> list[tuple[Any, Any, Any]]:
    """(id, name, arguments) of the calls that the deltas grow into, one delta or a list of them a chunk."""
    grown = message(*[{"tool_calls": delta if isinstance(delta, list) else [delta]} for delta in deltas])["tool_calls"]
    return [(call.get("id"), call["function"].get("name"), call["function"].get("arguments")) for call in grown]


def test_a_stream_becomes_the_object_of_an_unstreamed_call() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    answer = folded(
        chunk({"role": "assistant", "content": "", "refusal": None}, usage=None),
        chunk({"content": "gr"}, usage=None),
        chunk({"content": "üße"}, usage=None),
        chunk(finish="stop", usage=None),
        {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage},
    )
    assert answer == {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "usage": usage,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "grüße", "refusal": None},
                "finish_reason": "stop",
            }
        ],
    }


def test_tool_calls_interleaved_by_index() -> None:
    assert calls(
        tool(1, "b", "buy", arguments='{"n"'),
        tool(0, "a", "find", arguments=""),
        [tool(0, arguments='{"q":'), tool(1, arguments=":2}")],
        tool(0, arguments="1}"),
    ) == [("a", "find", '{"q":1}'), ("b", "buy", '{"n":2}')]


def test_tool_calls_without_index() -> None:
    assert calls(
        tool(None, "a", "find", arguments=""),
        tool(None, "b", "buy", arguments="{"),
        tool(None, "a", arguments="{}"),
        tool(None, "b", arguments="1"),
        tool(arguments="}"),
    ) == [("a", "find", "{}"), ("b", "buy", "{1}")]


def test_tool_calls_without_index_and_id() -> None:
    assert calls(
        [tool(name="find", arguments={"q": 1}), tool(name="find", arguments={"q": 2})],
        tool(name="buy", arguments="{"),
        tool(arguments="}"),
    ) == [(None, "find", {"q": 1}), (None, "find", {"q": 2}), (None, "buy", "{}")]


def test_tool_calls_that_all_say_index_0() -> None:
    assert calls(tool(0, "a", "find", arguments="{}"), tool(0, "b", "find", arguments="{"), tool(0, arguments="}")) == [
        ("a", "find", "{}"),
        ("b", "find", "{}"),
    ]


def test_an_id_or_a_name_that_comes_with_every_delta() -> None:
    assert calls(
        tool(0, "a", "find", arguments="{"), tool(0, "a", "find", arguments="1"), tool(0, "b", arguments="}")
    ) == [("a", "find", "{1}")]


def test_an_id_that_comes_after_the_name() -> None:
    assert calls(tool(name="find"), tool(None, "a", arguments="{}")) == [("a", "find", "{}")]
    assert calls(tool(0, name="fi"), tool(0, "a", "nd", arguments="{}")) == [("a", "find", "{}")]


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([{"q": 1}], {"q": 1}),
        ([{"q": 1}, ""], {"q": 1}),
        ([{"q": 1}, {"r": 2}], {"q": 1, "r": 2}),
        ([None], None),
        ([None, "{}"], "{}"),
        (["", {"q": 1}], {"q": 1}),
        (["x", {"q": 1}], 'x{"q":1}'),
    ],
)
def test_arguments_in_whatever_type_they_come(pieces: list[Any], whole: Any) -> None:
    first, *others = pieces
    deltas = [tool(0, "a", "find", arguments=first), *[tool(0, arguments=piece) for piece in others]]
    assert calls(*deltas) == [("a", "find", whole)]


def test_tool_calls_that_are_null_or_of_another_type() -> None:
    assert message({"content": "a", "tool_calls": None}) == {"role": "assistant", "content": "a", "tool_calls": None}
    custom = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "sh", "input": "l"}}
    grown = message({"tool_calls": [custom]}, {"tool_calls": [{"index": 0, "custom": {"input": "s"}}]})
    assert grown["tool_calls"] == [{"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]


def test_what_grows_in_a_message() -> None:
    grown = message(
        {"role": "assistant", "reasoning_content": "a", "audio": {"id": "au", "data": "QUJD", "transcript": "He"}},
        {"role": "assistant", "reasoning_content": "b", "audio": {"id": "au", "data": "REVG", "transcript": "y"}},
        {"refusal": "I ", "annotations": [{"type": "url_citation", "start_index": 0}], "audio": {"expires_at": 7}},
        {"refusal": "won't", "annotations": [{"type": "url_citation", "start_index": 9}], "weird": {"deep": ["x"]}},
        {"role": "", "weird": {"deep": ["y"], "n": 1}, "weird_number": 1},
        {"reasoning_details": [{"type": "reasoning.text", "text": "p", "index": 0}], "weird_number": 2},
        {"reasoning_details": [{"type": "reasoning.text", "text": "q", "index": 0}, {"text": "r", "index": 1}]},
        {"function_call": {"name": "old", "arguments": ""}},
        {"function_call": {"arguments": "{"}},
        {"function_call": {"arguments": "}"}},
    )
    assert grown == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "ab",
        "audio": {"id": "au", "data": "QUJDREVG", "transcript": "Hey", "expires_at": 7},
        "refusal": "I won't",
        "annotations": [{"type": "url_citation", "start_index": 0}, {"type": "url_citation", "start_index": 9}],
        "weird": {"deep": ["x", "y"], "n": 1},
        "weird_number": 2,
        "reasoning_details": [{"type": "reasoning.text", "text": "pq", "index": 0}, {"text": "r", "index": 1}],
        "function_call": {"name": "old", "arguments": "{}"},
    }


def test_content_that_turns_into_parts() -> None:
    part = {"type": "text", "text": "b"}
    assert message({"content": "a"}, {"content": "a"}, {"content": [part]})["content"] == ["aa", part]
    assert message({"content": ""}, {"content": [part]}, {"content": [part]})["content"] == [part, part]


def test_a_stream_that_ends_with_the_whole_message() -> None:
    last = chunk(finish="stop")
    last["choices"][0]["message"] = {"role": "assistant", "content": "ab", "more": 1}
    assert folded(chunk({"content": "a"}), chunk({"content": "b"}), last)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ab",
        "more": 1,
    }


def test_several_choices_out_of_order() -> None:
    answer = folded(
        chunk({"content": "b"}, index=1),
        {"id": "c1", "choices": None},
        {"choices": [{"delta": {"content": "a"}}, {"index": 1, "delta": {"content": "B"}, "finish_reason": "length"}]},
        chunk(None, "stop"),
        n=2,
        done=False,
    )
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in answer["choices"]] == [
        (0, "a", "stop"),
        (1, "bB", "length"),
    ]


def test_logprobs_are_joined_and_unknown_fields_of_a_choice_stay() -> None:
    first, second = chunk({"content": "a"}), chunk({"content": "b"}, "stop")
    first["choices"][0] |= {"logprobs": {"content": [{"token": "a"}], "refusal": None}, "content_filter": {"x": 1}}
    second["choices"][0] |= {"logprobs": {"content": [{"token": "b"}], "refusal": None}, "stop_reason": None}
    choice = folded(first, second)["choices"][0]
    assert choice["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}], "refusal": None}
    assert choice["content_filter"] == {"x": 1}
    assert choice["stop_reason"] is None


@pytest.mark.parametrize(
    ("chunks", "usage"),
    [
        ([chunk(usage={"total_tokens": 1}), chunk(finish="stop", usage={"total_tokens": 2})], {"total_tokens": 2}),
        ([chunk(finish="stop", usage={"total_tokens": 2}), {"choices": [], "usage": None}], {"total_tokens": 2}),
        ([chunk(finish="stop"), {"choices": [], "usage": {"total_tokens": 3}}], {"total_tokens": 3}),
        ([chunk(finish="stop"), {"usage": {"total_tokens": 4}}], {"total_tokens": 4}),
        ([chunk(finish="stop", x_groq={"usage": {"total_tokens": 5}})], {"total_tokens": 5}),
        ([{"choices": [{"delta": {}, "finish_reason": "stop", "usage": {"total_tokens": 6}}]}], {"total_tokens": 6}),
        ([chunk(finish="stop", usage=None)], None),
        ([chunk(finish="stop", usage=7)], None),
    ],
)
def test_usage_wherever_it_stands(chunks: list[Any], usage: Any) -> None:
    assert to_call(streamed(Kind.CHAT, sse(*chunks) + DONE)).usage == usage


def test_a_long_answer_in_many_deltas_takes_linear_time() -> None:
    def seconds(deltas: int) -> float:
        stream = sse(chunk({"content": "x" * 200})) * deltas + sse(chunk(finish="stop"))
        began = time.process_time()
        assert len(to_call(streamed(Kind.CHAT, stream)).output) > 200 * deltas
        return time.process_time() - began

    short = min(seconds(1_000) for _ in range(3))
    assert min(seconds(8_000) for _ in range(2)) / short < 25  # 8 for linear, 64 for quadratic time


_text = st.text(alphabet=st.characters(codec="utf-8") | st.just("\x00"))
_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text(min_size=1),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.text(min_size=1), "arguments": _text}),
        }
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call["id"],
)
_messages = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | _text},
    optional={
        "tool_calls": _calls,
        "refusal": st.none() | _text,
        "reasoning_content": _text,
        "annotations": st.lists(st.fixed_dictionaries({"type": _text}), max_size=2),
        "audio": st.fixed_dictionaries({"id": _text, "data": _text, "expires_at": st.integers()}),
        "function_call": st.fixed_dictionaries({"name": _text, "arguments": _text}),
    },
)
_choices = st.lists(
    st.fixed_dictionaries(
        {"message": _messages, "finish_reason": st.sampled_from(["stop", "length", "tool_calls"])},
        optional={"logprobs": st.none() | st.just({"content": [{"token": "a", "logprob": -1.5}], "refusal": None})},
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(_choices, st.booleans())
def test_a_chat_answer_that_is_unfolded_folds_to_itself(choices: list[dict[str, Any]], with_usage: bool) -> None:
    answer = {
        "id": "a",
        "object": "chat.completion",
        "model": "m",
        "prompt_token_ids": [1, 2],
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": {"total_tokens": 3},
    }
    request = {"stream": True, "stream_options": {"include_usage": with_usage}}
    stream = b"".join(chat.unfold(answer, request))
    call = to_call(streamed(Kind.CHAT, stream, request=request))
    assert call.status is CallStatus.OK
    expected = answer if with_usage else {key: value for key, value in answer.items() if key != "usage"}
    assert json.loads(call.output) == expected


def test_a_text_completion_is_folded() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [None], "text_offset": [0]}
    head = {"id": "t1", "object": "text_completion", "model": "m"}
    stream = sse(
        {**head, "choices": [{"index": 0, "text": "a", "logprobs": logprobs, "finish_reason": None}]},
        {**head, "choices": [{"index": 1, "text": "x", "logprobs": None, "finish_reason": "length"}]},
        {**head, "choices": [{"index": 0, "text": "b", "logprobs": logprobs, "finish_reason": "stop"}]},
        {**head, "choices": [], "usage": {"total_tokens": 3}},
    )
    call = to_call(streamed(Kind.COMPLETION, stream + DONE, request={"model": "m", "prompt": "p", "n": 2}))
    assert call.status is CallStatus.OK
    assert call.finish_reasons == ("stop", "length")
    assert call.usage == {"total_tokens": 3}
    twice = {key: value * 2 for key, value in logprobs.items()}
    assert json.loads(call.output) == {
        **head,
        "choices": [
            {"index": 0, "text": "ab", "logprobs": twice, "finish_reason": "stop"},
            {"index": 1, "text": "x", "logprobs": None, "finish_reason": "length"},
        ],
        "usage": {"total_tokens": 3},
    }


@settings(deadline=None)
@given(st.lists(_text, min_size=1, max_size=3))
def test_a_text_completion_that_is_unfolded_folds_to_itself(texts: list[str]) -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [None], "text_offset": [0]}
    answer = {
        "id": "t1",
        "object": "text_completion",
        "choices": [
            {"index": index, "text": text, "logprobs": logprobs, "token_ids": [1], "finish_reason": "stop"}
            for index, text in enumerate(texts)
        ],
        "usage": {"total_tokens": 3},
    }
    request = {"stream": True, "stream_options": {"include_usage": True}}
    call = to_call(streamed(Kind.COMPLETION, b"".join(completions.unfold(answer, request)), request=request))
    assert json.loads(call.output) == answer
