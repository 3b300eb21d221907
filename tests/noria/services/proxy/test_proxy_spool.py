import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from uuid_utils import uuid7

from noria.config import Config
from noria.contracts.call import Call, CallStatus, CallTokens, Score, ScoreSource
from noria.services.proxy.batches import REJECTED, Batches, StoreAway
from noria.services.proxy.exchange import Ending, Exchange, Kind, Wants
from noria.services.proxy.records import decode, encode
from noria.services.proxy.segments import Frame
from noria.services.proxy.spool import Spool
from noria.services.proxy.writer import ProcessWriter, ThreadWriter, open_store
from noria.stores.online import OnlineStore

MakeCall = Callable[..., Call]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    url = f"sqlite:///{tmp_path / 'store' / 'online.db'}"
    return Config.model_validate({"home": str(tmp_path), "store": {"url": url}, "root": tmp_path})


@pytest.fixture
def store(config: Config) -> Any:
    store = open_store(config)
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
async def open_spool(config: Config, store: OnlineStore) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Spool] = []

    async def start(*, process: bool = False, **settings: Any) -> Spool:
        writer = ProcessWriter(config) if process else ThreadWriter(config, store)
        spool = Spool(config.spool_dir, writer, **{"flush_seconds": 0.01, **settings})
        await spool.start()
        opened.append(spool)
        return spool

    yield start
    for spool in opened:
        await spool.close(timeout=2)


@pytest.fixture
def away(tmp_path: Path, store: OnlineStore) -> Callable[[], None]:
    """Takes the store away; what it returns brings it back."""

    def take() -> Callable[[], None]:
        folder, aside = tmp_path / "store", tmp_path / "aside"
        store.close()
        folder.rename(aside)
        folder.write_text("")  # a file where the store's folder should be: nothing can be opened there

        def bring_back() -> None:
            folder.unlink()
            aside.rename(folder)

        return bring_back

    return take


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spool"))


def written(record: Any) -> bytes:
    return b"".join(encode(record).buffers())


def exchange(**changes: Any) -> Exchange:
    now = datetime.now(UTC)
    facts = {
        "uid": str(uuid7()),
        "kind": Kind.CHAT,
        "ending": Ending.WHOLE,
        "tenant": "t",
        "app": "a",
        "process_node": "n",
        "trace_id": "1" * 32,
        "request_time": now,
        "response_time": now,
        "duration_ms": 1.5,
        "request": b'{"model": "m"}',
        "response": b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}',
        "http_status": 200,
        "content_type": "application/json",
    }
    return Exchange(**{**facts, **changes})


async def eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - the spool tells of no deleted file
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
async def test_what_is_appended_is_in_the_store_soon(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, fsync: str
) -> None:
    spool = await open_spool(fsync=fsync)
    call = make_call(tokens=CallTokens((1, 2), (3,), (-0.25,)), usage={"total_tokens": 3}, attributes={"a": "ü"})
    score = Score("trace", call.trace_id, "right", 1.0, ScoreSource.BUSINESS, "desk", "1", datetime.now(UTC))
    assert all(await asyncio.gather(spool.write(call), spool.write(score)))
    await spool.flushed()
    [stored] = store.trace(call.trace_id)
    assert (stored.uid, stored.tokens, stored.attributes) == (call.uid, call.tokens, call.attributes)
    assert [found.value for found in store.scores_of_trace(call.trace_id)] == [1.0]
    assert spool.depth_records == spool.depth_bytes == 0


