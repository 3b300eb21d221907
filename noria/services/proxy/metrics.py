"""What the proxy tells Prometheus at `/metrics`."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from noria.contracts.call import CallStatus

MAX_NODES = 256
"""Nodes come from callers; further ones count as `other`, so that a wild label cannot fill the memory."""

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class SpoolState(Protocol):
    """What is read off the spool at each scrape."""

    unrecorded: int
    rejected: int

    @property
    def depth_bytes(self) -> int:
        """Bytes that are not in the store yet."""

    @property
    def depth_records(self) -> int:
        """Records that are not in the store yet."""


class Metrics:
    """Counters and histograms of one proxy, in a registry of their own."""

    def __init__(self, spool: SpoolState) -> None:
        self._registry = CollectorRegistry()
        self._nodes: set[str] = set()
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
        self._registry.register(_SpoolCollector(spool))

    def call(self, status: CallStatus, node: str) -> None:
        """Count one call that ended."""
        if node not in self._nodes:
            if len(self._nodes) >= MAX_NODES:
                node = "other"
            else:
                self._nodes.add(node)
        self._calls.labels(status.value, node).inc()

    def pinned(self, kind: str) -> None:
        """Count one call of a pinned node: `exact`, `occurrence` or `miss`."""
        self._pinned.labels(kind).inc()

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self._registry)


class _SpoolCollector(Collector):
    def __init__(self, spool: SpoolState) -> None:
        self._spool = spool

    def collect(self) -> Iterator[Metric]:
        spool = self._spool
        yield GaugeMetricFamily(
            "noria_spool_bytes", "Bytes in the spool that are not in the store yet", spool.depth_bytes
        )
        yield GaugeMetricFamily(
            "noria_spool_records", "Records in the spool that are not in the store yet", spool.depth_records
        )
        yield CounterMetricFamily(
            "noria_unrecorded", "Records dropped because the spool was full or could not be written", spool.unrecorded
        )
        yield CounterMetricFamily(
            "noria_rejected", "Records that the store refused, put aside in rejected.jsonl", spool.rejected
        )
