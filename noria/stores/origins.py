"""The full context of a sample: its trace's request, and what was said about that trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

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
    trace_ids = {sample_id: online.call(sample_id).trace_id for sample_id in sample_ids}
    distinct = sorted(set(trace_ids.values()))
    calls = online.traces(distinct)
    requests = {call.trace_id: call.input for call in calls if call.process_node == END2END}
    scores = scores_by_trace(online, calls)
    origins: list[Origin] = []
    for sample_id, trace_id in trace_ids.items():
        if trace_id not in requests:
            raise NotFound(
                f"call {sample_id}: its trace {trace_id} has no {END2END!r} row, so the task's request is unknown; "
                "select only calls whose trace has one (the agent posts it to /v1/episodes)"
            )
        origins.append(Origin(sample_id, trace_id, requests[trace_id], reference_of(scores.get(trace_id, []))))
    return origins


def scores_by_trace(online: OnlineStore, calls: Sequence[Call]) -> dict[str, list[Score]]:
    """What was said about each trace of `calls`, or about one of its calls; in the order of the scores' ids."""
    trace_of = {call.uid: call.trace_id for call in calls} | {call.trace_id: call.trace_id for call in calls}
    scores: dict[str, list[Score]] = {}
    for score in online.scores_of_traces(sorted({call.trace_id for call in calls})):
        scores.setdefault(trace_of[score.target_id], []).append(score)
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
