"""One call, seen twice: by the proxy that passed it on, and by the agent that reports its spans."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from noria.contracts.call import Call
from noria.services.proxy.semconv import SOURCE


def without_doubles(calls: Sequence[Call], trace: Callable[[str, str], Iterable[Call]]) -> list[Call]:
    """The calls without those spans of which the same call is recorded already, by the proxy or by a span within.

    Where an agent's calls go through the proxy and its instrumentation sends them as spans, each would count twice; and
    where two instrumentations see one call, the outer span holds the inner. The same call: same tenant, trace and
    response id, and recorded by the proxy, or within the time of this span. `trace(trace_id, tenant)` gives what
    the store has; it is asked only about traces of calls that came as spans and have a response id.
    """
    known: dict[tuple[str, str], list[Call]] = {}
    kept: list[Call] = []
    for call in calls:
        key = (call.tenant, call.trace_id)
        response_id = call.attributes.get("response_id") if call.attributes.get("source") == SOURCE else None
        if response_id is not None:
            if key not in known:
                known[key] = [one for one in kept if (one.tenant, one.trace_id) == key]
                known[key] += trace(call.trace_id, call.tenant)
            if any(_is_double(call, one, response_id) for one in known[key]):
                continue
        kept.append(call)
        if key in known:
            known[key].append(call)
    return kept


def _is_double(call: Call, other: Call, response_id: Any) -> bool:
    if other.uid == call.uid:
        return False  # the same span once more: the store takes it once
    if other.attributes.get("source") != SOURCE:
        return bool(_response_id(other.output) == response_id)
    within = call.request_time <= other.request_time and other.response_time <= call.response_time
    return bool(within and other.attributes.get("response_id") == response_id)


def _response_id(output: str) -> Any:
    try:
        answer = orjson.loads(output)
    except ValueError:
        return None
    return answer.get("id") if isinstance(answer, dict) else None
