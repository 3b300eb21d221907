"""What the judge is asked, and what it answers."""

from pydantic import BaseModel, ConfigDict, Field

from noria.contracts.report import PairedScore

NODE_MODE = "node"
"""Each item's request goes straight to the policy server; no agent runs."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluationRequest(_Message):
    """Body of the judge's `POST /evaluations`: two versions of one target on one suite."""

    target: str
    candidate: str
    """Version name: a round key or `base`."""
    baseline: str
    suite: str
    """Path of the frozen suite, relative to the artifact root."""
    mode: str = NODE_MODE
    seed: int = Field(0, ge=0)
    temperature: float = Field(0.0, ge=0)
    """0 answers greedily."""
    max_tokens: int | None = Field(None, ge=1)
    """None leaves it to the item's own request, then to the policy server."""


class EvaluationResult(_Message):
    """The judge's answer: both versions' scores, item by item, in the suite's order."""

    target: str
    candidate: str
    baseline: str
    suite: str
    suite_sha256: str
    scorer: str
    scorer_version: str
    seed: int
    temperature: float
    pairs: tuple[PairedScore, ...]
    seconds: float
    cached: tuple[str, ...] = ()
    """Versions whose scores were known already from an earlier evaluation."""
