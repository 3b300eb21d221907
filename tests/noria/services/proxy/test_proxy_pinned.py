"""Pinned nodes against a real store and a real spool: what answers a rollout's call, and that its group hears one."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from noria.config import Config
from noria.contracts.call import END2END, Call, CallStatus
from noria.contracts.errors import DirectiveRefused, NotFound
from noria.contracts.rollout import Directive
from noria.services.proxy.exchange import Kind
from noria.services.proxy.identity import Identity
from noria.services.proxy.pinned import Asked, Miss, Pinned, Recorded, Target
from noria.services.proxy.recording import Recordings
from noria.services.proxy.refusal import PinnedMiss, StoreUnavailable
from noria.services.proxy.routing import Router
from noria.services.proxy.serving_table import ReleaseTable
from noria.services.proxy.spool import Spool
from noria.services.proxy.writer import ThreadWriter
from noria.stores.online import OnlineStore

ORIGIN = "a" * 32
DIRECTIVE = Directive("shop.router.r00003", ORIGIN, "b" * 32, "shop.router.r00004", 7, 1, 0, 100, 0.7)
START = datetime(2026, 3, 1, tzinfo=UTC)


def ask(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "gpt-5", "messages": [{"role": "user", "content": content}], **more}


def member(number: int) -> Directive:
    """The directive of one rollout of the group."""
    return replace(DIRECTIVE, member=number, trace_id=f"{number + 1:032x}")


def caller(node: str, tenant: str = "default") -> Identity:
    return Identity(tenant, "shop", node, "b" * 32)


@dataclass
class Bench:
    """One process's view of pinned nodes, its store, and a way to have calls recorded."""

    pinned: Pinned
    store: OnlineStore
    spool: Spool
    make_call: Callable[..., Call]
    numbers: Any = field(default_factory=itertools.count)

    def recorded(self, node: str, body: dict[str, Any], output: str, **changes: Any) -> Call:
        at = START + timedelta(seconds=next(self.numbers))
        values = {
            "tenant": "default",
            "process_node": node,
            "trace_id": ORIGIN,
            "input": json.dumps(body),
            "output": json.dumps(output),
            "request_time": at,
            "response_time": at,
            **changes,
        }
        return self.make_call(**values)

    def record(self, node: str, body: dict[str, Any], output: str, **changes: Any) -> Call:
        call = self.recorded(node, body, output, **changes)
        self.store.add_calls([call])
        return call

    async def plan(
        self, node: str, body: dict[str, Any], directive: Directive = DIRECTIVE, kind: Kind = Kind.CHAT, **who: str
    ) -> Target | Recorded | Miss:
        return await self.pinned.plan(caller(node, **who), directive, kind, body)


@pytest.fixture
async def start(tmp_path: Path, make_call: Any) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    started = []

    async def start(name: str = "one", **proxy: Any) -> Bench:
        """Another proxy on the same store; `name` is its home."""
        upstreams = {"policy": {"url": "http://127.0.0.1:1"}, "openai": {"url": "http://127.0.0.1:2"}}
        settings = {"upstreams": upstreams, "default_upstream": "openai", **proxy}
        url = f"sqlite:///{tmp_path / 'online.db'}"
        config = Config.model_validate({"proxy": settings, "store": {"url": url}, "root": tmp_path / name})
        store = OnlineStore(url)
        store.upgrade()
        spool = Spool(config.spool_dir, ThreadWriter(config, store))
        await spool.start()
        started.append((spool, store))
        pinned = Pinned(config, store, spool, Router(config, ReleaseTable(store, 1.0)))
        return Bench(pinned, store, spool, make_call)

    yield start
    for spool, store in started:
        await spool.close()
        store.close()


@pytest.fixture
async def bench(start: Any) -> Bench:
    one: Bench = await start()
    return one


class Upstream:
    """Stands for what the proxy asks live: counts how often, and answers as the test says."""

    def __init__(self, *, ok: bool = True, seconds: float = 0.0, hold: bool = False) -> None:
        self.asked = 0
        self.ok = ok
        self.seconds = seconds
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        if not hold:
            self.go.set()

    async def __call__(self) -> Asked[str]:
        self.asked += 1
        number = self.asked
        self.begun.set()
        await self.go.wait()
        await asyncio.sleep(self.seconds)
        return Asked(self.ok, json.dumps(f"answer {number}"), "v1", f"{id(self)}-{number}", f"response {number}")


