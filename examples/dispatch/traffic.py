"""The users of the example and the business system behind them.

Sends the traffic queries to the agent, in shuffled passes, at the rate of `[traffic]` in noria.toml (a Poisson
process), and reports a while later, as a business system would, whether the right function was called.

    python -m examples.dispatch.traffic [--count N] [--rate R] [--url URL]
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from tqdm import tqdm

from examples.dispatch.data import DataMissing, Query, traffic
from noria.config import Config, load
from noria.contracts.errors import AgentUnavailable, ConfigError

FEEDBACK = "right_function"
SCORER = "dispatch-desk"
FEEDBACK_KEY_ENV = "DISPATCH_FEEDBACK_KEY"
"""Environment variable with an API key of scope `feedback`, for a proxy that asks for one."""

_log = logging.getLogger("dispatch.traffic")
_NETWORK = (aiohttp.ClientError, TimeoutError)


@dataclass(slots=True)
class TrafficSummary:
    """What came of the requests: `right` had the right tool, `errors` no answer, `unreported` lost their feedback."""

    sent: int = 0
    right: int = 0
    errors: int = 0
    unreported: int = 0

    @property
    def accuracy(self) -> float:
        """Share of the answered requests that went to the right tool; 0 if none was answered."""
        answered = self.sent - self.errors
        return self.right / answered if answered else 0.0


async def run(
    config: Config,
    count: int | None = None,
    rate: float | None = None,
    *,
    url: str | None = None,
    stop: asyncio.Event | None = None,
    patience_seconds: float | None = None,
) -> TrafficSummary:
    """Send `count` requests (None: until `stop` is set) and report on each; returns when all reports are made.

    rate              requests per second; None takes `traffic.rate`
    url               the agent's address; None takes `agent.url`
    stop              ends the run early: nothing more is sent, feedback still due is reported at once
    patience_seconds  how long to wait for the agent to come up; None waits for ever, else `AgentUnavailable`

    At most `traffic.concurrency` requests are in flight; time lost to a slow agent is not made up for in a burst. A
    failed request is counted and logged, and the next one follows.
    """
    run_of = _Run(config, url or config.agent.url, stop or asyncio.Event())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=config.agent.timeout_seconds)) as session:
        await run_of.wait_for_agent(session, patience_seconds)
        await run_of.send(session, count, rate or config.traffic.rate)
    return run_of.summary


def order(queries: Sequence[Query], seed: int) -> Iterator[Query]:
    """Endless passes over the queries, each pass shuffled anew; the same seed gives the same order."""
    rng = random.Random(f"dispatch traffic {seed}")
    while True:
        yield from rng.sample(queries, len(queries))


class _Run:
    def __init__(self, config: Config, agent_url: str, stop: asyncio.Event) -> None:
        self.summary = TrafficSummary()
        self._seed = config.seed
        self._concurrency = config.traffic.concurrency
        self._delay = config.traffic.feedback_delay_seconds
        self._agent = agent_url.rstrip("/")
        self._feedback_url = f"{config.proxy.url}/v1/feedback"
        key = os.environ.get(FEEDBACK_KEY_ENV)
        self._feedback_headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._stop = stop

    async def wait_for_agent(self, session: aiohttp.ClientSession, patience: float | None) -> None:
        began = time.monotonic()
        told = False
        while not self._stop.is_set():
            try:
                async with session.get(f"{self._agent}/healthz") as response:
                    if response.status == 200:
                        break
                    why = f"HTTP {response.status}"
            except _NETWORK as error:
                why = str(error) or type(error).__name__
            if patience is not None and time.monotonic() - began > patience:
                raise AgentUnavailable(
                    f"the agent at {self._agent} is not up after {patience:g} s ({why}); start it or correct agent.url"
                )
            if not told:
                _log.info("waiting for the agent at %s (%s)", self._agent, why)
                told = True
            await self._pause(0.3)

    async def send(self, session: aiohttp.ClientSession, count: int | None, rate: float) -> None:
        gaps = random.Random(f"dispatch gaps {self._seed}")
        slots = asyncio.Semaphore(self._concurrency)
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        with tqdm(total=count, desc="requests", disable=count is None or not sys.stderr.isatty()) as bar:
            for number, query in enumerate(order(traffic(), self._seed)):
                if number == count:
                    break
                await self._pause(due - time.monotonic())
                if not await self._take(slots):
                    break
                task = asyncio.create_task(self._one(session, query, slots, bar))
                running.add(task)
                task.add_done_callback(running.discard)
                due = max(due, time.monotonic() - 1 / rate) + gaps.expovariate(rate)
            if running:
                await asyncio.wait(running)

    async def _one(self, session: aiohttp.ClientSession, query: Query, slots: asyncio.Semaphore, bar: tqdm) -> None:
        self.summary.sent += 1
        try:
            answer = await self._ask(session, query)
        finally:
            slots.release()
            bar.update()
        if answer is None:
            return
        trace_id, tool = answer
        right = tool == query.tool
        self.summary.right += right
        await self._pause(self._delay)
        await self._report(session, trace_id, query.tool, right)

    async def _ask(self, session: aiohttp.ClientSession, query: Query) -> tuple[str, str | None] | None:
        """The trace id and the tool that was called; None, counted and told, if the agent gave no proper answer."""
        try:
            async with session.post(f"{self._agent}/dispatch", json={"query": query.text}) as response:
                text = await response.text()
                if response.status == 200:
                    body = await response.json()
                    return body["trace_id"], body["tool"]
                why = f"HTTP {response.status}: {text[:200]}"
        except _NETWORK as error:
            why = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError):
            why = f"not an answer of the agent: {text[:200]}"
        self.summary.errors += 1
        _log.warning("request %d failed: %s", self.summary.sent, why)
        return None

    async def _report(self, session: aiohttp.ClientSession, trace_id: str, expected: str, right: bool) -> None:
        body = {
            "trace_id": trace_id,
            "name": FEEDBACK,
            "value": 1.0 if right else 0.0,
            "source": "business",
            "scorer": SCORER,
            "explanation": {"expected": expected},
        }
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_NETWORK),
                stop=stop_after_attempt(5),
                wait=wait_random_exponential(multiplier=0.2, max=4.0),
            ):
                with attempt:
                    async with session.post(self._feedback_url, json=body, headers=self._feedback_headers) as response:
                        response.raise_for_status()
        except RetryError as error:
            self.summary.unreported += 1
            _log.warning("feedback on trace %s not reported: %r", trace_id, error.last_attempt.exception())

    async def _take(self, slots: asyncio.Semaphore) -> bool:
        """Wait for a free slot; False if the run is to stop instead."""
        taking = asyncio.ensure_future(slots.acquire())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            taking.cancel()
            return False
        return True

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the run is to stop."""
        if seconds <= 0:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)


async def _main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = load()
    traffic()  # a missing package is told before anything is waited for
    rate = arguments.rate or config.traffic.rate
    _log.info("traffic ready: %g requests per second to %s", rate, arguments.url or config.agent.url)
    summary = await run(config, arguments.count, rate, url=arguments.url, stop=stop)
    _log.info(
        "sent %d, right %d (%.1f %% of those answered), errors %d, feedback lost %d",
        summary.sent,
        summary.right,
        100 * summary.accuracy,
        summary.errors,
        summary.unreported,
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.dispatch.traffic", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--count", type=int, help="stop after this many requests (default: never)")
    parser.add_argument("--rate", type=_positive, help="requests per second (default: traffic.rate)")
    parser.add_argument("--url", help="address of the agent (default: agent.url)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_main(arguments))
    except (ConfigError, DataMissing) as error:
        sys.stderr.write(f"noria traffic: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
