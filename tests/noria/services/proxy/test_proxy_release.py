import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web
from sqlalchemy import insert, make_url

from noria.contracts.call import Arm, CallStatus
from noria.release.registry import Registry
from noria.stores.online import OnlineStore
from noria.stores.tables import releases

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
    start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    live, policy = await start_upstream(), await start_upstream()
    proxy = await start_proxy({"live": live.url, "policy": policy.url})
    Registry(proxy.store).promote("dispatch.router", "dispatch.router.r00001", "c1", by="test", why="first")
    await until_answered_by(proxy, policy, "dispatch.router.r00001")
    before = len(await proxy.calls())
    database = Path(str(make_url(proxy.store.url).database))
    files = list(database.parent.glob(f"{database.name}*"))
    for path in files:
        path.rename(path.with_name(f"away-{path.name}"))
    database.mkdir()  # where the file should be, so that nobody makes a new one
    proxy.store.close()
    for _ in range(3):
        assert (await proxy.chat(headers=ROUTER))[0] == 200
    assert policy.asked[-1]["model"] == "dispatch.router.r00001"
    assert "noria_spool_records 3.0" in await proxy.metrics()
    database.rmdir()
    for path in files:
        path.with_name(f"away-{path.name}").rename(path)
    assert len(await asyncio.wait_for(proxy.calls(), 10)) == before + 3


async def test_a_canary_answers_its_traces_and_the_record_has_the_arm(
    start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    live, policy = await start_upstream(), await start_upstream()
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    store.upgrade()
    Registry(store).promote("dispatch.router", "dispatch.router.r00001", "c1", by="test", why="first")
    canary = {"target": "dispatch.router", "version": "dispatch.router.r00002", "checkpoint": "c2", "parent": None}
    with store.write() as connection:  # no transition leads here yet
        connection.execute(insert(releases), {**canary, "state": "canary", "weight": 0.5})
    store.close()
    proxy = await start_proxy({"live": live.url, "policy": policy.url}, store_url=store.url)
    for trace in range(1, 41):
        for _ in range(2):
            headers = {**ROUTER, "traceparent": f"00-{trace:032x}-{'1' * 16}-01"}
            assert (await proxy.chat(headers=headers))[0] == 200
    assert live.bodies == []
    served: dict[str, set[tuple[str, str | None]]] = {}
    for call in await proxy.calls():
        served.setdefault(call.trace_id, set()).add((call.arm, call.policy_version))
    assert len(served) == 40
    assert all(len(arms) == 1 for arms in served.values()), "a trace keeps its side"
    sides = [next(iter(arms)) for arms in served.values()]
    assert set(sides) == {(Arm.CANARY, "dispatch.router.r00002"), (Arm.LIVE, "dispatch.router.r00001")}
    assert Counter(asked["model"] for asked in policy.asked) == Counter(
        version for _, version in sides for _ in range(2)
    )


async def test_a_fallback_that_answers_for_the_canary_is_recorded_as_what_it_is(
    start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    async def busy(_request: web.Request, _body: Any) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=503)

    other, policy = await start_upstream(), await start_upstream(busy)
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    store.upgrade()
    canary = {"target": "dispatch.router", "version": "dispatch.router.r00002", "checkpoint": "c2", "parent": None}
    with store.write() as connection:
        connection.execute(insert(releases), {**canary, "state": "canary", "weight": 1.0})
    store.close()
    upstreams = {"other": other.url, "policy": {"url": policy.url, "token_ids": True, "fallbacks": ["other"]}}
    proxy = await start_proxy(upstreams, store_url=store.url)
    assert (await proxy.chat(headers=ROUTER))[0] == 200
    assert (policy.asked[0]["model"], other.asked[0]["model"]) == ("dispatch.router.r00002", "m")
    assert "return_token_ids" not in other.asked[0]
    [call] = await proxy.calls()
    assert (call.arm, call.policy_version, call.status) == (Arm.LIVE, None, CallStatus.OK)
    assert (call.attributes["fallback"], call.attributes["attempts"]) == ("other", 2)
    assert call.attributes["assigned_arm"] == "canary"
