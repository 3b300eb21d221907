"""Whether this process can do its work: its store has the schema that it was written for."""

import asyncio
import logging

from noria.services.proxy.access import Access
from noria.services.proxy.refusal import NotReady
from noria.stores.online import OnlineStore
from noria.stores.online_errors import is_away

POLL_SECONDS = 1.0

_log = logging.getLogger("noria.services.proxy")


class Readiness:
    """Looks at the store's schema until it fits, and goes on looking.

    A store that is away is no reason to stand still: calls are answered, and their records wait in the spool. A schema
    that does not fit stops a process that was never ready; one that was goes on answering and recording into the spool,
    and says at `/readyz` that it wants no more traffic.
    """

    def __init__(self, store: OnlineStore, access: Access) -> None:
        self._store = store
        self._access = access
        self._problem: str | None = "the online store has not been looked at yet"
        self._was_ready = False

    @property
    def problem(self) -> str | None:
        """Why the process is not ready, None if it is."""
        if self._problem is None and not self._access.ready:
            return "it is not known yet which API keys there are: the online store cannot be read"
        return self._problem

    def require(self) -> None:
        """Return if calls can be answered. Raises `NotReady`."""
        if not self._was_ready:
            raise NotReady(f"this proxy is not ready: {self._problem}")

    async def refresh(self) -> None:
        """Look once."""
        try:
            problem = await asyncio.to_thread(self._store.schema_problem)
        except Exception as error:
            if not is_away(error):
                _log.exception("the online store's schema cannot be read")
            problem = None
        if problem != self._problem:
            _log.log(logging.INFO if problem is None else logging.ERROR, "ready: %s", problem or "yes")
        self._problem = problem
        self._was_ready |= problem is None

    async def follow(self) -> None:
        """Look every second, for ever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.refresh()
