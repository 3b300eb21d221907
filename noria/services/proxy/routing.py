"""Which upstream answers a call: a rollout's directive first, then the release table, then the default upstream."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.config import Config
from noria.contracts.call import Arm
from noria.contracts.errors import ConfigError
from noria.contracts.rollout import Directive
from noria.release.registry import Registry
from noria.services.proxy.identity import Identity
from noria.services.proxy.keys import upstream_key
from noria.stores.online import OnlineStore

_log = logging.getLogger("noria.services.proxy")

TRUNCATING = frozenset({"top_p", "top_k", "min_p"})
"""Request fields that cut the distribution; a rollout's answers are sampled from the whole of it."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that answers model calls: `url` without `/v1`; `key` its API key, None to pass on the caller's."""

    name: str
    url: str
    token_ids: bool
    key: str | None
    is_policy: bool


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes, and what of its body changes on the way.

    model      the model asked for instead, None to leave the caller's
    tokens     whether to ask for token ids and logprobs
    overrides  further fields of the body that are set
    drop       fields that are taken out
    """

    upstream: Upstream
    arm: Arm
    model: str | None = None
    tokens: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    drop: frozenset[str] = frozenset()

    def policy_version(self, asked: str) -> str | None:
        """The version that answers, None where the upstream is not the policy server."""
        return (self.model or asked) if self.upstream.is_policy else None


class ReleaseTable:
    """The live version of every target, as of the last look at the store; kept where the store is away."""

    def __init__(self, store: OnlineStore, poll_seconds: float) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._live: Mapping[str, str] = {}
        self._head: int | None = None
        self._away = False

    def live(self, target: str) -> str | None:
        """The version that serves a target, None if none was ever released."""
        return self._live.get(target)

    async def refresh(self) -> None:
        """Read the table again if a release has changed since."""
        try:
            head, live = await asyncio.to_thread(self._read)
        except Exception as error:  # whatever the store raises, traffic goes on with what was live last
            if not self._away:
                _log.warning("the release table cannot be read, what was live stays: %s", error)
            self._away = True
            return
        self._away = False
        if live is not None:
            self._live = live
            _log.info("releases at event %d: %s", head, ", ".join(map(" -> ".join, live.items())) or "none")
        self._head = head

    async def follow(self) -> None:
        """Refresh every `proxy.release_poll_seconds`, for ever."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            await self.refresh()

    def _read(self) -> tuple[int, Mapping[str, str] | None]:
        head = self._store.release_head()
        if head == self._head:
            return head, None
        # A release between the two reads leaves `head` behind, so the next look reads again.
        return head, {target: release.version for target, release in Registry(self._store).live_releases().items()}


class Router:
    """The upstreams of noria.toml and the rules among them. Raises `ConfigError` for a table that cannot serve."""

    def __init__(self, config: Config, releases: ReleaseTable) -> None:
        proxy = config.proxy
        if not proxy.upstreams:
            raise ConfigError("[proxy.upstreams] is empty; add [proxy.upstreams.policy] with its url")
        upstreams = {}
        for name, upstream in proxy.upstreams.items():
            url = upstream.url.rstrip("/")
            if url.endswith("/v1"):
                raise ConfigError(
                    f"proxy.upstreams.{name}.url is {upstream.url!r}; leave out the /v1, the proxy adds it"
                )
            key = upstream_key(name, upstream)
            upstreams[name] = Upstream(name, url, upstream.token_ids, key, name == proxy.policy_upstream)
        self.default = upstreams[proxy.default_upstream]
        self.policy = upstreams[proxy.policy_upstream]
        self._releases = releases

    def route(self, identity: Identity) -> Route:
        """Where a user's call goes."""
        version = self._releases.live(identity.target)
        if version is not None:
            return Route(self.policy, Arm.LIVE, model=version, tokens=self.policy.token_ids)
        return Route(self.default, Arm.LIVE, tokens=self.default.token_ids)

    def directed(self, directive: Directive, occurrence: int) -> Route:
        """Where the target's `occurrence`-th call (from 0) of a rollout goes."""
        return Route(
            self.policy,
            Arm.ROLLOUT,
            model=directive.model,
            tokens=True,
            overrides={"temperature": directive.temperature, "seed": directive.seed + occurrence},
            drop=TRUNCATING,
        )

    def unrecorded(self) -> Route:
        """Where a pinned node's call goes that has no recording, under `proxy.miss_policy = "live"`."""
        return Route(self.default, Arm.ROLLOUT, tokens=self.default.token_ids, overrides={"temperature": 0})
