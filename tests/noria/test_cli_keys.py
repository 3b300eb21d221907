import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from noria.cli_keys import keys
from noria.contracts.access import KEY_TEXT, Scope
from noria.contracts.errors import NotFound
from noria.stores.api_keys import ApiKeys, hash_key
from noria.stores.online import OnlineStore


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "noria.toml").write_text('[proxy]\ntenant = "ours"\n')
    store = OnlineStore(f"sqlite:///{tmp_path / '.noria' / 'online.db'}")
    store.upgrade()
    store.close()
    return tmp_path


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(keys, list(arguments), env={"NORIA_CONFIG": str(home / "noria.toml")})


def test_a_key_is_made_listed_and_revoked(home: Path) -> None:
    made = run(home, "create", "--scope", "call", "--scope", "feedback", "--tenant", "acme", "--name", "checkout")
    assert made.exit_code == 0, made.output
    text = made.stdout.strip()
    assert KEY_TEXT.fullmatch(text)
    assert "acme" in made.stderr
    assert text not in made.stderr
    store = OnlineStore(f"sqlite:///{home / '.noria' / 'online.db'}")
    key = ApiKeys(store).active()[hash_key(text)]
    assert (key.tenant, key.scopes, key.name) == ("acme", {Scope.CALL, Scope.FEEDBACK}, "checkout")

    listed = run(home, "list").stdout
    assert [word in listed for word in (key.id, "acme", "call,feedback", "checkout", "in use")] == [True] * 5
    assert text not in listed
    assert json.loads(run(home, "list", "--json").stdout)["id"] == key.id
    assert run(home, "list", "--tenant", "rival").stdout == ""

    assert run(home, "revoke", key.id).exit_code == 0
    assert "revoked" in run(home, "list").stdout
    assert ApiKeys(store).active() == {}
    store.close()


def test_a_key_is_of_the_proxys_own_tenant_unless_another_is_named(home: Path) -> None:
    run(home, "create", "--scope", "call")
    assert json.loads(run(home, "list", "--json").stdout)["tenant"] == "ours"


def test_what_cannot_be_done_is_an_error_of_noria(home: Path) -> None:
    assert isinstance(run(home, "revoke", "key_0123456789abcdef").exception, NotFound)
    assert run(home, "create", "--scope", "everything").exit_code == 2
    assert run(home, "create").exit_code == 2
