"""Resident memory of a server while it works."""

import asyncio
from dataclasses import dataclass

import psutil

from bench.processes import Server

SAMPLE_SECONDS = 0.1
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident megabytes of a server's own process and of its children together."""

    proxy: float
    writer: float

    def __str__(self) -> str:
        return f"{self.proxy:.0f} + {self.writer:.0f} MB"

    def above(self, other: "Memory") -> float:
        """The larger of the two growths since `other`, in megabytes."""
        return max(self.proxy - other.proxy, self.writer - other.writer)

    def highest(self, other: "Memory") -> "Memory":
        """The larger of each."""
        return Memory(max(self.proxy, other.proxy), max(self.writer, other.writer))


def memory_of(server: Server) -> Memory:
    """What it holds now; 0 for what has ended."""
    return Memory(_resident([server.process]), _resident(server.children()))


def _resident(processes: list[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return total / MB


class Watch:
    """Samples the memory of whatever server is under test, until it is cancelled."""

    def __init__(self) -> None:
        self.peak = Memory(0.0, 0.0)

    async def follow(self, current: "list[Server]") -> None:
        """Sample the last server of a list that grows."""
        while True:
            self.peak = self.peak.highest(memory_of(current[-1]))
            await asyncio.sleep(SAMPLE_SECONDS)
