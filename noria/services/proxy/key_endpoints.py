"""API keys over HTTP, for an admin of one tenant or for the instance: `/noria/v1/keys`."""

import asyncio
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import SQLAlchemyError

from noria.config import Config
from noria.contracts.access import TENANT, Scope
from noria.contracts.errors import ConfigError
from noria.services.proxy.access import Access, Caller
from noria.services.proxy.refusal import REFUSALS, Forbidden, StoreUnavailable, refusal_response
from noria.services.proxy.request_body import read_body
from noria.stores.api_keys import MAX_NAME, ApiKeys, key_to_json
from noria.stores.online import OnlineStore


class NewKey(BaseModel):
    """Body of `POST /noria/v1/keys`."""

    model_config = ConfigDict(extra="forbid")

    tenant: Annotated[str, Field(pattern=f"^{TENANT.pattern}$")] | None = None
    """By default the admin's own."""
    scopes: list[Scope] = Field(min_length=1)
    name: Annotated[str, Field(max_length=MAX_NAME, json_schema_extra={"pattern": "^[ -~]*$"})] = ""


class KeyEndpoints:
    """Makes, lists and revokes keys; an admin's key sees and reaches its own tenant alone."""

    def __init__(self, config: Config, store: OnlineStore, access: Access) -> None:
        self._limit = config.proxy.max_body_bytes
        self._own_tenant = config.proxy.tenant
        self._keys = ApiKeys(store)
        self._access = access

    async def create(self, request: web.Request) -> web.Response:
        """Make a key; its text stands in this answer and nowhere else."""
        try:
            caller = self._admin(request)
            new = await read_body(request, NewKey, self._limit)
            tenant = _tenant(caller, new, self._own_tenant)
            text, key = await self._store(self._keys.create, tenant, new.scopes, new.name)
        except REFUSALS as error:
            return refusal_response(error)[0]
        await self._access.refresh()
        return web.json_response({"key": text, **key_to_json(key)}, status=201, headers={"Cache-Control": "no-store"})

    async def list(self, request: web.Request) -> web.Response:
        """The keys of the caller's tenant, or of all, revoked ones too."""
        try:
            caller = self._admin(request)
            keys = await self._store(self._keys.all, caller.tenant)
        except REFUSALS as error:
            return refusal_response(error)[0]
        return web.json_response({"keys": [key_to_json(key) for key in keys]})

    async def revoke(self, request: web.Request) -> web.Response:
        """Close a key; doing it twice changes nothing."""
        try:
            caller = self._admin(request)
            key = await self._store(self._keys.revoke, request.match_info["key_id"], caller.tenant)
        except REFUSALS as error:
            return refusal_response(error)[0]
        await self._access.refresh()
        return web.json_response(key_to_json(key))

    def _admin(self, request: web.Request) -> Caller:
        caller = self._access.caller(request.headers)
        self._access.require(caller, Scope.ADMIN)
        return caller

    async def _store(self, what: Any, *args: Any) -> Any:
        try:
            return await asyncio.to_thread(what, *args)
        except (SQLAlchemyError, ConfigError, OSError) as error:
            raise StoreUnavailable(f"the online store cannot be used: {error}; try again") from error


def _tenant(caller: Caller, new: NewKey, own: str) -> str:
    """The tenant of a new key. Raises `Forbidden` for what the caller may not grant."""
    if caller.tenant is None:
        return own if new.tenant is None else new.tenant
    if new.tenant not in (None, caller.tenant):
        raise Forbidden(
            f"key {caller.key_id} is of tenant {caller.tenant!r} and cannot make a key of tenant {new.tenant!r}; leave "
            "tenant out, or use the trainer's key"
        )
    beyond = sorted(set(new.scopes) - caller.scopes)
    if beyond:
        raise Forbidden(
            f"key {caller.key_id} cannot grant {', '.join(beyond)}, which it does not have itself "
            f"({', '.join(sorted(caller.scopes))}); use a key that has, or `noria keys create`"
        )
    return caller.tenant
