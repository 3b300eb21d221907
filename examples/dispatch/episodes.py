"""Reports each business task, request and response whole, to the proxy: the `end2end` row of its trace."""

import asyncio
import logging
from types import TracebackType
from typing import Self

import aiohttp
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_random_exponential

DRAIN_SECONDS = 5.0
"""How long a closing log waits for reports that are still under way."""

_log = logging.getLogger("dispatch.episodes")


class EpisodeLog:
    """Posts to `/v1/episodes` in the background, so that no user waits for it; use as an async context manager.

    Five tries with growing pauses; then the report is given up with a line in the log, because the agent's own work
    must not depend on whether anybody records it.
    """

    def __init__(self, url: str, app: str, agent_version: str, api_key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._common = {"app": app, "agent_version": agent_version}
        self._pending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=10.0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending:
            _, late = await asyncio.wait(self._pending, timeout=DRAIN_SECONDS)
            if late:
                _log.warning("%d episodes could not be reported before the end", len(late))
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        await self._session.close()

    def post(self, trace_id: str, request: str, response: str, status: str) -> None:
        """Report one task; returns at once."""
        body = {**self._common, "trace_id": trace_id, "request": request, "response": response, "status": status}
        task = asyncio.create_task(self._send(body))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _send(self, body: dict[str, str]) -> None:
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((aiohttp.ClientError, TimeoutError)),
                stop=stop_after_attempt(5),
                wait=wait_random_exponential(multiplier=0.2, max=4.0),
            ):
                with attempt:
                    async with self._session.post(self._url, json=body) as response:
                        if response.status >= 500:
                            response.raise_for_status()
                        elif response.status >= 400:  # no later try would be answered otherwise
                            _log.warning(
                                "episode %s refused: %d %s", body["trace_id"], response.status, await response.text()
                            )
        except RetryError as error:
            why = error.last_attempt.exception()
            _log.warning("episode %s not reported: %s answers %r", body["trace_id"], self._url, why)
