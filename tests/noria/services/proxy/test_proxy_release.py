import asyncio
import time
from typing import Any

from noria.contracts.call import Arm
from noria.release.registry import Registry
from noria.stores.online import OnlineStore

ROUTER = {"x-noria-app": "dispatch", "x-noria-node": "router"}


async def until_answered_by(proxy: Any, policy: Any, version: str) -> float:
    """Seconds until a call of the router is answered by that version."""
    started = time.perf_counter()
    while True:
        await proxy.chat(headers=ROUTER)
        if policy.asked and policy.asked[-1]["model"] == version:
            return time.perf_counter() - started
        assert time.perf_counter() - started < 5
        await asyncio.sleep(0.02)


async def test_a_release_is_followed_within_a_second_without_a_restart(start_upstream: Any, start_proxy: Any) -> None:
    live, policy = await start_upstream(), await start_upstream()
    proxy = await start_proxy({"live": live.url, "policy": {"url": policy.url, "token_ids": True}})
    await proxy.chat(headers=ROUTER)
    assert len(live.bodies) == 1
    elsewhere = OnlineStore(proxy.config.store_url)  # the gate is another process
    registry = Registry(elsewhere)
    registry.promote("dispatch.router", "dispatch.router.r00001", "c1", by="test", why="first")
    assert await until_answered_by(proxy, policy, "dispatch.router.r00001") < 1.0
    registry.promote("dispatch.router", "dispatch.router.r00002", "c2", by="test", why="better")
    assert await until_answered_by(proxy, policy, "dispatch.router.r00002") < 1.0
    registry.roll_back("dispatch.router", by="test", why="worse after all")
    assert await until_answered_by(proxy, policy, "dispatch.router.r00001") < 1.0
    elsewhere.close()

    before = len(policy.bodies)
    await proxy.chat(headers={**ROUTER, "x-noria-node": "reply"})  # another target has its own release
    assert len(policy.bodies) == before
    calls = await proxy.calls()
    assert (calls[0].policy_version, calls[0].model_name) == (None, "m")
    assert (calls[-2].policy_version, calls[-2].model_name) == ("dispatch.router.r00001", "m")
    assert {call.arm for call in calls} == {Arm.LIVE}


async def test_a_release_from_before_the_start_counts_from_the_first_call(
    start_upstream: Any, start_proxy: Any, tmp_path: Any
) -> None:
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    store.upgrade()
    Registry(store).promote("dispatch.router", "dispatch.router.r00001", "c1", by="test", why="first")
    store.close()
    live, policy = await start_upstream(), await start_upstream()
    proxy = await start_proxy({"live": live.url, "policy": policy.url}, store_url=store.url)
    await proxy.chat(headers=ROUTER)
    assert policy.asked[0]["model"] == "dispatch.router.r00001"


async def test_without_a_store_traffic_goes_on_and_is_recorded_later(
    start_upstream: Any, start_proxy: Any, tmp_path: Any
) -> None:
    (tmp_path / "store").write_text("")  # a file where the store's folder should be
    live = await start_upstream()
    proxy = await start_proxy({"live": live.url}, store_url=f"sqlite:///{tmp_path / 'store' / 'online.db'}")
    assert (await proxy.chat())[0] == 200
    assert "noria_spool_records 1.0" in await proxy.metrics()
    (tmp_path / "store").unlink()
    [call] = await asyncio.wait_for(proxy.calls(), 10)
    assert call.model_name == "m"
