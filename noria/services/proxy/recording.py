"""Origin traces: what each node was asked and answered, by input and by occurrence, for rollouts to be told again.

An origin trace stays in memory while rollouts use it. Records come to the store late and in any order, so where the
memory has no answer to the very same input, the store is looked at again.
"""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy.exc import SQLAlchemyError

from noria.contracts.call import END2END, Call, CallStatus
from noria.contracts.errors import ConfigError, NotFound
from noria.services.proxy.exchange import Kind
from noria.services.proxy.refusal import StoreUnavailable
from noria.services.proxy.spool import Spool
from noria.services.proxy.wire.json_text import parse
from noria.stores.online import OnlineStore
from noria.stores.pinned_answers import PinnedAnswer

FLUSH_SECONDS = 15.0
"""How long a reader waits for what the proxy has answered until now to be in the store."""

REREAD_SECONDS = 2.0
"""How soon the same origin trace is read again for calls that arrived late, and how long that may wait for the spool.
"""

HELD_CHARACTERS = 64_000_000
"""How much of the answers of origin traces stays in memory, and at least the trace that was used last."""

_ORIGINS = 512

_ASKED: Mapping[str, tuple[str, ...]] = {
    Kind.CHAT: ("messages", "tools", "functions", "response_format"),
    Kind.COMPLETION: ("prompt", "suffix"),
    Kind.RESPONSE: ("input", "instructions", "prompt", "previous_response_id", "conversation", "tools", "text"),
    Kind.EMBEDDING: ("input", "model", "dimensions"),
    Kind.MESSAGE: ("system", "messages", "tools"),
}
"""The fields of a request that say what is asked, by API. An embedding of another model is another vector space."""


class OriginTrace:
    """The answers of one recorded trace, by node, API and what was asked."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._by_node: dict[tuple[str, str], list[PinnedAnswer]] = defaultdict(list)
        self._by_input: dict[tuple[str, str, str], list[PinnedAnswer]] = defaultdict(list)
        self.characters = 0
        """The size of the answers, which are nearly all of what is held."""
        # Ids follow the ends of calls, and occurrences are counted by their beginnings.
        for call in sorted(calls, key=lambda call: (call.request_time, call.id or 0)):
            if call.status is not CallStatus.OK or call.process_node == END2END:
                continue
            kind = call.attributes.get("endpoint", Kind.CHAT.value)  # the first proxies recorded chat calls alone
            if kind not in _ASKED:
                continue
            answer = PinnedAnswer(call.uid, call.output, call.policy_version)
            self.characters += len(answer.output)
            self._by_node[call.process_node, kind].append(answer)
            asked = _parse(call.input)
            if asked is not None:
                self._by_input[call.process_node, kind, input_key(Kind(kind), asked)].append(answer)

    def same_input(self, node: str, kind: Kind, key: str, nth: int) -> PinnedAnswer | None:
        """The answer to the same input; where it was given several times, the `nth` (from 0), or the last."""
        same = self._by_input.get((node, kind, key))
        return same[min(nth, len(same) - 1)] if same else None

    def occurrence(self, node: str, kind: Kind, nth: int) -> PinnedAnswer | None:
        """The answer to the node's `nth` call (from 0) of this API."""
        calls = self._by_node.get((node, kind), [])
        return calls[nth] if nth < len(calls) else None


@dataclass(slots=True)
class _Held:
    """An origin trace in memory; `looked` is when the store was last asked for more of it (monotonic)."""

    trace: OriginTrace
    looked: float


class Recordings:
    """Traces as the store holds them, and the origin traces that were used last in memory."""

    def __init__(
        self,
        store: OnlineStore,
        spool: Spool,
        flush_timeout: float = FLUSH_SECONDS,
        reread_seconds: float = REREAD_SECONDS,
        held_characters: int = HELD_CHARACTERS,
    ) -> None:
        self._store = store
        self._spool = spool
        self._flush_timeout = flush_timeout
        self._reread_seconds = reread_seconds
        self._held_characters = held_characters
        self._origins: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        self._characters = 0
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def origin(self, trace_id: str, tenant: str) -> OriginTrace:
        """The recording of a tenant's trace.

        Raises `NotFound` if neither the store nor the spool has a call of it, `StoreUnavailable` if nobody can say.
        """
        key = (tenant, trace_id)
        async with self._turns.setdefault(key, asyncio.Lock()):
            held = self._origins.get(key)
            if held is not None:
                self._origins.move_to_end(key)
                return held.trace
            looked = float("-inf")
            calls = await self._read(trace_id, tenant)
            if not calls:  # it may have been recorded a moment ago
                looked = time.monotonic()
                calls = await self.fresh(trace_id, tenant)
            if not calls:
                raise NotFound(
                    f"no recording of origin trace {trace_id} of tenant {tenant!r}; was it sampled, and is this the "
                    "store it went to?"
                )
            return await self._hold(key, calls, looked)

    async def origin_again(self, trace_id: str, tenant: str) -> OriginTrace:
        """As `origin`, with what was recorded since; as it was if that was looked for just now or cannot be read."""
        trace = await self.origin(trace_id, tenant)
        key = (tenant, trace_id)
        async with self._turns.setdefault(key, asyncio.Lock()):
            held = self._origins.get(key)
            if held is not None and time.monotonic() < held.looked + self._reread_seconds:
                return held.trace
            looked = time.monotonic()
            try:
                calls = await self._fresh(trace_id, tenant, min(self._flush_timeout, self._reread_seconds))
            except StoreUnavailable:
                if held is not None:
                    held.looked = looked
                return trace
            return await self._hold(key, calls, looked) if calls else trace

    async def fresh(self, trace_id: str, tenant: str | None = None) -> list[Call]:
        """The calls of a trace in id order, all that the proxy has answered until now; of any tenant if it is None.

        Raises `StoreUnavailable`.
        """
        return await self._fresh(trace_id, tenant, self._flush_timeout)

    async def _fresh(self, trace_id: str, tenant: str | None, timeout: float) -> list[Call]:
        try:
            await asyncio.wait_for(self._spool.flushed(), timeout)
        except TimeoutError as error:
            raise StoreUnavailable(f"the spool is not in the store after {timeout:g} s; try again") from error
        return await self._read(trace_id, tenant)

    async def _read(self, trace_id: str, tenant: str | None) -> list[Call]:
        try:
            return await asyncio.to_thread(self._store.trace, trace_id, tenant=tenant)
        except (SQLAlchemyError, ConfigError, OSError) as error:
            # The error's own text may name the server, its user, or what is in the rows.
            raise StoreUnavailable(
                f"trace {trace_id} cannot be read from the online store ({type(error).__name__}); try again"
            ) from error

    async def _hold(self, key: tuple[str, str], calls: Sequence[Call], looked: float) -> OriginTrace:
        trace = await asyncio.to_thread(OriginTrace, calls)
        before = self._origins.pop(key, None)
        self._characters += trace.characters - (0 if before is None else before.trace.characters)
        self._origins[key] = _Held(trace, looked)
        while len(self._origins) > _ORIGINS or (self._characters > self._held_characters and len(self._origins) > 1):
            self._characters -= self._origins.popitem(last=False)[1].trace.characters
        return trace


def input_key(kind: Kind, body: Mapping[str, Any]) -> str:
    """Equal for two requests that ask the same: 64 hex digits, whatever the key order, model and sampling.

    A member that is null counts as one that is not there, and so does an empty list of tools.
    """
    asked = {name: value for name in _ASKED[kind] if (value := _without_null(body.get(name))) not in (None, [], {}, "")}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_null(member) for name, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = parse(text.encode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
