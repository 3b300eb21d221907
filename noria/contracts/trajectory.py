"""What one rollout of the real agent did, step by step."""

from dataclasses import dataclass, field

from noria.contracts.call import CallTokens


@dataclass(frozen=True, slots=True)
class Step:
    """One model call of a rollout. `sampled` is true where the policy under training answered, false where pinned.

    `observation` is the JSON text of the call's messages, `thought` the reasoning text (may be empty), `action` the
    assistant's content or the JSON of its tool calls, `tool_result` the tool's answer as the next call shows it.
    """

    node: str
    call_uid: str
    observation: str
    thought: str
    action: str
    tool_result: str
    sampled: bool
    pinned: str | None
    """`exact`, `occurrence` or `miss` for a pinned node's call, None for the target's own."""
    policy_version: str | None
    finish_reason: str | None
    tokens: CallTokens | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout: where it belongs, its steps in causal order, and the flags by which a batch leaves it out.

    error           why the rollout failed; such a trajectory never enters a batch
    diverged        it made calls that the origin trace has no counterpart for
    pinned_misses   how many pinned calls had no recording
    truncated       an answer of the policy ended by length
    """

    round: str
    sample_id: int
    group: int
    member: int
    trace_id: str
    origin_trace_id: str
    policy_version: str
    origin_request: str
    origin_response: str
    steps: tuple[Step, ...]
    seed: int
    error: str | None = None
    diverged: bool = False
    pinned_misses: int = 0
    truncated: bool = False
    agent_version: str | None = None
    duration_ms: float = 0.0
    reference: dict[str, object] = field(default_factory=dict[str, object])
    """What later feedback said about the origin trace: {score name: {"value": …, "explanation": …}}."""