async def test_a_full_segment_is_deleted_once_it_is_stored(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    spool = await open_spool(segment_bytes=2000)
    for _ in range(40):
        assert spool.append(make_call())
    assert len(segments(tmp_path / "spool")) > 5
    await spool.flushed()
    assert store.count_calls() == 40
    assert len(segments(tmp_path / "spool")) == 1
    assert spool.append(make_call())
    await spool.close()
    assert store.count_calls() == 41
    assert segments(tmp_path / "spool") == []


async def test_while_the_store_is_away_records_wait_and_a_restart_finds_them(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path, away: Any
) -> None:
    bring_back = away()
    spool = await open_spool()
    calls = [make_call() for _ in range(5)]
    for call in calls:
        assert spool.append(call)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(spool.flushed(), 0.3)
    await spool.close(timeout=0.1)
    assert len(segments(tmp_path / "spool")) == 1

    again = await open_spool()
    assert again.depth_records == 5
    bring_back()
    await asyncio.wait_for(again.flushed(), 5)
    assert [call.uid for call in store.calls_after(0, 10)] == [call.uid for call in calls]
    await eventually(lambda: segments(tmp_path / "spool") == [])


async def test_a_full_spool_drops_and_counts_but_never_fails(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path, away: Any
) -> None:
    bring_back = away()
    spool = await open_spool(max_bytes=2 * len(written(make_call())) + 10)
    assert [spool.append(make_call()) for _ in range(4)] == [True, True, False, False]
    assert spool.unrecorded == 2
    bring_back()
    await asyncio.wait_for(spool.flushed(), 5)
    assert spool.append(make_call())
    await spool.flushed()
    assert store.count_calls() == 3


@pytest.mark.parametrize("cut", [1, 20, 500])
async def test_what_a_kill_left_behind_is_replayed_once_without_its_torn_frame(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path, cut: int
) -> None:
    first, second, torn = make_call(), make_call(), make_call()
    store.add_calls([first])  # stored just before the kill
    (tmp_path / "spool").mkdir()
    left = tmp_path / "spool" / "00000000000000000001-1-1.spool"
    left.write_bytes(written(first) + written(second) + written(torn)[:-cut])
    spool = await open_spool()
    await spool.flushed()
    assert [call.uid for call in store.calls_after(0, 10)] == [first.uid, second.uid]
    assert spool.rejected == 0
    assert not left.exists()


async def test_what_another_process_still_writes_is_left_alone(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path, away: Any
) -> None:
    bring_back = away()
    one = await open_spool()
    assert one.append(make_call())
    other = await open_spool()
    assert other.depth_records == 0
    assert len(segments(tmp_path / "spool")) == 1
    bring_back()
    await asyncio.wait_for(one.flushed(), 5)
    assert store.count_calls() == 1


async def test_a_row_that_the_store_refuses_is_put_aside_with_the_reason(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    with store.write() as connection:
        refuse = "CREATE TRIGGER t BEFORE INSERT ON calls WHEN NEW.app = 'bad' BEGIN SELECT RAISE(ABORT, 'no bad'); END"
        connection.execute(text(refuse))
    spool = await open_spool()
    good, bad = make_call(), make_call(app="bad")
    for call in (bad, good):
        assert spool.append(call)
    await spool.flushed()
    assert [call.uid for call in store.calls_after(0, 10)] == [good.uid]
    assert spool.rejected == 1
    [entry] = [json.loads(line) for line in (tmp_path / "spool" / REJECTED).read_text().splitlines()]
    assert "IntegrityError" in entry["reason"]
    assert "no bad" in entry["reason"]
    assert entry["record"]["call"]["uid"] == bad.uid


async def test_what_a_disk_spoilt_is_put_aside_and_holds_up_no_other(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    (tmp_path / "spool").mkdir()
    first, spoilt, strange, last = (written(make_call()) for _ in range(4))
    spoilt = spoilt[:-5] + b"#" + spoilt[-4:]
    strange = b"".join(Frame(b'{"call": {}}').buffers())
    left = tmp_path / "spool" / "00000000000000000001-1-1.spool"
    left.write_bytes(first + spoilt + strange + last)
    other = tmp_path / "spool" / "00000000000000000002-1-1.spool"
    other.write_bytes(written(make_call()) + b"garbage" * 10 + written(make_call()))
    spool = await open_spool()
    await asyncio.wait_for(spool.flushed(), 5)
    assert store.count_calls() == 3
    assert spool.rejected == 3
    assert spool.depth_records == spool.depth_bytes == 0
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "spool" / REJECTED).read_text().splitlines()]
    assert [("checksum" in reason, "missing" in reason, "head" in reason) for reason in reasons] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


async def test_an_exchange_becomes_a_call(open_spool: Any, store: OnlineStore) -> None:
    spool = await open_spool()
    record = exchange(attributes={"rollout": {"round": "a.n.r00001"}}, wants=Wants(False, True), first_byte_ms=0.5)
    assert await spool.write(record)
    await spool.flushed()
    [call] = store.trace("1" * 32)
    assert (call.uid, call.status, call.input) == (record.uid, CallStatus.OK, '{"model": "m"}')
    assert call.attributes["endpoint"] == "chat.completions"
    assert call.attributes["rollout"] == {"round": "a.n.r00001"}
    assert spool.recorded == {"ok": 1}


@given(st.binary(max_size=50), st.binary(max_size=50), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_a_record_is_read_as_it_was_written(request_: bytes, response: bytes, attributes: dict[str, str]) -> None:
    record = exchange(request=request_, response=response, attributes=attributes, wants=Wants(True, False))
    assert decode(encode(record)) == record


async def test_a_process_writes_and_another_takes_its_place_when_it_is_killed(
    open_spool: Any, store: OnlineStore, make_call: MakeCall
) -> None:
    spool = await open_spool(process=True)
    calls = [make_call() for _ in range(3)]
    spool.append(calls[0])
    await asyncio.wait_for(spool.flushed(), 20)
    first = spool._writer.pid
    os.kill(first, signal.SIGKILL)
    spool.append(calls[1])
    spool.append(calls[2])
    await asyncio.wait_for(spool.flushed(), 20)
    assert [call.uid for call in store.calls_after(0, 10)] == [call.uid for call in calls]
    assert spool._writer.pid != first


async def test_a_writer_process_says_that_the_store_is_away(
    open_spool: Any, config: Config, make_call: MakeCall, away: Any, tmp_path: Path
) -> None:
    bring_back = away()
    spool = await open_spool(process=True)
    spool.append(make_call())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(spool.flushed(), 2)
    [segment] = segments(tmp_path / "spool")
    writer = ProcessWriter(config)
    with pytest.raises(StoreAway, match=r"unable to open database file|noria db upgrade"):
        await writer.write(segment, 0, segment.stat().st_size)
    await writer.close()
    bring_back()
    await asyncio.wait_for(spool.flushed(), 20)


async def test_a_record_larger_than_a_batch_passes(open_spool: Any, store: OnlineStore, make_call: MakeCall) -> None:
    spool = await open_spool()
    big = make_call(input=json.dumps("x" * 9_000_000))
    for call in (make_call(), big, make_call()):
        assert spool.append(call)
    await asyncio.wait_for(spool.flushed(), 20)
    assert [len(call.input) for call in store.trace("1" * 32)] == [2, len(big.input), 2]


async def test_a_disk_that_takes_nothing_drops_and_counts(open_spool: Any, make_call: MakeCall, tmp_path: Path) -> None:
    spool = await open_spool()
    assert spool.append(make_call())
    await spool.flushed()
    [segment] = segments(tmp_path / "spool")
    closed = os.open(segment, os.O_RDONLY)  # stands for a disk that fails: writing to it is an OSError
    active = spool._active
    writable, active.fd = active.fd, closed
    with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
        active.append(Frame(b"x"))
    assert spool.append(make_call()) is False
    assert spool.unrecorded == 1
    active.fd = writable
    os.close(closed)


class FailingSpans:
    """Where spans go, with a fault that one call brings out."""

    dropped = 0

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def export(self, calls: Sequence[Call]) -> None:
        if any(call.uid == self.fault for call in calls):
            raise ZeroDivisionError("a fault that nobody foresaw")


def test_a_record_that_breaks_its_writer_breaks_no_other(
    store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    good, bad, last = make_call(), make_call(), make_call()
    segment = tmp_path / "00000000000000000001-1-1.spool"
    segment.write_bytes(written(good) + written(bad) + written(last))
    batches = Batches(store, tmp_path, FailingSpans(bad.uid))
    found = batches.write(segment, 0, segment.stat().st_size)
    assert (found.size, found.records, found.rejected) == (segment.stat().st_size, 3, 1)
    assert found.statuses == {"ok": 2}
    assert {call.uid for call in store.calls_after(0, 10)} >= {good.uid, last.uid}
    [entry] = [json.loads(line) for line in (tmp_path / REJECTED).read_text().splitlines()]
    assert "nobody foresaw" in entry["reason"]
