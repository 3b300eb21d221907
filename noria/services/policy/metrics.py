"""What the policy server counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class PolicyMetrics:
    """The counters of one server, in a registry of its own; observes the engine (`engine.Observer`)."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "noria_policy_requests", "Chat requests by HTTP status; 499: the client left", ["status"], registry=registry
        )
        self.seconds = Histogram(
            "noria_policy_request_seconds", "Seconds from a chat request to the end of its answer", registry=registry
        )
        self.prompt_tokens = Counter("noria_policy_prompt_tokens", "Tokens of prompts", registry=registry)
        self._completion = Counter("noria_policy_completion_tokens", "Tokens sampled", registry=registry)
        self._batch = Histogram(
            "noria_policy_batch_size",
            "Rows of a batch at its begin",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        self._busy = Counter(
            "noria_policy_busy_seconds", "Seconds in which the model was computing and sampling", registry=registry
        )
        self.versions = Gauge("noria_policy_versions_loaded", "Versions in memory", registry=registry)
        self.waiting = Gauge("noria_policy_waiting_rows", "Answers that wait for a batch", registry=registry)

    def batch(self, rows: int) -> None:
        """A batch of so many rows begins."""
        self._batch.observe(rows)

    def busy(self, seconds: float) -> None:
        """The model was computing for so long."""
        self._busy.inc(seconds)

    def tokens(self, completion: int) -> None:
        """So many tokens were sampled."""
        self._completion.inc(completion)

    def expose(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
