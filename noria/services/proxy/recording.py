"""Pinned nodes: what the origin trace recorded answers again, so that a rollout varies in the target node alone."""

import asyncio
import hashlib
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from noria.contracts.call import Call, CallStatus
from noria.contracts.errors import ConfigError, NotFound
from noria.services.proxy.capture import Wants, strip, to_text
from noria.services.proxy.refusal import StoreUnavailable
from noria.services.proxy.spool import Spool
from noria.services.proxy.sse import unfold
from noria.stores.online import OnlineStore

EXACT = "exact"
OCCURRENCE = "occurrence"
MISS = "miss"

_ORIGINS = 512
_ROLLOUTS = 8192


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer of the origin trace."""

    uid: str
    output: str
    policy_version: str | None


class OriginTrace:
    """The answers of one recorded trace, by node and by what was asked."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._by_node: dict[str, list[Recorded]] = defaultdict(list)
        self._by_input: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
        for call in calls:
            if call.status is not CallStatus.OK:
                continue
            recorded = Recorded(call.uid, call.output, call.policy_version)
            self._by_node[call.process_node].append(recorded)
            key = input_key(_parse(call.input))
            self._by_input[call.process_node, key].append(recorded)

    def find(self, node: str, key: str, nth_same: int, nth: int) -> tuple[str, Recorded | None]:
        """The answer to a node's call: to the same input first, else to its `nth` call (from 0); else a miss.

        Where the same input was asked several times, the `nth_same` answer counts, or the last.
        """
        same = self._by_input.get((node, key))
        if same:
            return EXACT, same[min(nth_same, len(same) - 1)]
        calls = self._by_node.get(node, [])
        return (OCCURRENCE, calls[nth]) if nth < len(calls) else (MISS, None)


class Recordings:
    """Origin traces as the store holds them, the most recently used in memory, and where each rollout stands."""

    def __init__(self, store: OnlineStore, spool: Spool, flush_timeout: float) -> None:
        self._store = store
        self._spool = spool
        self._flush_timeout = flush_timeout
        self._origins: OrderedDict[str, OriginTrace] = OrderedDict()
        self._rollouts: OrderedDict[str, Counter[str]] = OrderedDict()

    async def origin(self, trace_id: str) -> OriginTrace:
        """The recording of a trace.

        Raises `NotFound` if neither the store nor the spool has a call of it, `StoreUnavailable` if nobody can say.
        """
        known = self._origins.get(trace_id)
        if known is not None:
            self._origins.move_to_end(trace_id)
            return known
        calls = await self._read(trace_id) or await self.fresh(trace_id)  # it may have been recorded a moment ago
        if not calls:
            raise NotFound(
                f"no recording of origin trace {trace_id}; was it sampled, and is this the store it went to?"
            )
        origin = self._origins[trace_id] = OriginTrace(calls)
        while len(self._origins) > _ORIGINS:
            self._origins.popitem(last=False)
        return origin

    async def fresh(self, trace_id: str) -> list[Call]:
        """The calls of a trace, all that the proxy has answered until now. Raises `StoreUnavailable`."""
        try:
            await asyncio.wait_for(self._spool.flushed(), self._flush_timeout)
        except TimeoutError as error:
            seconds = self._flush_timeout
            raise StoreUnavailable(f"the spool is not in the store after {seconds:g} s; try again") from error
        return await self._read(trace_id)

    async def _read(self, trace_id: str) -> list[Call]:
        try:
            return await asyncio.to_thread(self._store.trace, trace_id)
        except (SQLAlchemyError, ConfigError, OSError) as error:
            raise StoreUnavailable(f"trace {trace_id} cannot be read from the online store: {error}") from error

    def count(self, rollout: str, key: str) -> int:
        """How many calls of this kind the rollout has made before, and one more from now on."""
        counter = self._rollouts.setdefault(rollout, Counter())
        self._rollouts.move_to_end(rollout)
        while len(self._rollouts) > _ROLLOUTS:
            self._rollouts.popitem(last=False)
        counter[key] += 1
        return counter[key] - 1


def input_key(body: Mapping[str, Any]) -> str:
    """Equal for two requests that ask the same: messages and tools, whatever the key order, model and sampling."""
    asked = {"messages": body.get("messages"), "tools": body.get("tools") or None}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def replay(recorded: Recorded, body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Iterator[bytes] | None]:
    """A recorded answer in the shape that `body` asks for: its JSON text, the same parsed, and its events if streamed.

    Token fields that the recording holds are taken out unless this caller asks for them too.
    """
    completion = _parse(recorded.output)
    text = recorded.output
    if strip(completion, Wants.of(body)):
        text = to_text(completion)
    if not body.get("stream"):
        return text, completion, None
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return text, completion, unfold(completion, include_usage=include_usage)


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
