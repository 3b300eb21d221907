"""Ask an upstream again, and then its fallbacks, for as long as no byte of an answer has gone out to the caller.

What is asked again, and where, is configured: `retries` and `fallbacks` of an upstream. Without either, a call is sent
once. The one exception is a kept connection that the upstream closed just as the call took it up: such a call was never
read, and it is sent once more on another connection.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import aiohttp
import tenacity

from noria.services.proxy.routing import Route

_log = logging.getLogger("noria.services.proxy")

RETRIED = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses that say something about the moment and not about the call; 529 is Anthropic's `overloaded_error`."""

_DROPPED = (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next attempt: exponential from `first_seconds`, with as much again at random.

    An upstream that asks for a longer wait (`Retry-After`) gets it, up to `longest_told_seconds`. One that asks for
    more is not asked again by this call: the next fallback is, or the caller is told.
    """

    first_seconds: float = 0.25
    longest_seconds: float = 4.0
    longest_told_seconds: float = 10.0


@dataclass(slots=True)
class Sending:
    """One sending of a call; what the sender learns about its connection."""

    reused: bool = True
    """Whether the connection had been kept from an earlier call. False where `Connector` made it."""


SENDING: ContextVar[Sending | None] = ContextVar("SENDING", default=None)
"""The sending that runs in this task."""


_A = TypeVar("_A", bound=aiohttp.ClientResponse)
Send = Callable[[Route, Sending], Awaitable[_A]]
"""Sends a call to a route's upstream and returns the head of the answer."""


@dataclass(frozen=True, slots=True)
class Answered(Generic[_A]):
    """The answer to pass on, and the route it came by: that of the upstream that gave it, which may be a fallback."""

    answer: _A
    route: Route
    attempts: int = 1

    def attributes(self, first: Route) -> dict[str, Any]:
        """What the record says beside `arm` and `policy_version`: nothing where the first attempt was answered.

        `attempts` counts all upstreams together; `fallback` names the upstream that answered in place of the first;
        `assigned_arm` is the arm that the call was drawn into, where a fallback outside it answered.
        """
        said: dict[str, Any] = {}
        if self.attempts > 1:
            said["attempts"] = self.attempts
        if self.route.upstream.name != first.upstream.name:
            said["fallback"] = self.route.upstream.name
        if self.route.arm is not first.arm:
            said["assigned_arm"] = first.arm.value
        return said


async def answered(route: Route, send: Send[_A], backoff: Backoff | None = None) -> Answered[_A]:
    """The first answer that is worth passing on: of the route's upstream, retries included, then of each fallback.

    Where there is none, the last upstream's answer is passed on whatever its status. Raises `Unanswered` where that
    one gave no answer. Cancelling ends a wait at once.
    """
    attempts = 0

    async def once(leg: Route) -> _A:
        nonlocal attempts
        attempts += 1
        sending = Sending()
        SENDING.set(sending)
        try:
            return await send(leg, sending)
        except _DROPPED:
            if not sending.reused:
                raise
        attempts += 1
        return await send(leg, Sending())

    legs = route.legs()
    for left, leg in zip(range(len(legs) - 1, -1, -1), legs, strict=True):
        try:
            answer = await (_retrying(leg, backoff or Backoff())(once, leg) if leg.retries else once(leg))
        except (aiohttp.ClientError, OSError) as error:
            if left and is_passing(error):
                _log.warning("upstream %r: %s; its fallback is asked", leg.upstream.name, type(error).__name__)
                continue
            raise Unanswered(leg, attempts, error) from error
        if left and is_momentary(answer):
            _log.warning("upstream %r: status %d; its fallback is asked", leg.upstream.name, answer.status)
            answer.release()
            continue
        return Answered(answer, leg, attempts)
    raise AssertionError("a route has at least one leg")


class Unanswered(Exception):
    """No upstream answered; `error` is what the last of them, on `route`, failed with."""

    def __init__(self, route: Route, attempts: int, error: aiohttp.ClientError | OSError) -> None:
        super().__init__(f"upstream {route.upstream.name!r}: {type(error).__name__}")
        self.route = route
        self.attempts = attempts
        self.error = error


def is_passing(error: BaseException) -> bool:
    """Whether another attempt may fare better than one that ended with this error."""
    return isinstance(error, (aiohttp.ClientError, OSError)) and not isinstance(error, aiohttp.InvalidURL)


def is_momentary(answer: aiohttp.ClientResponse) -> bool:
    """Whether another attempt may be answered better; an upstream's own `x-should-retry: false` counts."""
    return answer.status in RETRIED and answer.headers.get("x-should-retry") != "false"


def told_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds that an upstream asks to wait, None where it does not say.

    Read from `Retry-After` (RFC 9110, section 10.2.3: seconds, or a date) or OpenAI's `retry-after-ms`.
    """
    for name, scale in (("retry-after-ms", 0.001), ("Retry-After", 1.0)):
        said = headers.get(name)
        if said is None:
            continue
        try:
            seconds = float(said) * scale
        except ValueError:
            try:
                at = parsedate_to_datetime(said)
            except ValueError:
                continue
            seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None


class Connector(aiohttp.TCPConnector):
    """Notes in `SENDING` that a connection was made for the call that is being sent.

    A trace of aiohttp would say so too, and costs each call 5 % of its time. `_create_connection` is not public: a test
    fails where a later aiohttp no longer calls it.
    """

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        sending = SENDING.get()
        if sending is not None:
            sending.reused = False
        return await super()._create_connection(req, traces, timeout)


def _retrying(leg: Route, backoff: Backoff) -> tenacity.AsyncRetrying:
    def told(state: tenacity.RetryCallState) -> float | None:
        if state.outcome is None or state.outcome.failed:
            return None
        return told_wait(state.outcome.result().headers)

    exponential = tenacity.wait_exponential(multiplier=backoff.first_seconds, max=backoff.longest_seconds)
    jittered = exponential + tenacity.wait_random(0, backoff.first_seconds)

    def wait(state: tenacity.RetryCallState) -> float:
        return max(told(state) or 0.0, jittered(state))

    def stop(state: tenacity.RetryCallState) -> bool:
        return state.attempt_number > leg.retries or (told(state) or 0.0) > backoff.longest_told_seconds

    def drop(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        if state.outcome.failed:
            why = type(state.outcome.exception()).__name__
        else:
            answer = state.outcome.result()
            answer.release()
            why = f"status {answer.status}"
        _log.info("upstream %r: %s; asked again in %.2f s", leg.upstream.name, why, state.upcoming_sleep)

    def last(state: tenacity.RetryCallState) -> Any:
        assert state.outcome is not None
        return state.outcome.result()

    return tenacity.AsyncRetrying(
        stop=stop,
        wait=wait,
        retry=tenacity.retry_any(tenacity.retry_if_exception(is_passing), tenacity.retry_if_result(is_momentary)),
        before_sleep=drop,
        retry_error_callback=last,
    )
