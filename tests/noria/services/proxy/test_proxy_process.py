"""The proxy as a process of its own: started, killed, ended."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from noria.stores.online import OnlineStore

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Process:
    """`python -m noria.services.proxy` in a folder with a noria.toml."""

    def __init__(
        self,
        folder: Path,
        upstream: str,
        proxy: str = "",
        environment: dict[str, str] | None = None,
        *,
        migrated: bool = True,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        text = f'home = "."\n[proxy]\nport = {self.port}\n{proxy}\n[proxy.upstreams.policy]\nurl = "{upstream}"\n'
        (folder / "noria.toml").write_text(text)
        if migrated:
            OnlineStore(f"sqlite:///{folder / 'online.db'}").upgrade()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "noria.services.proxy"],
            env={**inherited, **(environment or {}), "NORIA_CONFIG": str(folder / "noria.toml")},
            stderr=subprocess.PIPE,
            text=True,
        )

    async def ready(self, session: aiohttp.ClientSession, path: str = "/readyz") -> None:
        async with asyncio.timeout(30):
            while True:
                assert self.popen.poll() is None, self.popen.stderr and self.popen.stderr.read()
                try:
                    async with session.get(f"{self.url}{path}") as answer:
                        assert answer.status == 200
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code and stderr."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        _out, log = await asyncio.to_thread(self.popen.communicate, timeout=30)
        return self.popen.returncode, log


@pytest.fixture
async def launch() -> AsyncIterator[Callable[..., Process]]:
    launched: list[Process] = []

    def start(*arguments: Any, **settings: Any) -> Process:
        launched.append(Process(*arguments, **settings))
        return launched[-1]

    yield start
    for process in launched:
        await process.end(signal.SIGKILL)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_what_a_killed_proxy_answered_is_in_the_store_after_the_next_start(
    launch: Any, session: aiohttp.ClientSession, start_upstream: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream()
    first = launch(tmp_path, upstream.url, 'store_flush_seconds = 600.0\nspool_fsync = "always"')
    await first.ready(session)
    uids = []
    for _ in range(3):
        async with session.post(f"{first.url}/v1/chat/completions", json=BODY) as answer:
            assert answer.status == 200
            uids.append(answer.headers["x-noria-call-uid"])
    code, _log = await first.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    assert store.count_calls() == 0
    [left] = (tmp_path / "spool").glob("*.spool")
    with left.open("a") as file:
        file.write('{"call": {"uid": "torn')

    second = launch(tmp_path, upstream.url)
    await second.ready(session)
    async with asyncio.timeout(10):
        while store.count_calls() < 3:  # noqa: ASYNC110 - the other process has no event to wait for
            await asyncio.sleep(0.05)
    assert [call.uid for call in store.calls_after(0, 10)] == uids
    code, _log = await second.end(signal.SIGTERM)
    assert code == 0
    assert list((tmp_path / "spool").glob("*.spool")) == []
    store.close()


async def test_sigterm_lets_a_running_answer_end_and_leaves_nothing_in_the_spool(
    launch: Any, session: aiohttp.ClientSession, start_upstream: Any, replies: Any, tmp_path: Path
) -> None:
    asked = asyncio.Event()

    async def slow(request: Any, body: Any) -> Any:
        asked.set()
        await asyncio.sleep(1.0)
        return await replies.echo(request, body)

    upstream = await start_upstream(slow)
    process = launch(tmp_path, upstream.url, "store_flush_seconds = 600.0")
    await process.ready(session)

    async def ask() -> int:
        async with session.post(f"{process.url}/v1/chat/completions", json=BODY) as answer:
            await answer.read()
            return answer.status

    asking = asyncio.create_task(ask())
    await asked.wait()
    code, log = await process.end(signal.SIGTERM)
    assert (await asking, code) == (200, 0)
    assert log.count("ready on") == 1
    assert "Traceback" not in log
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    assert store.count_calls() == 1
    store.close()
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_port_in_use_is_one_line_and_exit_code_2(launch: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = launch(tmp_path, "http://127.0.0.1:1", environment={"NORIA_PROXY__PORT": str(taken.getsockname()[1])})
        code, log = await process_end(process)
    assert code == 2
    assert log.count("\n") == 1
    assert "another process has this port" in log


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ('host = "0.0.0.0"', "noria keys create"),
        ("prot = 1", "did you mean 'port'"),
    ],
)
async def test_what_cannot_serve_is_one_line_and_exit_code_2(
    launch: Any, tmp_path: Path, proxy: str, said: str
) -> None:
    code, log = await process_end(launch(tmp_path, "http://127.0.0.1:1", proxy))
    assert code == 2
    assert log.count("\n") == 1
    assert said in log


async def process_end(process: Process) -> tuple[int, str]:
    """Exit code and stderr of a process that ends by itself."""
    _out, log = await asyncio.to_thread(process.popen.communicate, timeout=30)
    return process.popen.returncode, log


async def test_a_schema_of_another_version_is_not_ready_until_it_is_upgraded(
    launch: Any, session: aiohttp.ClientSession, start_upstream: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream()
    process = launch(tmp_path, upstream.url, migrated=False)
    await process.ready(session, "/healthz")
    async with session.get(f"{process.url}/readyz") as answer:
        assert answer.status == 503
        assert "noria db upgrade" in (await answer.json())["reason"]
    async with session.post(f"{process.url}/v1/chat/completions", json=BODY) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert (await answer.json())["error"]["code"] == "not_ready"
    assert upstream.bodies == []
    OnlineStore(f"sqlite:///{tmp_path / 'online.db'}").upgrade()
    async with asyncio.timeout(10):
        while True:
            async with session.post(f"{process.url}/v1/chat/completions", json=BODY) as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.1)


async def test_the_writer_ends_with_its_proxy(
    launch: Any, session: aiohttp.ClientSession, start_upstream: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream()
    process = launch(tmp_path, upstream.url)
    await process.ready(session)
    async with session.post(f"{process.url}/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 200
    parent = psutil.Process(process.popen.pid)
    async with asyncio.timeout(10):
        while not (children := parent.children()):  # noqa: ASYNC110 - a process tells nobody of its children
            await asyncio.sleep(0.05)
    await process.end(signal.SIGKILL)
    _gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert alive == []
