"""What serves each target at this moment, followed in the online store; kept where the store is away."""

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from noria.release.registry import Registry
from noria.stores.online import OnlineStore

_log = logging.getLogger("noria.services.proxy")


class Serving(NamedTuple):
    """The versions that serve one target: `weight` is the canary's share of its traces, 0 to 1."""

    live: str | None = None
    canary: str | None = None
    weight: float = 0.0

    def __str__(self) -> str:
        live = self.live or "by model"
        return live if self.canary is None else f"{live}, {self.canary} at {self.weight:g}"


_NOTHING = Serving()


class ReleaseTable:
    """The live version and the canary of every target, as of the last look at the store."""

    def __init__(self, store: OnlineStore, poll_seconds: float) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._serving: Mapping[str, Serving] = {}
        self._head: int | None = None
        self._away = False

    def serving(self, target: str) -> Serving:
        """What serves a target; nothing if it was never released."""
        return self._serving.get(target, _NOTHING)

    async def refresh(self) -> None:
        """Read the table again if a release has changed since."""
        try:
            head, serving = await asyncio.to_thread(self._read)
        except Exception as error:  # whatever the store raises, traffic goes on with what served last
            if not self._away:
                _log.warning("the release table cannot be read, what served last stays: %s", error)
            self._away = True
            return
        if self._away:
            _log.info("the release table can be read again")
        self._away = False
        if serving is not None:
            self._serving = serving
            said = "; ".join(f"{target} -> {versions}" for target, versions in serving.items())
            _log.info("releases at event %d: %s", head, said or "none")
        self._head = head

    async def follow(self) -> None:
        """Refresh every `proxy.release_poll_seconds`, for ever."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self.refresh()

    def _read(self) -> tuple[int, Mapping[str, Serving] | None]:
        head = self._store.release_head()
        if head == self._head:
            return head, None
        # A release between the two reads leaves `head` behind, so the next look reads again.
        found = {}
        for target, (live, canary) in Registry(self._store).serving().items():
            found[target] = Serving(
                None if live is None else live.version,
                None if canary is None else canary.version,
                0.0 if canary is None else canary.weight,
            )
        return head, found
