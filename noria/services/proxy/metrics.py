"""What the proxy tells Prometheus at `/metrics`."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from noria.contracts.call import CallStatus
from noria.services.proxy.captured import CaptureMemory
from noria.services.proxy.limits import Limits
from noria.services.proxy.spool import Spool

MAX_NODES = 256
"""Nodes come from callers; further ones count as `other`, so that a wild label cannot fill the memory."""

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters and histograms of one proxy, in a registry of their own."""

    def __init__(self, spool: Spool, memory: CaptureMemory, limits: Limits) -> None:
        self._registry = CollectorRegistry()
        self._nodes: set[str] = set()
        self._children: dict[tuple[CallStatus, str], Counter] = {}
        self._refusals = Counter(
            "noria_refused_requests", "Requests refused before any upstream saw them", ["code"], registry=self._registry
        )
        self._calls = Counter("noria_calls", "Model calls", ["status", "node"], registry=self._registry)
        self._pinned = Counter(
            "noria_pinned",
            "Calls of rollouts answered from a recording, or not found there",
            ["kind"],
            registry=self._registry,
        )
        self.added_latency = Histogram(
            "noria_added_latency_seconds",
            "Time the proxy adds before the request leaves and before the answer (or its first chunk) is passed on",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_byte = Histogram(
            "noria_time_to_first_byte_seconds",
            "Time from the caller's request to the upstream's first byte",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._state = _StateCollector(spool, memory, limits)
        self._registry.register(self._state)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Export a counter that another part keeps, read at each scrape."""
        self._state.watched.append((name, text, read))

    def call(self, status: CallStatus, node: str) -> None:
        """Count one call that ended."""
        child = self._children.get((status, node))
        if child is None:
            child = self._child(status, node)
        child.inc()

    def refused(self, code: str) -> None:
        """Count one request that was refused."""
        self._refusals.labels(code).inc()

    def pinned(self, kind: str) -> None:
        """Count one call of a pinned node: `exact`, `occurrence` or `miss`."""
        self._pinned.labels(kind).inc()

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self._registry)

    def _child(self, status: CallStatus, node: str) -> Counter:
        if node not in self._nodes:
            if len(self._nodes) >= MAX_NODES:
                return self._calls.labels(status.value, "other")
            self._nodes.add(node)
        child = self._children[status, node] = self._calls.labels(status.value, node)
        return child


class _StateCollector(Collector):
    """What is read at each scrape."""

    def __init__(self, spool: Spool, memory: CaptureMemory, limits: Limits) -> None:
        self._spool = spool
        self._memory = memory
        self._limits = limits
        self.watched: list[tuple[str, str, Callable[[], float]]] = []

    def collect(self) -> Iterator[Metric]:
        spool, memory = self._spool, self._memory
        for name, text, gauge in (
            ("noria_calls_in_flight", "Calls that have not ended", self._limits.in_flight),
            ("noria_capture_bytes", "Bytes of answers in flight held in memory for their records", memory.used),
            ("noria_capture_limit_bytes", "proxy.capture_memory_bytes", memory.limit),
            ("noria_spool_bytes", "Bytes in the spool that are not in the store yet", spool.depth_bytes),
            ("noria_spool_limit_bytes", "proxy.spool_max_bytes", spool.max_bytes),
            ("noria_spool_records", "Records in the spool that are not in the store yet", spool.depth_records),
        ):
            yield GaugeMetricFamily(name, text, gauge)
        for name, text, count in (
            ("noria_capture_spilled", "Answers in flight that went to disk for their records", memory.spilled),
            (
                "noria_unrecorded",
                "Records dropped because the spool was full or could not be written",
                spool.unrecorded,
            ),
            ("noria_rejected", "Records that could not be stored, put aside in rejected.jsonl", spool.rejected),
            ("noria_spans_dropped", "Spans that no collector took", spool.spans_dropped),
        ):
            yield CounterMetricFamily(name, text, count)
        for name, text, read in self.watched:
            yield CounterMetricFamily(name, text, read())
        recorded = CounterMetricFamily("noria_recorded", "Calls in the store, by how they ended", labels=["status"])
        for status, number in spool.recorded.items():
            recorded.add_metric([status], number)
        yield recorded
