import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire.failure import error_event
from noria.services.proxy.wire.terminal import TerminalWatch
from tests.noria.services.proxy.wire.exchanges import cut

ENDS = [
    (Kind.CHAT, b"data: [DONE]", b"\n\n"),
    (Kind.CHAT, b"data:[DONE]", b"\r\n\r\n"),
    (Kind.COMPLETION, b"data: [DONE]", b""),
    (Kind.RESPONSE, b'event: response.completed\ndata: {"type":"response.completed"}\n\n', b""),
    (Kind.RESPONSE, b"event: response.failed\r\ndata: {}\r\n\r", b"\n"),
    (Kind.RESPONSE, b"event:response.incomplete\ndata: {}\n\n", b"data: [DONE]\n\n"),
    (Kind.RESPONSE, b"event: error\ndata: {}\n\n", b""),
    (Kind.RESPONSE, b"data: [DONE]", b"\n\n"),
    (Kind.MESSAGE, b"event: message_stop\ndata: {}\n\n", b""),
    (Kind.MESSAGE, error_event(Kind.MESSAGE, "m", "c"), b""),
]
BEFORE = (
    b": data: [DONE]\n\nevent: response.created\ndata: {}\n\n"
    b'data: "event: message_stop data: [DONE] event: response.completed event: error"\r\n\r\n'
    b"event: error_of_mine\ndata: {}\n\nevent: message_stopped\ndata: {}\n\n"
    b"event: response.completed_almost\ndata: 1\n\n"
)


@settings(deadline=None)
@given(st.sampled_from(ENDS), st.booleans(), st.lists(st.integers(0, 1 << 20), max_size=30))
def test_the_end_is_seen_with_its_last_byte_wherever_it_is_cut(
    end: tuple[Kind, bytes, bytes], after_others: bool, cuts: list[int]
) -> None:
    kind, marker, rest = end
    before = BEFORE * after_others + marker
    watch = TerminalWatch(kind)
    seen = [watch.feed(piece) for piece in cut(before[:-1], cuts)]
    assert not any(seen)
    assert watch.feed(before[-1:])
    assert watch.feed(rest)


@pytest.mark.parametrize("kind", list(Kind))
def test_no_other_line_is_taken_for_the_end(kind: Kind) -> None:
    watch = TerminalWatch(kind)
    assert not any(watch.feed(BEFORE[place : place + 1]) for place in range(len(BEFORE)))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_whether_an_event_is_open(end: str) -> None:
    watch = TerminalWatch(Kind.CHAT)
    assert not watch.mid_event
    for piece, open_after in [("data: {", True), (f"}}{end}", True), (end, False), (f": c{end}{end}", False)]:
        watch.feed(piece.encode())
        assert watch.mid_event is open_after, piece


@settings(deadline=None)
@given(st.sampled_from(list(Kind)), st.lists(st.binary()))
def test_what_is_kept_is_short(kind: Kind, chunks: list[bytes]) -> None:
    watch = TerminalWatch(kind)
    for chunk in [*chunks, b"event: response.completed\n" + b"x" * 10_000]:
        watch.feed(chunk)
        assert len(watch._tail) <= 32
