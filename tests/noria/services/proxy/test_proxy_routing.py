"""Which upstream answers which call, and that nothing the router knows shows a secret."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert

from noria.config import Config
from noria.contracts.call import Arm
from noria.contracts.errors import ConfigError
from noria.contracts.release import ReleaseState
from noria.contracts.rollout import Directive
from noria.release.registry import Registry
from noria.services.proxy.exchange import Kind
from noria.services.proxy.identity import Identity
from noria.services.proxy.routing import TRUNCATING, Router, in_canary
from noria.services.proxy.serving_table import ReleaseTable, Serving
from noria.services.proxy.upstreams import open_upstreams
from noria.stores.online import OnlineStore
from noria.stores.tables import releases

KEY = "sk-routing-0123456789abcdef"
UPSTREAMS = {
    "policy": {"url": "http://127.0.0.1:1", "token_ids": True, "fallbacks": ["openai"]},
    "openai": {"url": "https://api.example.com", "models": ["gpt-*", "o[0-9]*"], "retries": 2, "fallbacks": ["other"]},
    "anthropic": {"url": "https://claude.example.com", "models": ["claude-*"], "key_header": "x-api-key"},
    "other": {"url": "http://127.0.0.1:2", "models": ["*-instruct", "gpt-*"]},
}
DIRECTIVE = Directive("shop.router.r00003", "a" * 32, "b" * 32, "shop.router.r00004", 7, 1, 2, 100, 0.7)


def caller(trace: int = 1, tenant: str = "default", node: str = "router") -> Identity:
    return Identity(tenant, "shop", node, f"{trace:032x}")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    proxy = {"upstreams": UPSTREAMS, "default_upstream": "other"}
    return Config.model_validate({"proxy": proxy, "root": tmp_path})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def table(store: OnlineStore) -> ReleaseTable:
    return ReleaseTable(store, 0.01)


@pytest.fixture
def router(config: Config, table: ReleaseTable) -> Router:
    return Router(config, table)


def on_trial(store: OnlineStore, version: str, weight: float) -> None:
    row = {"target": "shop.router", "version": version, "checkpoint": "c", "parent": None, "weight": weight}
    with store.write() as connection:
        connection.execute(insert(releases), {**row, "state": ReleaseState.CANARY.value})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-5", "openai"),  # the first of the file that matches, although `other` does too
        ("o3-mini", "openai"),
        ("claude-sonnet-4-5", "anthropic"),
        ("qwen-instruct", "other"),
        ("GPT-5", "other"),  # case counts, so the default
        ("my/gpt-5", "other"),
        ("gpt-5\n", "openai"),
        ("", "other"),
    ],
)
def test_the_models_name_chooses_where_nothing_is_released(router: Router, model: str, name: str) -> None:
    for kind in (*Kind, None):
        route = router.route(caller(), model, kind)
        assert (route.upstream.name, route.arm, route.model) == (name, Arm.LIVE, None)
        assert route.policy_version(model) is None


async def test_a_release_answers_what_generates_and_leaves_the_rest(
    router: Router, table: ReleaseTable, store: OnlineStore
) -> None:
    Registry(store).promote("shop.router", "shop.router.r00001", "c1", by="t", why="w")
    await table.refresh()
    for kind in (Kind.CHAT, Kind.COMPLETION, Kind.RESPONSE, Kind.MESSAGE):
        route = router.route(caller(), "gpt-5", kind)
        assert (route.upstream.name, route.model, route.tokens) == ("policy", "shop.router.r00001", True)
        assert route.policy_version("gpt-5") == "shop.router.r00001"
    for kind in (Kind.EMBEDDING, None):
        assert router.route(caller(), "gpt-5", kind).upstream.name == "openai"
    assert router.route(caller(node="reply"), "gpt-5", Kind.CHAT).upstream.name == "openai"


@pytest.mark.parametrize("weight", [0.0, 0.01, 0.25, 0.5, 1.0])
async def test_a_canary_gets_its_share_of_ten_thousand_traces_and_keeps_each(
    router: Router, table: ReleaseTable, store: OnlineStore, weight: float
) -> None:
    Registry(store).promote("shop.router", "shop.router.r00001", "c1", by="t", why="w")
    on_trial(store, "shop.router.r00002", weight)
    await table.refresh()
    routes = [router.route(caller(trace), "m", Kind.CHAT) for trace in range(1, 10_001)]
    share = sum(route.arm is Arm.CANARY for route in routes) / 10_000
    deviation = (weight * (1 - weight) / 10_000) ** 0.5
    assert abs(share - weight) <= 4 * deviation
    assert {(route.arm, route.model) for route in routes} <= {
        (Arm.CANARY, "shop.router.r00002"),
        (Arm.LIVE, "shop.router.r00001"),
    }
    again = [router.route(caller(trace), "another model", Kind.MESSAGE) for trace in range(1, 10_001)]
    assert [route.model for route in again] == [route.model for route in routes]


async def test_a_canary_without_a_live_version_leaves_the_rest_to_the_models_name(
    router: Router, table: ReleaseTable, store: OnlineStore
) -> None:
    on_trial(store, "shop.router.r00001", 0.5)
    await table.refresh()
    # The head of the events has not moved: a canary comes with an event, and this row came without one.
    assert table.serving("shop.router") == Serving(None, "shop.router.r00001", 0.5)
    routes = [router.route(caller(trace), "gpt-5", Kind.CHAT) for trace in range(1, 101)]
    assert {(route.upstream.name, route.model) for route in routes} == {
        ("policy", "shop.router.r00001"),
        ("openai", None),
    }


@given(st.text(max_size=20), st.text("0123456789abcdef", min_size=32, max_size=32), st.floats(0, 1), st.floats(0, 1))
def test_a_trace_in_the_canary_stays_in_as_its_weight_grows(tenant: str, trace: str, one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert in_canary(tenant, trace, low) <= in_canary(tenant, trace, high)
    assert not in_canary(tenant, trace, 0.0)
    assert in_canary(tenant, trace, 1.0)


def test_tenants_and_traces_are_drawn_independently() -> None:
    first = {trace for trace in range(4000) if in_canary("one", f"{trace:032x}", 0.5)}
    second = {trace for trace in range(4000) if in_canary("two", f"{trace:032x}", 0.5)}
    assert abs(len(first & second) / len(first) - 0.5) < 0.06


def test_a_directive_counts_before_every_release(router: Router) -> None:
    route = router.directed(DIRECTIVE, 3)
    assert (route.upstream.name, route.arm, route.model) == ("policy", Arm.ROLLOUT, "shop.router.r00003")
    assert route.overrides == {"temperature": 0.7, "seed": 103}
    assert route.drop == TRUNCATING
    assert route.tokens
    assert route.legs() == (route,), "no other model may answer for the version under test"


def test_a_pinned_miss_is_asked_whole_and_at_temperature_zero(router: Router) -> None:
    route = router.unrecorded("gpt-5", Kind.CHAT)
    assert (route.upstream.name, route.arm, route.tokens) == ("openai", Arm.ROLLOUT, False)
    assert route.overrides == {"temperature": 0}
    assert {"stream", "stream_options"} <= route.drop
    assert router.unrecorded("gpt-5", Kind.EMBEDDING).overrides == {}
    assert [leg.overrides for leg in route.legs()] == [{"temperature": 0}] * 2


async def test_fallbacks_are_asked_for_the_callers_model_and_are_no_answer_of_the_canary(
    router: Router, table: ReleaseTable, store: OnlineStore
) -> None:
    on_trial(store, "shop.router.r00001", 1.0)
    await table.refresh()
    first, second = router.route(caller(), "gpt-5", Kind.CHAT).legs()
    assert (first.upstream.name, first.model, first.arm, first.tokens) == (
        "policy",
        "shop.router.r00001",
        Arm.CANARY,
        True,
    )
    assert (second.upstream.name, second.model, second.arm, second.tokens) == ("openai", None, Arm.LIVE, False)
    assert second.policy_version("gpt-5") is None
    assert second.retries == 2
    assert second.legs() == (second,), "a fallback's own fallbacks are not followed"


async def test_the_release_table_keeps_what_served_last_while_the_store_is_away(
    store: OnlineStore, table: ReleaseTable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Registry(store).promote("shop.router", "shop.router.r00001", "c1", by="t", why="w")
    await table.refresh()
    store.close()
    database = tmp_path / "online.db"
    database.rename(tmp_path / "away.db")
    database.mkdir()
    for _ in range(3):
        await table.refresh()
    assert table.serving("shop.router").live == "shop.router.r00001"
    assert caplog.text.count("cannot be read") == 1
    database.rmdir()
    (tmp_path / "away.db").rename(database)
    Registry(store).promote("shop.router", "shop.router.r00002", "c2", by="t", why="w")
    await table.refresh()
    assert table.serving("shop.router").live == "shop.router.r00002"


def upstream(**settings: Any) -> Any:
    table = {"policy": {"url": "http://127.0.0.1:1", **settings}}
    return open_upstreams(Config.model_validate({"proxy": {"upstreams": table}}).proxy)["policy"]


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        ("authorization", {"Authorization": f"Bearer {KEY}"}),
        ("x-api-key", {"x-api-key": KEY}),
        ("api-key", {"api-key": KEY}),
    ],
)
def test_a_key_goes_into_its_header_and_into_no_text(
    monkeypatch: pytest.MonkeyPatch, header: str, sent: dict[str, str]
) -> None:
    monkeypatch.setenv("ROUTING_KEY", KEY)
    opened = upstream(api_key_env="ROUTING_KEY", key_header=header)
    assert opened.credentials == sent
    assert opened.secrets == (KEY,)
    assert KEY not in repr(opened)
    assert KEY not in str(opened)


def test_a_password_in_the_url_becomes_a_header_and_is_in_no_text() -> None:
    opened = upstream(url="https://me:pass%40word@gpu.example.com:8443/base/")
    assert opened.url == "https://gpu.example.com:8443/base"
    assert opened.credentials == {"Authorization": "Basic bWU6cGFzc0B3b3Jk"}
    assert opened.secrets == ("bWU6cGFzc0B3b3Jk", "pass@word")
    for secret in ("pass%40word", *opened.secrets):
        assert secret not in repr(opened)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "ftp://me:secret@host"}, "needs http:// or https://"),
        ({"url": "http://me:secret@host/v1"}, "leave out the /v1"),
        ({"url": "http://me:secret@host?x=secret"}, "query or fragment"),
        ({"url": "http://me:secret@host:port"}, "is no URL"),
        ({"url": "http://me:secret@host", "api_key_env": "ROUTING_KEY"}, "one Authorization header"),
        ({"url": "http://me:secret@"}, "and a host"),
    ],
)
def test_a_url_that_cannot_serve_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("ROUTING_KEY", KEY)
    with pytest.raises(ConfigError, match=said) as error:
        upstream(**settings)
    assert "secret" not in str(error.value)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("key", ["two words", "line\nend", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_told_without_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ROUTING_KEY", key)
    with pytest.raises(ConfigError, match="ROUTING_KEY") as error:
        upstream(api_key_env="ROUTING_KEY")
    assert key not in str(error.value)


def test_a_key_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUTING_KEY", raising=False)
    with pytest.raises(ConfigError, match="ROUTING_KEY"):
        upstream(api_key_env="ROUTING_KEY")