# What answers


async def test_the_targets_calls_go_to_the_version_under_test_one_seed_after_the_other(bench: Bench) -> None:
    bench.record("router", ask("x"), "x")
    plans = [await bench.plan("router", ask("x")) for _ in range(3)]
    assert [plan.route.overrides["seed"] for plan in plans if isinstance(plan, Target)] == [100, 101, 102]
    other = await bench.plan("router", ask("x"), member(5))
    assert isinstance(other, Target)
    assert other.route.overrides["seed"] == 100


async def test_the_same_input_is_answered_before_the_same_place(bench: Bench) -> None:
    first = bench.record("reply", ask("one"), "first", policy_version="shop.reply.r00001")
    second = bench.record("reply", ask("two"), "second")
    plan = await bench.plan("reply", ask("two", model="other", temperature=2, stream=True))
    assert plan == Recorded('"second"', None, second.uid, "exact")
    plan = await bench.plan("reply", ask("one"))
    assert plan == Recorded('"first"', "shop.reply.r00001", first.uid, "exact")
    assert plan.attributes == {"pinned": "exact", "recorded_uid": first.uid}


async def test_another_input_is_answered_by_the_same_occurrence_of_the_node(bench: Bench) -> None:
    answers = [bench.record("reply", ask(f"{number}"), f"{number}") for number in range(2)]
    bench.record("search", ask("elsewhere"), "elsewhere")
    plans = [await bench.plan("reply", ask("new")) for _ in range(3)]
    assert plans[:2] == [Recorded(f'"{n}"', None, answers[n].uid, "occurrence") for n in range(2)]
    assert isinstance(plans[2], Miss)
    assert plans[0].attributes == {"pinned": "occurrence", "recorded_uid": answers[0].uid}  # type: ignore[union-attr]
    assert plans[2].attributes == {"pinned": "miss"}


async def test_an_input_asked_several_times_is_answered_in_turn_and_then_by_the_last(bench: Bench) -> None:
    for answer in ("heads", "tails"):
        bench.record("coin", ask("toss"), answer)
    plans = [await bench.plan("coin", ask("toss")) for _ in range(3)]
    assert [plan.output for plan in plans if isinstance(plan, Recorded)] == ['"heads"', '"tails"', '"tails"']


async def test_occurrences_are_counted_by_when_calls_began(bench: Bench) -> None:
    late = bench.recorded("reply", ask("a"), "began first", request_time=START)
    early = bench.recorded("reply", ask("b"), "began second", request_time=START + timedelta(seconds=1))
    bench.store.add_calls([early, late])  # the second one ended first
    plans = [await bench.plan("reply", ask("new")) for _ in range(2)]
    assert [plan.output for plan in plans if isinstance(plan, Recorded)] == ['"began first"', '"began second"']


async def test_each_api_has_its_own_recording(bench: Bench) -> None:
    bench.record("reply", {"prompt": "x"}, "text", attributes={"endpoint": "completions"})
    bench.record("reply", ask("x"), "chat", attributes={"endpoint": "chat.completions"})
    bench.record("reply", {"input": "x", "model": "e"}, "vector", attributes={"endpoint": "embeddings"})
    bench.record("reply", ask("x"), "of a later Noria", attributes={"endpoint": "video"})
    for kind, body, output in (
        (Kind.CHAT, ask("new"), "chat"),
        (Kind.COMPLETION, {"prompt": "new"}, "text"),
        (Kind.EMBEDDING, {"input": "new", "model": "e"}, "vector"),
    ):
        plan = await bench.plan("reply", body, kind=kind)
        assert isinstance(plan, Recorded)
        assert (json.loads(plan.output), plan.how) == (output, "occurrence")
    assert isinstance(await bench.plan("reply", ask("x"), kind=Kind.MESSAGE), Miss)


async def test_only_whole_model_calls_answer(bench: Bench) -> None:
    for status in (CallStatus.UPSTREAM_ERROR, CallStatus.CLIENT_DISCONNECT, CallStatus.REFUSED):
        bench.record("reply", ask("x"), "no", status=status)
    bench.record(END2END, ask("x"), "a whole task")
    assert isinstance(await bench.plan("reply", ask("x")), Miss)
    assert isinstance(await bench.plan(END2END, ask("x")), Miss)


