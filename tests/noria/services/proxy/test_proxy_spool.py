import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from noria.contracts.call import Call, CallTokens, Score, ScoreSource
from noria.services.proxy.segments import REJECTED, encode
from noria.services.proxy.spool import Spool
from noria.stores.online import OnlineStore

MakeCall = Callable[..., Call]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store = OnlineStore(f"sqlite:///{tmp_path / 'store' / 'online.db'}")
    yield store
    store.close()


@pytest.fixture
async def open_spool(tmp_path: Path, store: OnlineStore) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Spool] = []

    async def start(**settings: Any) -> Spool:
        spool = Spool(tmp_path / "spool", store, **{"flush_seconds": 0.01, **settings})
        await spool.start()
        opened.append(spool)
        return spool

    yield start
    for spool in opened:
        await spool.close(timeout=2)


def take_away(store_folder: Path) -> None:
    """A file where the store's folder should be: nothing can be opened there."""
    store_folder.write_text("")


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.name != REJECTED)


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
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    take_away(tmp_path / "store")
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
    (tmp_path / "store").unlink()
    await asyncio.wait_for(again.flushed(), 5)
    assert [call.uid for call in store.calls_after(0, 10)] == [call.uid for call in calls]
    await eventually(lambda: segments(tmp_path / "spool") == [])


async def test_a_full_spool_drops_and_counts_but_never_fails(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    take_away(tmp_path / "store")
    spool = await open_spool(max_bytes=2 * len(encode(make_call())) + 10)
    assert [spool.append(make_call()) for _ in range(4)] == [True, True, False, False]
    assert spool.unrecorded == 2
    (tmp_path / "store").unlink()
    await asyncio.wait_for(spool.flushed(), 5)
    assert spool.append(make_call())
    await spool.flushed()
    assert store.count_calls() == 3


async def test_what_a_kill_left_behind_is_replayed_once_without_its_torn_line(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    first, second, torn = make_call(), make_call(), make_call()
    store.upgrade()
    store.add_calls([first])  # stored just before the kill
    (tmp_path / "spool").mkdir()
    left = tmp_path / "spool" / "00000000000000000001-1-1.jsonl"
    left.write_bytes(encode(first) + encode(second) + encode(torn)[:-20])
    spool = await open_spool()
    await spool.flushed()
    assert [call.uid for call in store.calls_after(0, 10)] == [first.uid, second.uid]
    assert spool.rejected == 0
    assert not left.exists()


async def test_what_another_process_still_writes_is_left_alone(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    take_away(tmp_path / "store")
    one = await open_spool()
    assert one.append(make_call())
    other = await open_spool()
    assert other.depth_records == 0
    assert len(segments(tmp_path / "spool")) == 1
    (tmp_path / "store").unlink()
    await asyncio.wait_for(one.flushed(), 5)
    assert store.count_calls() == 1


async def test_a_row_that_the_store_refuses_is_put_aside_with_the_reason(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    spool = await open_spool()
    good, bad = make_call(), make_call(agent_version="\udcff")
    for call in (bad, good):
        assert spool.append(call)
    await spool.flushed()
    assert [call.uid for call in store.calls_after(0, 10)] == [good.uid]
    assert spool.rejected == 1
    [entry] = [json.loads(line) for line in (tmp_path / "spool" / REJECTED).read_text().splitlines()]
    assert "UnicodeEncodeError" in entry["reason"]
    assert json.loads(entry["line"])["call"]["uid"] == bad.uid


async def test_a_spoilt_line_does_not_hold_up_the_others(
    open_spool: Any, store: OnlineStore, make_call: MakeCall, tmp_path: Path
) -> None:
    (tmp_path / "spool").mkdir()
    left = tmp_path / "spool" / "00000000000000000001-1-1.jsonl"
    left.write_bytes(encode(make_call()) + b"{spo\rilt\n" + b'{"call": {}}\n[]\n' + encode(make_call()))
    spool = await open_spool()
    await spool.flushed()
    assert store.count_calls() == 2
    assert spool.rejected == 3
    assert spool.depth_records == spool.depth_bytes == 0


async def test_a_record_larger_than_a_batch_passes(open_spool: Any, store: OnlineStore, make_call: MakeCall) -> None:
    spool = await open_spool()
    big = make_call(input=json.dumps("x" * 9_000_000))
    for call in (make_call(), big, make_call()):
        assert spool.append(call)
    await asyncio.wait_for(spool.flushed(), 20)
    assert [len(call.input) for call in store.calls_after(0, 10)] == [2, len(big.input), 2]


async def test_a_disk_that_takes_nothing_drops_and_counts(open_spool: Any, make_call: MakeCall, tmp_path: Path) -> None:
    spool = await open_spool()
    assert spool.append(make_call())
    await spool.flushed()
    [segment] = segments(tmp_path / "spool")
    closed = os.open(segment, os.O_RDONLY)  # stands for a disk that fails: writing to it is an OSError
    active = spool._active
    writable, active.fd = active.fd, closed
    with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
        active.append(b"x")
    assert spool.append(make_call()) is False
    assert spool.unrecorded == 1
    active.fd = writable
    os.close(closed)
