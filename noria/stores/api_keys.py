"""API keys in the online store: made, listed and revoked, and never kept as text.

A key is 256 random bits, so a plain SHA-256 of it is as good as a slow password hash: there is nothing to guess, and
each call of an agent is checked in a microsecond.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import RowMapping, func, select, update

from noria.contracts.access import TENANT, ApiKey, Scope
from noria.contracts.errors import InvalidRecord, NotFound
from noria.stores.online import OnlineStore
from noria.stores.tables import api_keys

MAX_NAME = 128

_ID = re.compile(r"key_[0-9a-f]{16}")


def hash_key(text: str) -> str:
    """What the store keeps of a key: SHA-256, 64 hex digits."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


class ApiKeys:
    """The keys of every tenant. Methods raise SQLAlchemy's errors, or `ConfigError`, where the store cannot be read."""

    def __init__(self, store: OnlineStore) -> None:
        self._store = store

    def create(self, tenant: str, scopes: Iterable[Scope], name: str = "") -> tuple[str, ApiKey]:
        """A new key: its text, which is known to nobody afterwards, and what is kept of it.

        Raises `InvalidRecord` for a tenant, a name or a set of scopes that a key cannot have.
        """
        granted = frozenset(scopes)
        if not TENANT.fullmatch(tenant):
            raise InvalidRecord(f"tenant {tenant!r} may have 1 to 128 letters, digits, '.', '_' and '-'")
        if not granted:
            raise InvalidRecord(f"a key without scopes opens nothing; name some of {', '.join(Scope)}")
        if len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRecord(f"name {name[:40]!r} of a key may have up to {MAX_NAME} printable characters")
        text = f"nk_{secrets.token_urlsafe(32)}"
        key = ApiKey(f"key_{secrets.token_hex(8)}", tenant, granted, name, datetime.now(UTC))
        row = {
            "id": key.id,
            "hash": hash_key(text),
            "tenant": key.tenant,
            "scopes": json.dumps(sorted(key.scopes)),
            "name": key.name,
            "created_at": key.created_at,
            "revoked_at": None,
        }
        with self._store.write() as connection:
            connection.execute(api_keys.insert(), [row])
        return text, key

    def all(self, tenant: str | None = None) -> list[ApiKey]:
        """The keys of one tenant, or of every tenant, revoked ones too; in the order in which they were made."""
        query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        with self._store.read() as connection:
            return [_from_row(row) for row in connection.execute(query).mappings()]

    def revoke(self, key_id: str, tenant: str | None = None) -> ApiKey:
        """Close a key for ever; one that is closed already stays as it is.

        Raises `NotFound` if there is no such key, or it belongs to another tenant than `tenant`.
        """
        if not _ID.fullmatch(key_id):  # not repeated: it may be the text of a key
            raise NotFound("this is not the id of an API key (key_ and 16 hex digits); `noria keys list` shows them")
        this = api_keys.c.id == key_id
        with self._store.write() as connection:
            row = connection.execute(select(api_keys).where(this)).mappings().one_or_none()
            if row is None or tenant not in (None, row["tenant"]):
                raise NotFound(f"there is no API key {key_id!r}; `noria keys list` shows the ids")
            if row["revoked_at"] is None:
                connection.execute(update(api_keys).where(this).values(revoked_at=datetime.now(UTC)))
                row = connection.execute(select(api_keys).where(this)).mappings().one()
            return _from_row(row)

    def active(self) -> dict[str, ApiKey]:
        """Every key that opens something, by its hash."""
        with self._store.read() as connection:
            rows = connection.execute(select(api_keys).where(api_keys.c.revoked_at.is_(None))).mappings()
            return {row["hash"]: _from_row(row) for row in rows}

    def state(self) -> tuple[int, int]:
        """How many keys were ever made, and how many revoked: moves with every change, so that readers can poll."""
        with self._store.read() as connection:
            made, revoked = connection.execute(select(func.count(), func.count(api_keys.c.revoked_at))).one()
            return int(made), int(revoked)


def key_to_json(key: ApiKey) -> dict[str, Any]:
    """The key for people and programs; without text or hash."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "name": key.name,
        "created_at": key.created_at.isoformat(),
        "revoked_at": None if key.revoked_at is None else key.revoked_at.isoformat(),
    }


def known_scopes(names: Iterable[str]) -> frozenset[Scope]:
    """The scopes among `names`; what a later Noria may grant beyond them opens nothing here."""
    return frozenset(Scope(name) for name in names if name in set(Scope))


def _from_row(row: RowMapping | Mapping[str, Any]) -> ApiKey:
    values = {name: row[name] for name in ("id", "tenant", "name", "created_at", "revoked_at")}
    return ApiKey(scopes=known_scopes(json.loads(row["scopes"])), **values)