async def test_what_the_target_embeds_is_never_answered_by_place(bench: Bench) -> None:
    """The vector of another text would hide what the version under test has said."""
    body = {"input": "x", "model": "e"}
    bench.record("router", body, "vector", attributes={"endpoint": "embeddings"})
    plan = await bench.plan("router", body, kind=Kind.EMBEDDING)
    assert isinstance(plan, Recorded)
    assert plan.how == "exact"
    miss = await bench.plan("router", {**body, "input": "y"}, kind=Kind.EMBEDDING)
    assert isinstance(miss, Miss)
    assert (miss.route.upstream.name, miss.route.overrides) == ("openai", {})


async def test_an_origin_trace_that_nobody_has_or_another_tenant_is_not_found(bench: Bench) -> None:
    bench.record("reply", ask("x"), "of theirs", tenant="theirs")
    for node in ("router", "reply"):
        with pytest.raises(NotFound, match=ORIGIN):
            await bench.plan(node, ask("x"))
    plan = await bench.plan("reply", ask("x"), tenant="theirs")
    assert isinstance(plan, Recorded)
    with pytest.raises(NotFound):
        await bench.plan("reply", ask("x"))
    bench.record("reply", ask("x"), "of ours")
    ours = await bench.plan("reply", ask("x"))
    assert isinstance(ours, Recorded)
    assert ours.output == '"of ours"'


async def test_a_directive_without_a_target_is_refused(bench: Bench) -> None:
    bench.record("reply", ask("x"), "x")
    with pytest.raises(DirectiveRefused):
        await bench.plan("reply", ask("x"), replace(DIRECTIVE, model="base", round="none"))


async def test_what_is_still_in_the_spool_counts(bench: Bench) -> None:
    calls = [bench.recorded("reply", ask(f"{number}"), f"{number}") for number in range(3)]
    bench.store.add_calls(calls[:1])
    for call in calls[1:]:
        assert await bench.spool.write(call)
    plan = await bench.plan("reply", ask("2"))
    assert plan == Recorded('"2"', None, calls[2].uid, "exact")


async def test_calls_that_arrive_late_are_seen(bench: Bench) -> None:
    bench.record("reply", ask("x"), "x")
    assert isinstance(await bench.plan("reply", ask("x")), Recorded)
    late = bench.record("search", ask("y"), "late")
    assert await bench.plan("search", ask("y")) == Recorded('"late"', None, late.uid, "exact")


async def test_the_same_trace_is_read_again_only_so_often(bench: Bench) -> None:
    recordings = Recordings(bench.store, bench.spool, reread_seconds=0.3)
    bench.record("reply", ask("x"), "x")
    await recordings.origin_again(ORIGIN, "default")
    bench.record("reply", ask("y"), "y")
    soon = await recordings.origin_again(ORIGIN, "default")
    assert soon.occurrence("reply", Kind.CHAT, 1) is None
    await asyncio.sleep(0.3)
    later = await recordings.origin_again(ORIGIN, "default")
    assert later.occurrence("reply", Kind.CHAT, 1) is not None
    assert await recordings.origin(ORIGIN, "default") is later


async def test_origin_traces_that_are_too_large_together_leave_memory_again(bench: Bench) -> None:
    recordings = Recordings(bench.store, bench.spool, held_characters=1000)
    ids = [letter * 32 for letter in "abc"]
    for trace_id in ids:
        bench.record("reply", ask("x"), "x" * 600, trace_id=trace_id)
    held = [await recordings.origin(trace_id, "default") for trace_id in ids]
    assert await recordings.origin(ids[2], "default") is held[2]
    assert await recordings.origin(ids[0], "default") is not held[0]
    assert await recordings.origin(ids[2], "default") is not held[2], "room was made for the other"
    bench.record("reply", ask("x"), "x" * 5000, trace_id="d" * 32)
    large = await recordings.origin("d" * 32, "default")
    assert await recordings.origin("d" * 32, "default") is large, "the one in use stays, whatever its size"


async def test_a_failing_reread_leaves_what_is_known(bench: Bench, tmp_path: Path) -> None:
    first = bench.record("reply", ask("x"), "x")
    assert isinstance(await bench.plan("reply", ask("x")), Recorded)
    take_away(bench.store, tmp_path)
    assert await bench.plan("reply", ask("new"), member(1)) == Recorded('"x"', None, first.uid, "occurrence")


# Misses


