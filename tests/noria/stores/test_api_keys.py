import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noria.contracts.access import KEY_TEXT, Scope
from noria.contracts.errors import InvalidRecord, NotFound
from noria.stores.api_keys import ApiKeys, hash_key, key_to_json
from noria.stores.online import OnlineStore


@pytest.fixture
def store(store_url: str) -> Iterator[OnlineStore]:
    store = OnlineStore(store_url)
    store.upgrade()
    yield store
    store.close()


def test_a_key_is_found_by_its_hash_alone(online: OnlineStore, tmp_path: Path) -> None:
    text, key = ApiKeys(online).create("acme", [Scope.CALL, Scope.FEEDBACK], "checkout agent")
    assert KEY_TEXT.fullmatch(text)
    assert ApiKeys(online).active() == {hash_key(text): key}
    assert (key.tenant, key.scopes, key.name) == ("acme", {Scope.CALL, Scope.FEEDBACK}, "checkout agent")
    online.close()
    assert text.encode() not in b"".join(path.read_bytes() for path in (tmp_path / "home").iterdir())


def test_no_two_keys_are_alike(store: OnlineStore) -> None:
    keys = ApiKeys(store)
    made = [keys.create("acme", [Scope.CALL]) for _ in range(20)]
    assert len({text for text, _ in made}) == len({key.id for _, key in made}) == 20


def test_a_revoked_key_is_listed_and_opens_nothing(store: OnlineStore) -> None:
    keys = ApiKeys(store)
    text, key = keys.create("acme", [Scope.CALL])
    other, _ = keys.create("acme", [Scope.ADMIN])
    revoked = keys.revoke(key.id)
    assert revoked.revoked_at is not None
    assert keys.revoke(key.id) == revoked  # the time of the first one stays
    assert set(keys.active()) == {hash_key(other)}
    assert hash_key(text) not in keys.active()
    assert revoked in keys.all()


def test_a_tenant_lists_and_revokes_its_own(store: OnlineStore) -> None:
    keys = ApiKeys(store)
    _, ours = keys.create("acme", [Scope.CALL])
    _, theirs = keys.create("rival", [Scope.CALL])
    assert keys.all("acme") == [ours]
    with pytest.raises(NotFound, match=theirs.id):
        keys.revoke(theirs.id, "acme")
    assert len(keys.active()) == 2


def test_every_change_moves_the_state(store: OnlineStore) -> None:
    keys = ApiKeys(store)
    seen = [keys.state()]
    _, key = keys.create("acme", [Scope.CALL])
    seen.append(keys.state())
    keys.revoke(key.id)
    seen.append(keys.state())
    keys.create("acme", [Scope.CALL])
    seen.append(keys.state())
    keys.revoke(key.id)
    assert len(set(seen)) == 4
    assert keys.state() == seen[-1]


@pytest.mark.parametrize(
    ("tenant", "scopes", "name", "said"),
    [
        ("", [Scope.CALL], "", "tenant ''"),
        ("a/b", [Scope.CALL], "", "'a/b'"),
        ("acme", [], "", "call, feedback, trainer, admin"),
        ("acme", [Scope.CALL], "x" * 129, "128"),
        ("acme", [Scope.CALL], "a\nb", "printable"),
    ],
)
def test_what_a_key_cannot_be(store: OnlineStore, tenant: str, scopes: Any, name: str, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said):
        ApiKeys(store).create(tenant, scopes, name)
    assert ApiKeys(store).all() == []


def test_whoever_takes_the_text_for_the_id_does_not_read_it_again(store: OnlineStore) -> None:
    text, key = ApiKeys(store).create("acme", [Scope.CALL])
    with pytest.raises(NotFound) as caught:
        ApiKeys(store).revoke(text)
    assert text not in str(caught.value)
    with pytest.raises(NotFound):
        ApiKeys(store).revoke(key.id[:-1] + ("0" if key.id[-1] != "0" else "1"))


def test_a_scope_of_a_later_noria_opens_nothing(online: OnlineStore, tmp_path: Path) -> None:
    text, _ = ApiKeys(online).create("acme", [Scope.CALL])
    database = sqlite3.connect(tmp_path / "home" / "online.db")
    with database:
        database.execute("""UPDATE api_keys SET scopes = '["call", "everything"]'""")
    database.close()
    assert ApiKeys(online).active()[hash_key(text)].scopes == {Scope.CALL}


def test_what_is_shown_of_a_key_has_neither_text_nor_hash(online: OnlineStore) -> None:
    text, key = ApiKeys(online).create("acme", [Scope.TRAINER], "driver")
    shown = str(key_to_json(key)) + repr(key)
    assert text not in shown
    assert hash_key(text) not in shown
    assert "driver" in shown
