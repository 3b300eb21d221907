"""An upstream's key reaches the upstream, and nobody else: no caller, record, error text or log."""

import base64
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from noria.contracts.call import CallStatus

KEY = "sk-upstream-0123456789abcdef"
PASSWORD = "correct-horse-battery"
BASIC = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
CALLERS = {"Authorization": "Bearer sk-of-the-caller", "x-api-key": "sk-of-the-caller", "api-key": "sk-of-the-caller"}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", KEY)
    caplog.set_level(logging.DEBUG)


class Heard:
    """Everything that anybody but the upstream got to see."""

    def __init__(self, proxy: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self._proxy = proxy
        self._folder = folder
        self._caplog = caplog
        self.texts: list[str] = []

    async def call(self, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, str]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
        async with self._proxy.session.post(f"{self._proxy.url}{path}", json=body, headers=CALLERS) as answer:
            text = await answer.text()
            self.texts += [text, str(answer.headers), str(answer.reason)]
            return answer.status, text

    async def without_secrets(self) -> None:
        self.texts += [repr(call) for call in await self._proxy.calls()]
        self.texts += [await self._proxy.metrics(), self._caplog.text]
        self.texts += [path.read_bytes().decode("latin-1") for path in self._folder.rglob("*") if path.is_file()]
        for secret in (KEY, PASSWORD, BASIC):
            assert [text for text in self.texts if secret in text] == []


@pytest.fixture
def heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    return lambda proxy: Heard(proxy, tmp_path, caplog)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_the_upstream_gets_its_own_key_and_not_the_callers(
    start_upstream: Any, start_proxy: Any, heard: Any, header: str
) -> None:
    live = await start_upstream()
    proxy = await start_proxy({"live": {"url": live.url, "api_key_env": "UPSTREAM_KEY", "key_header": header}})
    seen = heard(proxy)
    assert (await seen.call())[0] == 200
    [sent] = live.headers
    assert sent[header] == (f"Bearer {KEY}" if header == "authorization" else KEY)
    assert "sk-of-the-caller" not in str(sent)
    await seen.without_secrets()


async def test_without_a_key_of_its_own_it_gets_the_callers(start_upstream: Any, start_proxy: Any, heard: Any) -> None:
    live = await start_upstream()
    proxy = await start_proxy({"live": live.url})
    assert (await heard(proxy).call())[0] == 200
    assert {name: live.headers[0][name] for name in CALLERS} == CALLERS


async def test_a_password_in_the_url_is_sent_and_not_said(start_upstream: Any, start_proxy: Any, heard: Any) -> None:
    live = await start_upstream()
    proxy = await start_proxy({"live": live.url.replace("://", f"://me:{PASSWORD}@")})
    seen = heard(proxy)
    assert (await seen.call())[0] == 200
    assert live.headers[0]["Authorization"] == f"Basic {BASIC}"
    await seen.without_secrets()


async def test_an_upstream_that_nobody_reaches_is_told_without_them(start_proxy: Any, heard: Any) -> None:
    upstream = {
        "url": f"http://me:{PASSWORD}@127.0.0.1:1",
        "api_key_env": "UPSTREAM_KEY",
        "key_header": "x-api-key",
        "retries": 1,
        "fallbacks": ["other"],
    }
    proxy = await start_proxy({"live": upstream, "other": {**upstream, "fallbacks": []}})
    seen = heard(proxy)
    status, text = await seen.call()
    assert status == 502
    assert "127.0.0.1:1" in text
    assert (await seen.call("/v1/audio/speech"))[0] == 502
    await seen.without_secrets()


def _json(said: str) -> Any:
    async def reply(_request: web.Request, _body: Any) -> web.Response:
        error = {"error": {"message": f"Incorrect API key provided: {said}"}}
        return web.json_response(error, status=401, headers={"x-key": said}, reason=f"no {said}")

    return reply


def _in_pieces(said: str) -> Any:
    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(status=403, headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        for letter in f"no entry with {said}, sorry":
            await response.write(letter.encode())
        return response

    return reply


def _events(said: str) -> Any:
    async def reply(request: web.Request, _body: Any) -> web.StreamResponse:
        response = web.StreamResponse(status=401, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f'data: {{"error": {{"message": "no entry with {said[:9]}'.encode())
        await response.write(f'{said[9:]}"}}}}\n\n'.encode())
        return response

    return reply


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
@pytest.mark.parametrize("reply", [_json, _in_pieces, _events])
async def test_an_upstream_that_repeats_its_key_in_an_error_is_not_passed_on_with_it(
    start_upstream: Any, start_proxy: Any, heard: Any, reply: Any, path: str
) -> None:
    live = await start_upstream(reply(KEY))
    proxy = await start_proxy({"live": {"url": live.url, "api_key_env": "UPSTREAM_KEY"}})
    seen = heard(proxy)
    status, text = await seen.call(path)
    assert status in (401, 403)
    assert "*" * len(KEY) in text
    await seen.without_secrets()
    if path == "/v1/chat/completions":
        [call] = await proxy.calls()
        assert call.status is CallStatus.UPSTREAM_ERROR
        assert "*" * len(KEY) in call.output


async def test_what_only_looks_like_the_key_is_passed_on(start_upstream: Any, start_proxy: Any, replies: Any) -> None:
    async def words(_request: web.Request, _body: Any) -> web.Response:
        return web.json_response(replies.completion("the caller's own sk-of-the-caller, s, sk-"))

    live = await start_upstream(words)
    proxy = await start_proxy({"live": {"url": live.url, "api_key_env": "UPSTREAM_KEY"}})
    _, answer = await proxy.chat()
    assert answer["choices"][0]["message"]["content"] == "the caller's own sk-of-the-caller, s, sk-"
