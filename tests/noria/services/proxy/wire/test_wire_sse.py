import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.services.proxy.wire.sse import EventSplitter, data_of, read_event, with_data
from tests.noria.services.proxy.wire.exchanges import cut, places

LINES = (
    b"data: x",
    b"data:",
    b": c",
    b"event: e",
    b"id: 7",
    b"\n",
    b"\r\n",
    b"\r",
    b"\n\n",
    b"\r\n\r\n",
    b"\xc3",
    b"\xbc",
)


@settings(deadline=None)
@given(st.lists(st.sampled_from(LINES)).map(b"".join), places)
def test_however_a_stream_is_cut_it_has_the_same_events(stream: bytes, cuts: list[int]) -> None:
    whole = EventSplitter()
    expected = [read_event(event) for event in [*whole.feed(stream), whole.rest()]]
    splitter = EventSplitter()
    pieces = [event for chunk in cut(stream, cuts) for event in splitter.feed(chunk)]
    pieces.append(splitter.rest())
    assert b"".join(pieces) == stream
    assert [said for said in map(read_event, pieces) if any(said)] == [said for said in expected if any(said)]


def test_an_event_is_given_out_as_soon_as_it_can_be_read() -> None:
    stream = b"a\n\nb\r\n\r\nc\r\rd"
    splitter = EventSplitter()
    given_out = {place: splitter.feed(stream[place : place + 1]) for place in range(len(stream))}
    # The last byte of \r\n\r\n adds nothing and comes as a piece of its own.
    expected = {2: [b"a\n\n"], 6: [b"b\r\n\r"], 7: [b"\n"], 10: [b"c\r\r"]}
    assert {place: events for place, events in given_out.items() if events} == expected
    assert splitter.rest() == b"d"
    assert splitter.rest() == b""


@pytest.mark.parametrize("size", [1, 1000])
def test_a_large_event_in_small_pieces_takes_linear_time(size: int) -> None:
    def seconds(length: int) -> float:
        splitter = EventSplitter()
        chunk = b"x" * size
        began = time.process_time()
        for _ in range(length // size):
            splitter.feed(chunk)
        assert splitter.feed(b"\n\n") == [b"x" * length + b"\n\n"]
        return time.process_time() - began

    short = min(seconds(size * 2_000) for _ in range(5))
    assert min(seconds(size * 16_000) for _ in range(3)) / short < 30  # 8 for linear, 64 for quadratic time


def test_the_parts_of_an_event_are_read() -> None:
    assert read_event(b"\xef\xbb\xbfevent: a\ndata: 1\n: c\nevent:b\ndata:2\nid: 3\n\n") == (b"b", b"1\n2")
    assert read_event(b"data: {}\n\n") == (b"", b"{}")
    assert read_event(b"data\n\n") == (b"", b"")
    assert read_event(b"datax: 1\n\n") == (b"", b"")
    assert data_of(b": comment\n\n") == b""
    assert data_of(b"data: {}") == b"{}"


def test_only_the_data_of_an_event_is_rewritten() -> None:
    assert with_data(b"data: {}\n\n", b"[]") == b"data: []\n\n"
    assert (
        with_data(b"id: 7\r\nevent: x\r\ndata:{}\r\n\r\n", b'{"a":1}') == b'id: 7\r\nevent: x\r\ndata:{"a":1}\r\n\r\n'
    )
    assert with_data(b"data: {\ndata: }\n: c\n\n", b"{\n}") == b"data: {\ndata: }\n: c\n\n"
    assert with_data(b"data: {", b"[]") == b"data: []\n"