async def test_a_miss_is_refused_where_the_configuration_says_so(start: Any) -> None:
    bench = await start(miss_policy="fail")
    bench.record("reply", ask("x"), "x")
    with pytest.raises(PinnedMiss, match=rf"node 'search' made its call 0 .*{ORIGIN}.*miss_policy"):
        await bench.plan("search", ask("x"))


async def test_a_miss_is_asked_once_for_the_whole_group(bench: Bench) -> None:
    bench.record("reply", ask("x"), "x")
    upstream = Upstream(seconds=0.05)

    async def one(number: int) -> Recorded | Asked[str]:
        miss = await bench.plan("search", ask("y"), member(number))
        assert isinstance(miss, Miss)
        return await bench.pinned.settle(miss, upstream)

    told = await asyncio.gather(*(one(number) for number in range(16)))
    assert upstream.asked == 1
    assert {answer.output for answer in told} == {'"answer 1"'}
    [asker] = [answer for answer in told if isinstance(answer, Asked)]
    assert asker.response == "response 1"
    memos = [answer for answer in told if isinstance(answer, Recorded)]
    assert memos == [Recorded('"answer 1"', "v1", asker.uid, "memo")] * 15
    assert memos[0].attributes == {"pinned": "miss", "recorded_uid": asker.uid}
    late = await bench.plan("search", ask("y"), member(99))
    assert late == memos[0], "one who comes later need not even wait"


async def test_two_proxies_tell_a_group_the_same(start: Any) -> None:
    one, two = await start("one"), await start("two")
    one.record("reply", ask("x"), "x")
    upstreams = [Upstream(hold=True), Upstream(hold=True)]
    asking = []
    for bench, upstream in zip((one, two), upstreams, strict=True):
        miss = await bench.plan("search", ask("y"))
        asking.append(asyncio.ensure_future(bench.pinned.settle(miss, upstream)))
        await upstream.begun.wait()
    upstreams[1].go.set()
    second = await asking[1]
    upstreams[0].go.set()
    first = await asking[0]
    assert isinstance(second, Asked)
    assert first == Recorded(second.output, "v1", second.uid, "memo"), (
        "both have asked; what the store had first counts"
    )
    for bench in (one, two):
        assert await bench.plan("search", ask("y"), member(1)) == first


@pytest.mark.parametrize(
    "change",
    [
        {"directive": replace(member(1), group=2)},
        {"directive": replace(member(1), sample_id=8)},
        {"directive": replace(member(1), round="shop.router.r00005")},
        {"directive": replace(member(1), invariant="c" * 32)},
        {"node": "search2"},
        {"kind": Kind.RESPONSE},
        {"body": ask("z")},
        {"who": "theirs"},
    ],
)
async def test_what_differs_is_asked_on_its_own(bench: Bench, change: dict[str, Any]) -> None:
    for more in ({}, {"trace_id": "c" * 32}, {"tenant": "theirs"}):
        bench.record("reply", ask("x"), "x", **more)
    upstream = Upstream()
    miss = await bench.plan("search", ask("y"))
    assert isinstance(miss, Miss)
    assert isinstance(await bench.pinned.settle(miss, upstream), Asked)
    other = await bench.pinned.plan(
        caller(change.get("node", "search"), change.get("who", "default")),
        change.get("directive", member(1)),
        change.get("kind", Kind.CHAT),
        change.get("body", ask("y")),
    )
    assert isinstance(other, Miss)
    assert isinstance(await bench.pinned.settle(other, upstream), Asked)
    assert upstream.asked == 2


async def test_the_same_input_again_is_another_question(bench: Bench) -> None:
    """A group's second toss of a coin is not its first, and is the same for all."""
    bench.record("reply", ask("x"), "x")
    upstream = Upstream()
    heard = []
    for number in range(3):
        for _ in range(2):
            plan = await bench.plan("coin", ask("toss"), member(number))
            answer = await bench.pinned.settle(plan, upstream) if isinstance(plan, Miss) else plan
            assert not isinstance(answer, Target)
            heard.append(answer.output)
    assert heard == ['"answer 1"', '"answer 2"'] * 3
    assert upstream.asked == 2


