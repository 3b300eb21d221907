"""What must be there before a proxy starts: the keys of the trainer, of callers from a network, and of upstreams."""

from pathlib import Path
from typing import Any

import pytest

from noria.config import Config
from noria.contracts.access import Scope
from noria.contracts.errors import ConfigError
from noria.services.proxy.access import Access
from noria.services.proxy.app import create_app
from noria.services.proxy.keys import is_loopback
from noria.services.proxy.refusal import NotReady
from noria.stores.api_keys import ApiKeys
from noria.stores.online import OnlineStore

KEY = "k" * 48


def configured(tmp_path: Path, **proxy: Any) -> Config:
    upstreams = proxy.pop("upstreams", {"policy": {"url": "http://127.0.0.1:1"}})
    return Config.model_validate({"proxy": {"upstreams": upstreams, "writer": "thread", **proxy}, "root": tmp_path})


def create(tmp_path: Path, **proxy: Any) -> None:
    config = configured(tmp_path, **proxy)
    store = OnlineStore(config.store_url)
    try:
        create_app(config, store)
    finally:
        store.close()


def test_a_proxy_that_faces_a_network_needs_a_key_in_use(tmp_path: Path) -> None:
    store = OnlineStore(configured(tmp_path).store_url)
    store.upgrade()
    keys = ApiKeys(store)
    create(tmp_path)
    for host in ("0.0.0.0", "::", "192.0.2.1", "box.example"):
        with pytest.raises(ConfigError, match=r"noria keys create .*--scope call"):
            create(tmp_path, host=host)
    _, key = keys.create("acme", [Scope.CALL])
    create(tmp_path, host="0.0.0.0")
    keys.revoke(key.id)
    with pytest.raises(ConfigError, match="no API key in use"):
        create(tmp_path, host="0.0.0.0")
    store.close()


async def test_where_nobody_can_say_whether_there_is_a_key_the_proxy_starts_and_is_closed(tmp_path: Path) -> None:
    config = configured(tmp_path, host="0.0.0.0")
    store = OnlineStore(config.store_url)  # without a schema
    create_app(config, store)
    access = Access(config, store)
    await access.refresh()
    with pytest.raises(NotReady):
        access.caller({})
    store.close()


def test_a_trainers_key_that_is_too_short_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_TRAINER_KEY", KEY)
    create(tmp_path)
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
