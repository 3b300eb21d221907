"""Pinned nodes: what answers each call of a rollout, so that its group varies in the target node alone.

The target node's calls go to the version under test. Every other call is answered from the recording of the origin
trace: with the answer to the same input, else with that of the same occurrence of its node. What has neither is a miss.
`proxy.miss_policy` either refuses it or has it asked live, once, and the answer is kept for the whole group.

The calls of one rollout are counted in this process, so they have to come to one proxy; those of a group need not.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy.exc import SQLAlchemyError

from noria.config import Config
from noria.contracts.errors import ConfigError
from noria.contracts.rollout import Directive
from noria.rollout.assemble import MISS
from noria.rollout.directive import target_of
from noria.services.proxy.exchange import Kind
from noria.services.proxy.identity import Identity
from noria.services.proxy.occurrences import Occurrences
from noria.services.proxy.recording import Recordings, input_key
from noria.services.proxy.refusal import PinnedMiss, StoreUnavailable
from noria.services.proxy.routing import GENERATING, Route, Router
from noria.services.proxy.spool import Spool
from noria.stores.online import OnlineStore
from noria.stores.pinned_answers import PinnedAnswer, PinnedAnswers

EXACT = "exact"
"""Answered with what the origin trace has for the same input."""

OCCURRENCE = "occurrence"
"""Answered with what the same occurrence of the node was answered in the origin trace, to another input."""

MEMO = "memo"
"""A miss, answered with what another rollout of the group was told."""

_Response = TypeVar("_Response")
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Target:
    """The call is the target node's own and goes to the version under test."""

    route: Route


@dataclass(frozen=True, slots=True)
class Recorded:
    """The call is answered by what another call, `uid`, was answered. `how` is `EXACT`, `OCCURRENCE` or `MEMO`."""

    output: str
    policy_version: str | None
    uid: str
    how: str

    @property
    def attributes(self) -> dict[str, Any]:
        """What the record says. For the trajectory, a miss is one no matter who of the group was first to have it."""
        return {"pinned": MISS if self.how == MEMO else self.how, "recorded_uid": self.uid}


@dataclass(frozen=True, slots=True)
class Memo:
    """Where the answer to a miss is kept.

    key        the same for every rollout of the group that comes to ask this
    give_back  says that the call was not answered, so that the client's next attempt counts in its place
    """

    key: str
    give_back: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Miss:
    """The call has no recording and is asked live, by `Pinned.settle`."""

    route: Route
    memo: Memo

    @property
    def attributes(self) -> dict[str, Any]:
        """What the record says."""
        return {"pinned": MISS}


@dataclass(frozen=True, slots=True)
class Asked(Generic[_Response]):
    """What a live upstream answered to the call `uid`.

    ok        whether it is an answer that the group can be told
    output    its JSON text, as the record has it
    response  whatever the asker needs to answer its own caller
    """

    ok: bool
    output: str
    policy_version: str | None
    uid: str
    response: _Response


class Pinned:
    """Decides what answers the calls of rollouts, and keeps what misses were answered."""

    def __init__(self, config: Config, store: OnlineStore, spool: Spool, router: Router) -> None:
        self._may_ask = config.proxy.miss_policy == "live"
        self._recordings = Recordings(store, spool)
        self._answers = PinnedAnswers(store)
        self._router = router
        self._occurrences = Occurrences()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def plan(
        self, identity: Identity, directive: Directive, kind: Kind, body: Mapping[str, Any]
    ) -> Target | Recorded | Miss:
        """What answers this call of a rollout.

        Raises `DirectiveRefused` for a directive without a target, `NotFound` for an origin trace that the tenant does
        not have, `PinnedMiss` for a miss where none may be asked live, and `StoreUnavailable`.
        """
        node, rollout, trace_id = identity.node, directive.trace_id, directive.invariant
        is_target = node == target_of(directive).node
        origin = await self._recordings.origin(trace_id, identity.tenant)
        of_node = (node, kind)
        if is_target and kind in GENERATING:
            return Target(self._router.directed(directive, self._occurrences.take(rollout, of_node)))
        key = input_key(kind, body)
        of_input = (node, kind, key)
        nth, nth_same = self._occurrences.take(rollout, of_node), self._occurrences.take(rollout, of_input)

        def give_back() -> None:
            self._occurrences.give_back(rollout, of_node, nth)
            self._occurrences.give_back(rollout, of_input, nth_same)

        try:
            found = origin.same_input(node, kind, key, nth_same)
            if found is None:
                origin = await self._recordings.origin_again(trace_id, identity.tenant)
                found = origin.same_input(node, kind, key, nth_same)
            if found is not None:
                return _recorded(found, EXACT)
            # What the target embeds follows from what it said: the vector of another text would hide the difference.
            found = None if is_target else origin.occurrence(node, kind, nth)
            if found is not None:
                return _recorded(found, OCCURRENCE)
            if not self._may_ask:
                raise PinnedMiss(
                    f"node {node!r} made its call {nth} ({kind}) with an input that origin trace {trace_id} has no "
                    "recording for; proxy.miss_policy = 'live' would ask the upstream of its model"
                )
            memo = Memo(_memo_key(identity, directive, kind, key, nth_same), give_back)
            kept = await self._in_store(self._answers.get, memo.key)
        except BaseException:
            give_back()
            raise
        model = body.get("model")
        route = self._router.unrecorded(model if isinstance(model, str) else "", kind)
        return Miss(route, memo) if kept is None else _recorded(kept, MEMO)

    async def settle(self, miss: Miss, ask: Callable[[], Awaitable[Asked[_Response]]]) -> Recorded | Asked[_Response]:
        """Have a miss asked, once for its group, and answer with what the group is told.

        While one of the group asks, the others in this process wait. They are answered by its answer; if it has none,
        or is cancelled, the next of them asks. Where proxies ask at the same time, the answer that the store has first
        counts for all. An answer that is not ok goes to its asker alone. Raises what `ask` raises, and
        `StoreUnavailable`: without the store the group would not be told the same.
        """
        memo = miss.memo
        try:
            async with self._turns.setdefault(memo.key, asyncio.Lock()):
                kept = await self._in_store(self._answers.get, memo.key)
                if kept is not None:
                    return _recorded(kept, MEMO)
                asked = await ask()
                if not asked.ok:
                    memo.give_back()
                    return asked
                own = PinnedAnswer(asked.uid, asked.output, asked.policy_version)
                kept = await self._in_store(lambda key: self._answers.keep(key, own), memo.key)
        except BaseException:
            memo.give_back()
            raise
        return asked if kept.uid == own.uid else _recorded(kept, MEMO)

    async def _in_store(self, do: Callable[[str], _Read], key: str) -> _Read:
        try:
            return await asyncio.to_thread(do, key)
        except (SQLAlchemyError, ConfigError, OSError) as error:
            # The error's own text may name the server, its user, or the answer.
            raise StoreUnavailable(
                f"the online store, which holds what the group of this rollout was told, does not answer "
                f"({type(error).__name__}); try again"
            ) from error


def _recorded(answer: PinnedAnswer, how: str) -> Recorded:
    return Recorded(answer.output, answer.policy_version, answer.uid, how)


def _memo_key(identity: Identity, directive: Directive, kind: Kind, key: str, nth_same: int) -> str:
    group = (directive.round, directive.sample_id, directive.group, directive.invariant)
    parts = [identity.tenant, *group, identity.node, kind.value, key, nth_same]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