async def test_an_answer_that_is_not_ok_goes_to_its_asker_alone(bench: Bench) -> None:
    bench.record("reply", ask("x"), "x")
    upstream = Upstream(ok=False, seconds=0.02)
    misses = [await bench.plan("search", ask("y"), member(number)) for number in range(3)]
    running = 0

    async def alone() -> Asked[str]:
        nonlocal running
        running += 1
        assert running == 1, "one after the other"
        answer = await upstream()
        running -= 1
        return answer

    told = await asyncio.gather(*(bench.pinned.settle(miss, alone) for miss in misses if isinstance(miss, Miss)))
    assert [answer.output for answer in told] == ['"answer 1"', '"answer 2"', '"answer 3"']
    assert not any(isinstance(answer, Recorded) for answer in told)
    upstream.ok = True
    again = await bench.plan("search", ask("y"), member(0))
    assert isinstance(again, Miss), "nothing was kept"


async def test_the_next_attempt_after_a_failure_is_the_same_call(bench: Bench) -> None:
    """Clients try again by themselves; that must not shift the answers of the calls that follow."""
    bench.record("reply", ask("x"), "x")
    failing, working = Upstream(ok=False), Upstream()
    for upstream in (failing, working):
        miss = await bench.plan("search", ask("y"))
        assert isinstance(miss, Miss)
        await bench.pinned.settle(miss, upstream)
    plan = await bench.plan("search", ask("y"), member(1))
    assert isinstance(plan, Recorded)
    assert plan.how == "memo", "the second attempt of member 0 was its first call"


async def test_a_cancelled_asker_leaves_the_question_to_the_next(bench: Bench) -> None:
    bench.record("reply", ask("x"), "x")
    upstream = Upstream(hold=True)
    misses = [await bench.plan("search", ask("y"), member(number)) for number in range(3)]
    first, *others = [
        asyncio.ensure_future(bench.pinned.settle(miss, upstream)) for miss in misses if isinstance(miss, Miss)
    ]
    await upstream.begun.wait()
    others[1].cancel()  # one that waits may go as well
    first.cancel()
    upstream.go.set()
    answer = await asyncio.wait_for(others[0], 5)
    assert (answer.output, upstream.asked) == ('"answer 2"', 2)
    for task in (first, others[1]):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_asker_that_fails_leaves_the_question_to_the_next(bench: Bench) -> None:
    bench.record("reply", ask("x"), "x")

    async def fail() -> Asked[str]:
        raise ConnectionError("no upstream")

    misses = [await bench.plan("search", ask("y"), member(number)) for number in range(2)]
    assert isinstance(misses[0], Miss)
    assert isinstance(misses[1], Miss)
    with pytest.raises(ConnectionError):
        await bench.pinned.settle(misses[0], fail)
    assert isinstance(await bench.pinned.settle(misses[1], Upstream()), Asked)


def take_away(store: OnlineStore, tmp_path: Path) -> None:
    store.close()
    for path in tmp_path.glob("online.db*"):
        path.rename(tmp_path / path.name.replace("online", "away"))
    (tmp_path / "online.db").mkdir()


def bring_back(tmp_path: Path) -> None:
    (tmp_path / "online.db").rmdir()
    for path in tmp_path.glob("away.db*"):
        path.rename(tmp_path / path.name.replace("away", "online"))


async def test_without_the_store_no_miss_is_asked(bench: Bench, tmp_path: Path) -> None:
    bench.record("reply", ask("x"), "x")
    upstream = Upstream()
    miss = await bench.plan("search", ask("y"))
    assert isinstance(miss, Miss)
    take_away(bench.store, tmp_path)
    with pytest.raises(StoreUnavailable, match="try again"):
        await bench.pinned.settle(miss, upstream)
    assert upstream.asked == 0
    with pytest.raises(StoreUnavailable, match="try again"):
        await bench.plan("search", ask("y"))
    bring_back(tmp_path)
    again = await bench.plan("search", ask("y"))
    assert isinstance(again, Miss)
    assert again.memo.key == miss.memo.key, "what was refused does not count"


async def test_an_answer_that_cannot_be_kept_is_told_to_nobody(bench: Bench, tmp_path: Path) -> None:
    bench.record("reply", ask("x"), "x")
    upstream = Upstream(hold=True)
    miss = await bench.plan("search", ask("y"))
    assert isinstance(miss, Miss)
    task = asyncio.ensure_future(bench.pinned.settle(miss, upstream))
    await upstream.begun.wait()
    take_away(bench.store, tmp_path)
    upstream.go.set()
    with pytest.raises(StoreUnavailable):
        await task
