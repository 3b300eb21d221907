"""Who gets in: every way to show a key, and what is no key."""

import asyncio
import contextlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from noria.config import Config
from noria.contracts.access import Scope
from noria.services.proxy.access import ANYONE, INSTANCE, Access, Caller
from noria.services.proxy.refusal import Forbidden, NotReady, Unauthorized
from noria.stores.api_keys import ApiKeys, hash_key
from noria.stores.online import OnlineStore

UNKNOWN = "nk_" + "x" * 43


@pytest.fixture
def config(tmp_path: Path) -> Config:
    upstreams = {"policy": {"url": "http://127.0.0.1:1"}}
    return Config.model_validate({"proxy": {"upstreams": upstreams}, "root": tmp_path})


@pytest.fixture
def store(config: Config) -> Iterator[OnlineStore]:
    store = OnlineStore(config.store_url)
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def keys(store: OnlineStore) -> ApiKeys:
    return ApiKeys(store)


def headers(**said: str) -> CIMultiDict[str]:
    return CIMultiDict((name.replace("_", "-"), value) for name, value in said.items())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def opened(config: Config, store: OnlineStore) -> Access:
    access = Access(config, store)
    await access.refresh()
    return access


def away(config: Config) -> None:
    """A folder where the store's file should be: nothing can be opened there."""
    path = Path(config.store_url.removeprefix("sqlite:///"))
    for file in path.parent.glob(f"{path.name}*"):
        file.rename(file.with_name(f"away-{file.name}"))
    path.mkdir()


def back(config: Config) -> None:
    path = Path(config.store_url.removeprefix("sqlite:///"))
    path.rmdir()
    for file in path.parent.glob(f"away-{path.name}*"):
        file.rename(file.with_name(file.name.removeprefix("away-")))


# Keys


@pytest.mark.parametrize(
    "how", ["Authorization: Bearer {}", "authorization: bearer {}", "x-api-key: {}", "X-Noria-Key: {}"]
)
async def test_a_key_is_known_however_it_comes(config: Config, store: OnlineStore, keys: ApiKeys, how: str) -> None:
    text, key = keys.create("acme", [Scope.CALL])
    access = await opened(config, store)
    name, _, value = how.format(text).partition(": ")
    assert access.caller(CIMultiDict({name: value})) == Caller(key.id, "acme", frozenset({Scope.CALL}))


async def test_a_key_in_the_own_header_leaves_the_others_to_the_upstream(
    config: Config, store: OnlineStore, keys: ApiKeys
) -> None:
    text, key = keys.create("acme", [Scope.CALL])
    other, _ = keys.create("rival", [Scope.CALL])
    access = await opened(config, store)
    sent = headers(x_noria_key=text, Authorization="Bearer sk-upstream", x_api_key="sk-ant-upstream")
    assert access.caller(sent).key_id == key.id
    assert access.caller(headers(x_noria_key=text, Authorization=f"Bearer {other}")).tenant == "acme"
    assert access.caller(headers(Authorization="Bearer sk-upstream", x_api_key=text)).tenant == "acme"
    assert [access.is_own_key(value) for value in sent.values()] == [True, False, False]


async def test_what_is_not_a_key_lets_nobody_in_and_is_not_repeated(
    config: Config, store: OnlineStore, keys: ApiKeys
) -> None:
    text, _ = keys.create("acme", list(Scope))
    revoked, gone = keys.create("acme", list(Scope))
    keys.revoke(gone.id)
    access = await opened(config, store)
    trainer = config.trainer_key()
    wrong = [
        UNKNOWN,
        revoked,
        text[:-1],
        text + "x",
        text.swapcase(),
        text.replace("nk_", "nk_ "),
        hash_key(text),
        f"nk_{hash_key(text)[:43]}",
        text[3:],
        f"{text},{text}",
        f"{text}\udcff",
        "",
        "nk_",
        trainer[:-1],
        trainer + "x",
        "\u00fc" * 40,
    ]
    for value in wrong:
        for sent in (bearer(value), {"x-api-key": value}, {"x-noria-key": value}, {"Authorization": value}):
            with pytest.raises(Unauthorized) as caught:
                access.caller(CIMultiDict(sent))
            for secret in (value, text, trainer):
                assert len(secret) < 4 or secret not in str(caught.value)
    for sent in ({}, {"Authorization": f"Basic {text}"}, {"Authorization": text}, {"api-key": text}, {"cookie": text}):
        with pytest.raises(Unauthorized):
            access.caller(CIMultiDict(sent))


