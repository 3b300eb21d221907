import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.services.proxy.exchange import Wants
from noria.services.proxy.wire.tokens import EventStripper, TokenGatherer, strip_body, wants_of
from tests.noria.services.proxy.wire.exchanges import cut, places

NEITHER = Wants(token_ids=False, logprobs=False)
BOTH = Wants(token_ids=True, logprobs=True)
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}

_names = st.sampled_from(["prompt_token_ids", "token_ids", "logprobs", "choices", "index", "delta", "x", 'é"\\'])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)
_choices = st.lists(st.dictionaries(_names, _json, max_size=5) | st.integers(), max_size=3)
_responses = st.dictionaries(_names, _json, max_size=5).flatmap(
    lambda top: _choices.map(lambda choices: {**top, "choices": choices})
)
_written = st.sampled_from([{"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}, {}])


def expected(response: dict[str, Any], wants: Wants) -> dict[str, Any]:
    ids = () if wants.token_ids else ("prompt_token_ids", "token_ids")
    names = ids if wants.logprobs else (*ids, "logprobs")
    kept = {key: value for key, value in response.items() if key != "prompt_token_ids" or wants.token_ids}
    kept["choices"] = [
        {key: value for key, value in choice.items() if key not in names} if isinstance(choice, dict) else choice
        for choice in response["choices"]
    ]
    return kept


@settings(deadline=None)
@given(_responses, _written, st.builds(Wants, st.booleans(), st.booleans()))
def test_what_was_not_asked_for_is_cut_out_and_nothing_else(
    response: dict[str, Any], written: dict[str, Any], wants: Wants
) -> None:
    body = json.dumps(response, **written).encode()
    stripped = strip_body(body, wants)
    kept = expected(response, wants)
    assert json.loads(stripped) == kept
    assert list(json.loads(stripped)) == list(kept)
    if kept == response:
        assert stripped == body


def test_the_bytes_around_a_cut_stay() -> None:
    body = b'{ "choices" : [ {"token_ids":[1],"x" : 1.10,"u":"\\u00e9" , "logprobs":null} ],\n"prompt_token_ids": [1] }'
    assert strip_body(body, NEITHER) == b'{ "choices" : [ {"x" : 1.10,"u":"\\u00e9"} ] }'
    assert strip_body(body, BOTH) is body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'"token_ids"',
        b'{"choices":[{"token_ids":[1]}',
        b'{"choices":[{"token_ids":[1]}]} x',
        b'{"choices":[{"token_ids":' + b"[" * 5000,
        b'{[1]:2,"prompt_token_ids":[1]}',
        b'{"prompt_token_ids":[1],}',
        b'{"prompt_token_ids" [1]}',
        b'{"choices":[{"token_ids":1} 2]}',
        b'\xff{"choices":[{"token_ids":[1]}]}',
    ],
)
def test_what_cannot_be_read_stays(body: bytes) -> None:
    assert strip_body(body, NEITHER) == body


STREAM = (
    b": hi\r\n\r\n"
    b'data: {"id":"a", "prompt_token_ids":[1,2],"choices":[{"index":0,"delta":{"role":"assistant"}}]}\r\n\r\n'
    b'event: x\ndata: {"choices":[{"index":0,"delta":{"content":"gr\xc3\xbc\xc3\x9f"},'
    b'"token_ids":[3],\ndata: "logprobs":' + json.dumps(LOGPROBS).encode() + b"}]}\nid: 9\n\n"
    b'data: {"choices": [5]}\n\ndata: nonsense "token_ids"\n\ndata: [1]\n\n'
    b"data: [DONE]"
)
STRIPPED = (
    b": hi\r\n\r\n"
    b'data: {"id":"a", "choices":[{"index":0,"delta":{"role":"assistant"}}]}\r\n\r\n'
    b'event: x\ndata: {"choices":[{"index":0,"delta":{"content":"gr\xc3\xbc\xc3\x9f"}}]}\nid: 9\n\n'
    b'data: {"choices": [5]}\n\ndata: nonsense "token_ids"\n\ndata: [1]\n\n'
    b"data: [DONE]"
)


@settings(deadline=None)
@given(places)
def test_however_a_stream_is_cut_the_caller_sees_the_same_bytes(cuts: list[int]) -> None:
    pieces = cut(STREAM, cuts)
    stripper = EventStripper(NEITHER)
    assert b"".join([*map(stripper.feed, pieces), stripper.end()]) == STRIPPED
    stripper = EventStripper(BOTH)
    assert b"".join([*map(stripper.feed, pieces), stripper.end()]) == STREAM


@settings(deadline=None)
@given(st.binary() | st.lists(st.sampled_from([b"data: ", b'"token_ids"', b"{", b"\n\n", b"\r"])).map(b"".join), places)
def test_no_bytes_break_the_stripper(stream: bytes, cuts: list[int]) -> None:
    stripper = EventStripper(NEITHER)
    assert b"".join([*map(stripper.feed, cut(stream, cuts)), stripper.end()]) == stream


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    stripper = EventStripper(NEITHER)
    assert stripper.feed(b"data: 1\n") == b""
    assert stripper.feed(b"\ndata: 2") == b"data: 1\n\n"
    assert stripper.end() == b"data: 2"
    assert stripper.end() == b""


def test_what_the_caller_asks_for_itself() -> None:
    assert wants_of({}) == NEITHER
    assert wants_of({"logprobs": None, "return_token_ids": False}) == NEITHER
    assert wants_of({"logprobs": True, "return_token_ids": True}) == BOTH
    assert wants_of({"logprobs": 0}) == Wants(token_ids=False, logprobs=True)  # a text completion: of the sampled token
    assert wants_of({"logprobs": False}) == NEITHER


def test_tokens_are_gathered_chunk_by_chunk() -> None:
    gatherer = TokenGatherer()
    gatherer.take({"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}}]})
    assert gatherer.tokens() is None
    gatherer.take({"choices": [{"index": 0, "token_ids": [3], "logprobs": LOGPROBS}]})
    gatherer.take({"choices": [{"index": 0, "token_ids": [4], "logprobs": {"content": [{"logprob": 1e-9}]}}]})
    gatherer.take({"choices": None})
    tokens = gatherer.tokens()
    assert tokens is not None
    assert tokens.prompt_token_ids == (1, 2)
    assert tokens.completion_token_ids == (3, 4)
    assert tokens.logprobs == (-0.5, 0.0)


def test_tokens_of_a_text_completion_stand_in_its_choice() -> None:
    gatherer = TokenGatherer()
    choice = {"index": 0, "text": "a", "token_ids": [3], "prompt_token_ids": [1], "logprobs": {"token_logprobs": [-1]}}
    gatherer.take({"choices": [choice]})
    tokens = gatherer.tokens()
    assert tokens is not None
    assert (tokens.prompt_token_ids, tokens.completion_token_ids, tokens.logprobs) == ((1,), (3,), (-1.0,))


@pytest.mark.parametrize(
    "choices",
    [
        [{"index": 0, "token_ids": [3]}],
        [{"index": 0, "token_ids": [3], "logprobs": LOGPROBS}, {"index": 1, "token_ids": [4], "logprobs": LOGPROBS}],
        [{"index": 0, "token_ids": "3", "logprobs": LOGPROBS}],
        [{"index": 0, "token_ids": [2**80], "logprobs": LOGPROBS}],
        [{"index": 0, "token_ids": [3], "logprobs": {"content": [{"logprob": None}]}}],
        [5],
    ],
)
def test_tokens_that_are_not_exact_are_none(choices: list[Any]) -> None:
    gatherer = TokenGatherer()
    gatherer.take({"prompt_token_ids": [1, 2], "choices": choices})
    assert gatherer.tokens() is None
