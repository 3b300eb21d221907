"""From the proxy's records of one rollout to its trajectory."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from noria.contracts.call import END2END, Call, CallStatus, CallTokens
from noria.contracts.errors import InvalidRecord
from noria.contracts.round import Round
from noria.contracts.trajectory import Step, Trajectory
from noria.rollout.chat import (
    action_of,
    content_of,
    finish_reason_of,
    first_message,
    messages_of,
    parse_object,
    thought_of,
)
from noria.rollout.plan import RolloutPlan
from noria.rollout.prefix_tree import causal_order

MISS = "miss"
"""`attributes.pinned` of a call that the origin trace has no recording for."""

_COLD_START = "base"


def assemble(
    plan: RolloutPlan,
    calls: Sequence[Call],
    *,
    trace_id: str,
    policy_version: str,
    origin_response: str = "",
    duration_ms: float = 0.0,
    error: str | None = None,
) -> Trajectory:
    """The trajectory of one rollout, its steps in causal order.

    `calls` are the proxy's records of `trace_id`. `error` is what went wrong before (the agent's answer); without it
    the records themselves are judged: a call that is not ok, a target node that was never called, sampled tokens that
    are missing, or an answer of another version than `policy_version` make the trajectory one with an error.
    """
    target_node = Round.parse(plan.round).target.node
    ordered = [call for call in causal_order(calls) if call.process_node != END2END]
    steps = _steps(ordered, target_node)
    misses = sum(step.pinned == MISS for step in steps)
    return Trajectory(
        round=plan.round,
        sample_id=plan.sample_id,
        group=plan.group,
        member=plan.member,
        trace_id=trace_id,
        origin_trace_id=plan.origin_trace_id,
        policy_version=policy_version,
        origin_request=plan.origin_request,
        origin_response=origin_response,
        steps=steps,
        seed=plan.seed,
        error=error or _first_error(ordered, target_node, policy_version),
        diverged=misses > 0,
        pinned_misses=misses,
        truncated=any(step.sampled and step.finish_reason == "length" for step in steps),
        agent_version=next((call.agent_version for call in ordered if call.agent_version), None),
        duration_ms=duration_ms,
        reference=dict(plan.reference),
    )


def same_weights(version: str | None, other: str | None) -> bool:
    """Whether two version names mean the same weights: `base` and round 0 of any target are the cold start."""
    return version == other or (_is_cold_start(version) and _is_cold_start(other))


def policy_failure(calls: Sequence[Call], target_node: str) -> str | None:
    """What failed if an upstream did not answer a call of the target node; None if it answered all of them."""
    for call in causal_order(calls):
        own = call.process_node == target_node and "pinned" not in call.attributes
        if own and call.status is CallStatus.UPSTREAM_ERROR:
            return _not_ok(call)
    return None


def _is_cold_start(version: str | None) -> bool:
    if version is None or version == _COLD_START:
        return version == _COLD_START
    try:
        return Round.parse(version).number == 0
    except InvalidRecord:
        return False


def _steps(calls: Sequence[Call], target_node: str) -> tuple[Step, ...]:
    requests = [messages_of(parse_object(call.input)) for call in calls]
    steps = []
    for index, call in enumerate(calls):
        response = parse_object(call.output)
        message = first_message(response)
        pinned = call.attributes.get("pinned")
        ok = call.status is CallStatus.OK
        tokens = call.tokens if call.tokens is not None and _is_finite(call.tokens) else None
        steps.append(
            Step(
                node=call.process_node,
                call_uid=call.uid,
                observation=json.dumps(requests[index], ensure_ascii=False),
                thought=thought_of(message),
                action=action_of(message),
                tool_result=_tool_result(message, requests[index], requests[index + 1 :]),
                sampled=ok and call.process_node == target_node and tokens is not None,
                pinned=pinned if isinstance(pinned, str) else None,
                policy_version=call.policy_version,
                finish_reason=call.finish_reasons[0] if call.finish_reasons else finish_reason_of(response),
                tokens=tokens,
            )
        )
    return tuple(steps)


def _tool_result(
    message: Mapping[str, Any],
    request: Sequence[Mapping[str, Any]],
    later: Sequence[Sequence[Mapping[str, Any]]],
) -> str:
    """The tool's answer as a later call shows it; empty where none does.

    Answers to the message's own tool call ids count wherever they stand. An agent that asks for tools in plain text has
    no such ids: then it is what the next call's messages end with, if that was not there before.
    """
    calls = message.get("tool_calls")
    ids = {call.get("id") for call in calls if isinstance(call, dict)} - {None} if isinstance(calls, list) else set()
    for messages in later:
        answers = [content_of(m) for m in messages if m.get("role") == "tool" and m.get("tool_call_id") in ids]
        if answers:
            return "\n".join(answers)
    if ids or not later or not later[0]:
        return ""
    last = later[0][-1]
    return content_of(last) if last.get("role") in ("tool", "user") and last not in request else ""


def _is_finite(tokens: CallTokens) -> bool:
    """JSON has no NaN, and a trajectory is written as JSON."""
    return all(map(math.isfinite, tokens.logprobs))


def _first_error(calls: Sequence[Call], target_node: str, policy_version: str) -> str | None:
    for call in calls:
        if call.status is not CallStatus.OK:
            return _not_ok(call)
    # What the target embeds is pinned, and nothing of it is trained on.
    own = [call for call in calls if call.process_node == target_node and "pinned" not in call.attributes]
    if not own:
        nodes = ", ".join(sorted({call.process_node for call in calls})) or "none at all"
        return (
            f"the agent never called its node {target_node!r} under this rollout's trace (nodes called: {nodes}); it "
            "must forward trainMeta on each model call and name the node"
        )
    for call in own:
        if call.tokens is not None and not _is_finite(call.tokens):
            return f"a call of node {target_node!r} has a logprob that is not finite"
        if call.tokens is None or not call.tokens.completion_token_ids:
            return f"a call of node {target_node!r} has no token ids; the policy upstream needs token_ids=true"
        if not same_weights(call.policy_version, policy_version):
            return (
                f"a call of node {target_node!r} was answered by version {call.policy_version!r}, "
                f"not by {policy_version!r} as the rollout asked"
            )
    return None


def _not_ok(call: Call) -> str:
    kind = f" ({call.error_type})" if call.error_type else ""
    body = f": {shorten(call.output)}" if call.output else ""
    return f"a call of node {call.process_node!r} ended with status {call.status}{kind}{body}"


def shorten(text: str, limit: int = 200) -> str:
    """`text` on one line, cut to `limit` characters, for an error message."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + "…"
