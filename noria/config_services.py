"""The sections of noria.toml that configure services and stores."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """A table of noria.toml. Unknown keys fail; values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class UpstreamConfig(Section):
    """A server that answers model calls in the OpenAI wire format."""

    url: str
    """Base URL without `/v1`."""
    token_ids: bool = False
    """Whether it understands `return_token_ids` (the policy server, vLLM)."""
    api_key_env: str | None = None
    """Environment variable that holds its API key, which never stands in a file; None passes on the caller's own."""
    key_header: Literal["authorization", "x-api-key", "api-key"] = "authorization"
    """Where the API key goes: a bearer token (OpenAI, vLLM), `x-api-key` (Anthropic), `api-key` (Azure)."""
    models: tuple[str, ...] = ()
    """Patterns (`gpt-*`, `claude-*`) of the models that this upstream answers where no release does; the first upstream
    of the file that matches counts, then `proxy.default_upstream`."""
    retries: int = Field(0, ge=0, le=10)
    """How often a call is tried again here while no byte of an answer has gone out."""
    fallbacks: tuple[str, ...] = ()
    """Upstreams that are tried in this order after the last retry, while no byte of an answer has gone out."""
    shared_paths: tuple[str, ...] = (
        "/v1/models*", "/v1/audio/*", "/v1/images/*", "/v1/moderations", "/v1/rerank", "/v1/score", "/v1/tokenize",
        "/v1/detokenize",
    )  # fmt: skip
    """Unrecorded paths that callers of every tenant may use under `api_key_env`. What an upstream keeps (files,
    batches, stored answers) belongs to that one key, so all other paths are for `proxy.tenant` alone."""


class ProxyConfig(Section):
    """The proxy that the agent's base URL points at."""

    host: str = "127.0.0.1"
    port: int = Field(8700, ge=1, le=65535)
    tenant: str = "default"
    app: str = "default"
    sampling_rate: float = Field(1.0, ge=0.0, le=1.0)
    """Share of traces that is recorded, decided by a hash of the trace id: a trace is kept whole or not at all."""
    upstreams: dict[str, UpstreamConfig] = Field(default_factory=dict[str, UpstreamConfig])
    default_upstream: str = "policy"
    policy_upstream: str = "policy"
    """The upstream that serves released and trained versions."""
    timeout_seconds: float = Field(120.0, gt=0)
    release_poll_seconds: float = Field(0.25, gt=0)
    store_flush_seconds: float = Field(0.25, gt=0)
    """How long records gather before they are brought into the store, unless a reader waits for them."""
    spool_fsync: Literal["always", "interval", "never"] = "interval"
    spool_max_bytes: int = Field(2_000_000_000, gt=0)
    writer: Literal["process", "thread"] = "process"
    """Where records are assembled and written to the store: a process of its own, off the calls' core, or a thread."""
    capture_memory_bytes: int = Field(256_000_000, gt=0)
    """Answers in flight that are held in memory for their records, all calls together; beyond it they go to disk."""
    max_body_bytes: int = Field(32_000_000, gt=0)
    max_header_bytes: int = Field(65_536, gt=0)
    max_concurrent_calls: int = Field(1024, ge=1)
    """Calls in flight, all callers together; a further one is refused with 429."""
    max_concurrent_calls_per_key: int = Field(256, ge=1)
    calls_per_minute_per_key: int | None = Field(None, ge=1)
    miss_policy: Literal["fail", "live"] = "live"
    """What answers a pinned node that has no recording: an error, or the live upstream at temperature 0."""

    @property
    def url(self) -> str:
        """Where the proxy listens, without `/v1`."""
        return f"http://{self.host}:{self.port}"


class StoreConfig(Section):
    """The online store."""

    url: str | None = None
    """SQLAlchemy URL; by default SQLite in the home folder. PostgreSQL: `postgresql+psycopg://…`."""
    inline_max_bytes: int = Field(65_536, ge=1024)
    """Strings of a request or response above this (images, audio) go to the artifact store by content hash."""


class RetentionConfig(Section):
    """How long the online store keeps calls; `noria db prune` and the schedule `retention` apply it."""

    max_age_days: float | None = Field(None, gt=0)
    """None keeps everything."""
    tenants: dict[str, float] = Field(default_factory=dict[str, float])
    """Days for single tenants, in place of `max_age_days`."""
    batch_rows: int = Field(1000, ge=1)
    """Calls deleted in one transaction."""


class TelemetryConfig(Section):
    """OpenTelemetry spans of recorded calls, sent by OTLP over HTTP."""

    otlp_endpoint: str | None = None
    """`http://collector:4318/v1/traces`, the path may be left out; None sends nothing."""
    service_name: str = "noria-proxy"
    capture_content: bool = False
    """Whether messages go into the spans; token counts and names always do."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ValueError(f"{endpoint!r} is no http:// or https:// URL; OTLP over HTTP listens at port 4318")
        return endpoint if url.path.strip("/") else f"{url.scheme}://{url.netloc}/v1/traces"


class PolicyConfig(Section):
    """The policy server: several versions of the model behind one OpenAI-compatible endpoint."""

    host: str = "127.0.0.1"
    port: int = Field(8701, ge=1, le=65535)
    max_versions: int = Field(4, ge=1)
    max_batch: int = Field(16, ge=1)
    batch_wait_ms: float = Field(4.0, ge=0)
    max_new_tokens: int = Field(64, ge=1)
    """Cap and default of `max_tokens`."""
    deterministic: bool = False
    """Answer every request alone, so that nothing but request, seed and weights decides the answer."""
    threads: int | None = None
    device: str = "cpu"

    @property
    def url(self) -> str:
        """Where the policy server listens, without `/v1`."""
        return f"http://{self.host}:{self.port}"


class JudgeConfig(Section):
    """The judge: scores versions on suites."""

    host: str = "127.0.0.1"
    port: int = Field(8702, ge=1, le=65535)
    concurrency: int = Field(16, ge=1)
    timeout_seconds: float = Field(600.0, gt=0)

    @property
    def url(self) -> str:
        """Where the judge listens."""
        return f"http://{self.host}:{self.port}"


class UiConfig(Section):
    """The Dagster UI."""

    host: str = "127.0.0.1"
    port: int = Field(3000, ge=1, le=65535)

    @property
    def url(self) -> str:
        """What to open in a browser."""
        return f"http://{self.host}:{self.port}"