@given(st.text(st.characters(max_codepoint=0x17F), max_size=60))
def test_no_header_is_a_key_by_chance_or_breaks_the_check(text: str) -> None:
    for sent in ({"Authorization": text}, bearer(text), {"x-api-key": text}, {"x-noria-key": text}):
        with pytest.raises(Unauthorized):
            _closed_access().caller(CIMultiDict(sent))
    assert not _closed_access().is_own_key(text)


_CLOSED: list[Access] = []


def _closed_access() -> Access:
    return _CLOSED[0]


@pytest.fixture(autouse=True, scope="module")
def closed_access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One proxy with one key for all examples of the property above; hypothesis runs those within one fixture."""
    config = Config.model_validate({"root": tmp_path_factory.mktemp("closed")})
    store = OnlineStore(config.store_url)
    store.upgrade()
    ApiKeys(store).create("acme", [Scope.CALL])
    access = Access(config, store)
    asyncio.run(access.refresh())
    _CLOSED[:] = [access]
    yield
    store.close()


async def test_the_trainers_key_stands_for_the_instance(config: Config, store: OnlineStore, keys: ApiKeys) -> None:
    sent = CIMultiDict(bearer(config.trainer_key()))
    assert (await opened(config, store)).caller(sent) is INSTANCE
    keys.create("acme", [Scope.CALL])
    access = await opened(config, store)
    assert access.caller(sent) is INSTANCE
    for scope in Scope:
        access.require(INSTANCE, scope)
    assert access.is_own_key(sent["Authorization"])


async def test_without_any_key_this_machine_may_call_and_give_feedback(config: Config, store: OnlineStore) -> None:
    access = await opened(config, store)
    assert not access.required
    assert access.caller(headers(Authorization="Bearer sk-of-the-agent")) is ANYONE
    for scope in (Scope.CALL, Scope.FEEDBACK):
        access.require(ANYONE, scope)
    for scope in (Scope.TRAINER, Scope.ADMIN):
        with pytest.raises(Unauthorized, match=f"{scope.value}.*NORIA_TRAINER_KEY"):
            access.require(ANYONE, scope)
    with pytest.raises(Unauthorized):
        access.caller(headers(Authorization=f"Bearer {UNKNOWN}"))  # who shows a key has it checked


async def test_the_first_key_closes_the_proxy_and_the_last_one_opens_it_again(
    config: Config, store: OnlineStore, keys: ApiKeys
) -> None:
    access = await opened(config, store)
    text, key = keys.create("acme", [Scope.CALL])
    await access.refresh()
    assert access.required
    with pytest.raises(Unauthorized, match="noria keys create"):
        access.caller(headers())
    keys.revoke(key.id)
    await access.refresh()
    assert access.caller(headers()) is ANYONE
    with pytest.raises(Unauthorized):
        access.caller(headers(Authorization=f"Bearer {text}"))


async def test_a_network_always_needs_a_key(tmp_path: Path, store: OnlineStore, keys: ApiKeys) -> None:
    config = Config.model_validate({"proxy": {"host": "0.0.0.0"}, "root": tmp_path})
    _, key = keys.create("acme", [Scope.CALL])
    keys.revoke(key.id)
    access = await opened(config, store)
    assert access.required
    with pytest.raises(Unauthorized):
        access.caller(headers())


async def _works(access: Access, sent: CIMultiDict[str]) -> bool:
    await asyncio.sleep(0.02)
    with contextlib.suppress(Unauthorized):
        return access.caller(sent).key_id is not None
    return False


async def test_what_another_process_makes_or_revokes_counts_within_a_second(
    config: Config, store: OnlineStore, keys: ApiKeys
) -> None:
    keys.create("acme", [Scope.CALL])
    access = await opened(config, store)
    following = asyncio.create_task(access.follow())
    other = OnlineStore(config.store_url)
    try:
        text, key = ApiKeys(other).create("acme", [Scope.CALL])
        sent = headers(Authorization=f"Bearer {text}")
        async with asyncio.timeout(1.2):
            while not await _works(access, sent):
                pass
        assert access.caller(sent).key_id == key.id
        ApiKeys(other).revoke(key.id)
        async with asyncio.timeout(1.2):
            while await _works(access, sent):
                pass
    finally:
        following.cancel()
        other.close()


# The store is away


async def test_known_keys_work_while_the_store_is_away_and_over_a_restart(
    config: Config, store: OnlineStore, keys: ApiKeys
) -> None:
    text, key = keys.create("acme", [Scope.CALL])
    revoked, gone = keys.create("acme", [Scope.CALL])
    access = await opened(config, store)
    keys.revoke(gone.id)
    await access.refresh()
    store.close()
    away(config)
    await access.refresh()
    restarted = await opened(config, store)
    for one in (access, restarted):
        assert one.caller(headers(Authorization=f"Bearer {text}")) == Caller(key.id, "acme", frozenset({Scope.CALL}))
        for wrong in (revoked, UNKNOWN):
            with pytest.raises(Unauthorized):
                one.caller(headers(Authorization=f"Bearer {wrong}"))
        with pytest.raises(Unauthorized):
            one.caller(headers())
    back(config)
    keys.revoke(key.id)
    await restarted.refresh()
    assert restarted.caller(headers()) is ANYONE


async def test_what_a_restart_knows_holds_no_key_and_is_its_owners_alone(
    config: Config, store: OnlineStore, keys: ApiKeys
) -> None:
    text, _ = keys.create("acme", [Scope.CALL])
    await opened(config, store)
    [path] = config.home_dir.glob("known_keys.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert text not in path.read_text()


@pytest.mark.parametrize("copy", ["none", "of another store", "torn", "nonsense"])
async def test_nobody_gets_in_while_nobody_knows_the_keys(config: Config, store: OnlineStore, copy: str) -> None:
    path = config.home_dir / "known_keys.json"
    if copy != "none":
        await opened(config, store)
        tree = json.loads(path.read_text())
        text = {
            "of another store": json.dumps({**tree, "store": "0" * 64}),
            "torn": path.read_text()[:-2],
            "nonsense": '{"store": "' + tree["store"] + '", "keys": [7]}',
        }[copy]
        path.write_text(text)
    store.close()
    away(config)
    access = await opened(config, store)
    assert not access.ready
    for sent in (headers(), headers(Authorization=f"Bearer {UNKNOWN}")):
        with pytest.raises(NotReady):
            access.caller(sent)
    assert access.caller(headers(Authorization=f"Bearer {config.trainer_key()}")) is INSTANCE
    back(config)
    await access.refresh()
    assert access.ready
    assert access.caller(headers()) is ANYONE


# Scopes


@pytest.mark.parametrize("scope", list(Scope))
async def test_a_key_does_what_its_scope_says_and_no_more(
    config: Config, store: OnlineStore, keys: ApiKeys, scope: Scope
) -> None:
    text, key = keys.create("acme", [scope])
    access = await opened(config, store)
    caller = access.caller(headers(Authorization=f"Bearer {text}"))
    access.require(caller, scope)
    for other in set(Scope) - {scope}:
        with pytest.raises(Forbidden, match=f"{key.id}.*{scope.value}.*{other.value}"):
            access.require(caller, other)


async def test_what_shows_all_tenants_takes_a_key_of_the_proxys_own(
    tmp_path: Path, store: OnlineStore, keys: ApiKeys
) -> None:
    config = Config.model_validate({"proxy": {"tenant": "ours"}, "root": tmp_path})
    ours, _ = keys.create("ours", [Scope.ADMIN])
    theirs, _ = keys.create("acme", [Scope.ADMIN])
    caller, _ = keys.create("ours", [Scope.CALL])
    access = await opened(config, store)
    access.require_instance(access.caller(headers(Authorization=f"Bearer {ours}")), Scope.ADMIN)
    access.require_instance(INSTANCE, Scope.ADMIN)
    for key in (theirs, caller):
        with pytest.raises(Forbidden, match=r"acme|admin"):
            access.require_instance(access.caller(headers(Authorization=f"Bearer {key}")), Scope.ADMIN)
