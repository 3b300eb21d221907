"""The full context of a sample: its trace's request, and what was said about that trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noria.contracts.call import END2END, Call, Score
from noria.contracts.errors import NotFound
from noria.stores.online import OnlineStore


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample came from.

    request     the whole task's request, opaque
    reference   {score name: {"value": float, "explanation": parsed JSON or text or None}}
    """

    sample_id: int
    trace_id: str
    request: str
    reference: dict[str, object]


def look_up_origins(online: OnlineStore, sample_ids: Sequence[int]) -> list[Origin]:
    """The origin of each sample, in the order given.

    Raises `NotFound` for the first id that the online store no longer holds, or whose trace has no `end2end` row.
    """
    own = {sample_id: _trace_of(online.call(sample_id)) for sample_id in sample_ids}
    calls = online.traces(sorted({trace.trace_id for trace in own.values()}))
    requests = {_trace_of(call): call.input for call in calls if call.process_node == END2END}
    scores = scores_by_trace(online, calls)
    origins: list[Origin] = []
    for sample_id, trace in own.items():
        if trace not in requests:
            raise NotFound(
                f"call {sample_id}: its trace {trace.trace_id} has no {END2END!r} row of tenant {trace.tenant!r}, so "
                "the task's request is unknown; select only calls whose trace has one (the agent posts it to "
                "/v1/episodes)"
            )
        reference = reference_of(scores.get(trace, []))
        origins.append(Origin(sample_id, trace.trace_id, requests[trace], reference))
    return origins


class _Trace(NamedTuple):
    """What one tenant has in a trace: callers choose trace ids, so several tenants may meet in one."""

    tenant: str
    trace_id: str


def _trace_of(call: Call) -> _Trace:
    return _Trace(call.tenant, call.trace_id)


def scores_by_trace(online: OnlineStore, calls: Sequence[Call]) -> dict[_Trace, list[Score]]:
    """What was said about each trace of `calls`, or about one of its calls; in the order of the scores' ids.

    A score of a trace has no tenant. Where several have calls in it, it may be any one's, and counts for none of them.
    """
    of_call = {call.uid: _trace_of(call) for call in calls}
    of_trace: dict[str, set[_Trace]] = {}
    for trace in of_call.values():
        of_trace.setdefault(trace.trace_id, set()).add(trace)
    scores: dict[_Trace, list[Score]] = {}
    for score in online.scores_of_traces(sorted(of_trace)):
        about = of_trace[score.target_id] if score.target_kind == "trace" else {of_call[score.target_id]}
        if len(about) == 1:
            scores.setdefault(next(iter(about)), []).append(score)
    return scores


def reference_of(scores: Sequence[Score]) -> dict[str, object]:
    """What a reward is told about the origin trace: the latest score of each name, its explanation parsed if JSON."""
    return {
        score.name: {"value": score.value, "explanation": _parsed(score.explanation)}
        for score in sorted(scores, key=lambda score: score.id or 0)
    }


def _parsed(explanation: str | None) -> object:
    if explanation is None:
        return None
    try:
        parsed: object = json.loads(explanation)
    except ValueError:
        return explanation
    return parsed
