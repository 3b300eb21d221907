"""What the record of an answer in flight may take of memory and disk."""

from pathlib import Path
from typing import Any

from noria.contracts.call import CallStatus
from noria.services.proxy.captured import Captured, CaptureMemory

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def chunk(content: str, finish: str | None = None) -> bytes:
    reason = "null" if finish is None else f'"{finish}"'
    text = f'{{"choices": [{{"index": 0, "delta": {{"content": "{content}"}}, "finish_reason": {reason}}}]}}'
    return f"data: {text}\n\n".encode()


STREAM = (chunk("a" * 500), chunk("b" * 500), chunk("c", "stop"), b"data: [DONE]\n\n")


def test_beyond_the_limit_a_capture_goes_to_disk_whole(tmp_path: Path) -> None:
    memory = CaptureMemory(10, tmp_path)
    small, large = Captured(memory), Captured(memory)
    small.add(b"12345")
    large.add(b"1234")
    large.add(b"5678")
    large.add(b"9")
    assert (memory.used, memory.spilled) == (5, 1)
    assert (small.whole(), large.whole()) == (b"12345", b"123456789")
    for captured in (small, large):
        captured.close()
        captured.close()
    assert memory.used == 0
    assert list(tmp_path.iterdir()) == []


async def test_an_answer_over_the_limit_is_recorded_all_the_same(
    start_upstream: Any, start_proxy: Any, replies: Any
) -> None:
    upstream = await start_upstream(replies.streaming(*STREAM))
    proxy = await start_proxy({"main": upstream.url}, capture_memory_bytes=600)
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
        assert await answer.read() == b"".join(STREAM)
    [call] = await proxy.calls()
    assert call.status is CallStatus.OK
    assert "a" * 500 + "b" * 500 + "c" in call.output
    metrics = await proxy.metrics()
    assert "noria_capture_spilled_total 1.0" in metrics
    assert "noria_capture_bytes 0.0" in metrics


async def test_a_disk_that_takes_no_capture_costs_the_record_and_not_the_call(
    start_upstream: Any, start_proxy: Any, replies: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream(replies.streaming(*STREAM))
    proxy = await start_proxy({"main": upstream.url}, capture_memory_bytes=600)
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json={**BODY, "stream": False}) as answer:
        assert answer.status == 200
    spool, aside = proxy.config.spool_dir, tmp_path / "aside"
    await proxy.calls()
    spool.rename(aside)  # new files cannot be made any more; the open segment can be written
    try:
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
            assert await answer.read() == b"".join(STREAM)
    finally:
        aside.rename(spool)
    assert "noria_unrecorded_total 1.0" in await proxy.metrics()


async def test_a_chunked_body_has_the_limit_that_others_have(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, max_body_bytes=1000)

    async def body(size: int) -> Any:
        yield b'{"messages": [{"role": "user", "content": "' + b"a" * size + b'"}]}'

    for size, status in ((100, 200), (2000, 413)):
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", data=body(size)) as answer:
            assert answer.status == status, await answer.text()
    assert len(upstream.bodies) == 1
