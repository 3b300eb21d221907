"""What an upstream keeps under the operator's key is no other tenant's."""

import asyncio
from typing import Any

import pytest

from noria.contracts.access import Scope
from noria.stores.api_keys import ApiKeys


@pytest.fixture
async def proxy(start_upstream: Any, start_proxy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPERATORS_KEY", "sk-operators-own")
    upstream = await start_upstream()
    return await start_proxy({"main": {"url": upstream.url, "api_key_env": "OPERATORS_KEY"}}, tenant="house")


async def key_of(proxy: Any, tenant: str) -> str:
    """A new key that the running proxy has taken over."""
    text, _key = ApiKeys(proxy.store).create(tenant, [Scope.CALL])
    async with asyncio.timeout(5):
        while await status_of(proxy, text, "/v1/models") == 401:  # noqa: ASYNC110 - the proxy polls the store
            await asyncio.sleep(0.1)
    return text


async def status_of(proxy: Any, key: str, path: str) -> int:
    async with proxy.session.get(f"{proxy.url}{path}", headers={"x-noria-key": key}) as answer:
        return int(answer.status)


async def test_another_tenant_meets_nothing_that_the_operators_key_keeps(proxy: Any) -> None:
    key = await key_of(proxy, "guest")
    for path in ("/v1/files", "/v1/files/f_1", "/v1/responses/r_1", "/v1/batches?limit=1"):
        assert await status_of(proxy, key, path) == 403, path
    assert await status_of(proxy, key, "/v1/models") == 200


async def test_the_operators_own_tenant_does(proxy: Any) -> None:
    assert await status_of(proxy, await key_of(proxy, "house"), "/v1/files") == 405  # the upstream's own answer
