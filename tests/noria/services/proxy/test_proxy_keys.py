from pathlib import Path
from typing import Any

import pytest

from noria.config import Config
from noria.contracts.errors import ConfigError
from noria.services.proxy.app import create_app
from noria.services.proxy.keys import is_loopback
from noria.stores.online import OnlineStore

KEY = "k" * 48


def create(tmp_path: Path, **proxy: Any) -> None:
    upstreams = proxy.pop("upstreams", {"policy": {"url": "http://127.0.0.1:1"}})
    config = Config.model_validate({"proxy": {"upstreams": upstreams, **proxy}, "root": tmp_path})
    store = OnlineStore(config.store_url)
    try:
        create_app(config, store)
    finally:
        store.close()


def test_a_proxy_that_faces_a_network_needs_a_key_that_someone_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NORIA_TRAINER_KEY", raising=False)
    create(tmp_path)
    with pytest.raises(ConfigError, match="NORIA_TRAINER_KEY"):
        create(tmp_path, host="0.0.0.0")
    monkeypatch.setenv("NORIA_TRAINER_KEY", KEY)
    create(tmp_path, host="0.0.0.0")
    monkeypatch.setenv("NORIA_TRAINER_KEY", "short")
    with pytest.raises(ConfigError, match="32"):
        create(tmp_path)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("upstreams", "said"),
    [
        ({}, r"\[proxy.upstreams\] is empty"),
        ({"policy": {"url": "http://127.0.0.1:1/v1/"}}, "leave out the /v1"),
        ({"policy": {"url": "http://127.0.0.1:1", "api_key_env": "NOT_SET_ANYWHERE"}}, "NOT_SET_ANYWHERE"),
    ],
)
def test_upstreams_that_cannot_serve_are_told_at_the_start(tmp_path: Path, upstreams: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create(tmp_path, upstreams=upstreams)


async def test_an_upstreams_own_key_replaces_the_callers(
    start_upstream: Any, start_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_UPSTREAMS_KEY", "secret")
    upstream = await start_upstream()
    proxy = await start_proxy({"main": {"url": upstream.url, "api_key_env": "THE_UPSTREAMS_KEY"}})
    await proxy.chat(headers={"Authorization": "Bearer the-agents-own"})
    assert upstream.headers[0].getall("Authorization") == ["Bearer secret"]
