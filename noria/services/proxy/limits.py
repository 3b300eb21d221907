"""How much the proxy takes: calls at once, of all callers and of one key, and calls of one key in a minute.

Every limit holds for one process. Several proxies behind one balancer each count for themselves, so that none waits for
another, or for the store, on the way of a call.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType

from noria.config_services import ProxyConfig
from noria.services.proxy.access import Caller
from noria.services.proxy.refusal import TooMany

WINDOW_SECONDS = 60.0

BUSY_RETRY_SECONDS = 1
"""What `Retry-After` says where calls in flight must end first: nobody knows when, and a model call takes seconds."""

_IDLE_KEYS = 1024


class Limits:
    """Counts the calls in flight and, where `proxy.calls_per_minute_per_key` is set, those of the last minute.

    The minute is a moving one: never more calls of a key than the limit in any 60 seconds, kept as one monotonic time
    per call. A caller without a key counts among all, and has no limit of its own.
    """

    def __init__(self, proxy: ProxyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = proxy.max_concurrent_calls
        self._per_key = proxy.max_concurrent_calls_per_key
        self._per_minute = proxy.calls_per_minute_per_key
        self._clock = clock
        self._in_flight = 0
        self._in_flight_of: Counter[str] = Counter()
        self._recent: dict[str, deque[float]] = {}

    @property
    def in_flight(self) -> int:
        """Admitted calls that have not ended."""
        return self._in_flight

    def admit(self, caller: Caller) -> "Admission":
        """A context manager around one call. Entering it raises `TooMany` if the call is over a limit."""
        return Admission(self, caller.key_id)

    def enter(self, key_id: str | None) -> None:
        """Count a call in. Raises `TooMany`, and counts nothing, if it is over a limit."""
        if self._in_flight >= self._all:
            raise TooMany(
                f"{self._in_flight} calls are in flight, and proxy.max_concurrent_calls is {self._all}; try again "
                "later, raise it, or run another proxy",
                retry_after=BUSY_RETRY_SECONDS,
            )
        if key_id is not None:
            if self._in_flight_of[key_id] >= self._per_key:
                raise TooMany(
                    f"key {key_id} has {self._in_flight_of[key_id]} calls in flight, and "
                    f"proxy.max_concurrent_calls_per_key is {self._per_key}; wait for one of them to end",
                    retry_after=BUSY_RETRY_SECONDS,
                )
            if self._per_minute is not None:
                self._count_minute(key_id, self._per_minute)
            self._in_flight_of[key_id] += 1
        self._in_flight += 1

    def leave(self, key_id: str | None) -> None:
        """Count a call out."""
        self._in_flight -= 1
        if key_id is not None:
            self._in_flight_of[key_id] -= 1
            if not self._in_flight_of[key_id]:
                del self._in_flight_of[key_id]

    def _count_minute(self, key_id: str, limit: int) -> None:
        now = self._clock()
        recent = self._recent.get(key_id)
        if recent is None:
            if len(self._recent) >= _IDLE_KEYS:
                self._forget_idle(now)
            recent = self._recent[key_id] = deque()
        while recent and now - recent[0] >= WINDOW_SECONDS:
            recent.popleft()
        if len(recent) >= limit:
            raise TooMany(
                f"key {key_id} has made {len(recent)} calls in the last minute, and proxy.calls_per_minute_per_key is "
                f"{limit}; the next one is taken after Retry-After",
                retry_after=WINDOW_SECONDS - (now - recent[0]),
            )
        recent.append(now)

    def _forget_idle(self, now: float) -> None:
        for key_id in [key_id for key_id, times in self._recent.items() if now - times[-1] >= WINDOW_SECONDS]:
            del self._recent[key_id]


class Admission:
    """One call between its entry and its end."""

    __slots__ = ("_key_id", "_limits")

    def __init__(self, limits: Limits, key_id: str | None) -> None:
        self._limits = limits
        self._key_id = key_id

    def __enter__(self) -> None:
        self._limits.enter(self._key_id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._limits.leave(self._key_id)
