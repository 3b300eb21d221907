"""Which upstream answers a call: a rollout's directive first, then the release table, then the model's name.

A call without a directive goes to what serves its target: the canary for its share of the traces, else the live
version. A target without a release is answered by the first upstream of noria.toml whose `models` match the name that
the caller asked for, else by `proxy.default_upstream`.
"""

import fnmatch
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from noria.config import Config
from noria.contracts.call import Arm
from noria.contracts.rollout import Directive
from noria.services.proxy.exchange import Kind
from noria.services.proxy.identity import Identity
from noria.services.proxy.serving_table import ReleaseTable
from noria.services.proxy.upstreams import Upstream, open_upstreams

TRUNCATING = frozenset({"top_p", "top_k", "min_p"})
"""Request fields that cut the distribution; a rollout's answers are sampled from the whole of it."""

GENERATING = frozenset(Kind) - {Kind.EMBEDDING}
"""What a released version answers: it is a language model, and a vector of it would mean nothing to an index."""

_STREAMING = frozenset({"stream", "stream_options"})


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes, and what of its body changes on the way.

    model      the model asked for instead, None to leave the caller's
    tokens     whether to ask for token ids and logprobs
    overrides  further fields of the body that are set
    drop       fields that are taken out
    fallbacks  upstreams that are asked next where this one does not answer
    pass_key   whether the caller's own key goes on to an upstream that has none configured
    """

    upstream: Upstream
    arm: Arm
    model: str | None = None
    tokens: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    drop: frozenset[str] = frozenset()
    fallbacks: tuple[Upstream, ...] = ()
    pass_key: bool = True

    @property
    def retries(self) -> int:
        """How often the call is tried again at this upstream."""
        return self.upstream.retries

    def policy_version(self, asked: str) -> str | None:
        """The version that answers, None where the upstream is not the policy server."""
        return (self.model or asked) if self.upstream.is_policy else None

    def legs(self) -> tuple["Route", ...]:
        """This route and then one for each fallback.

        A fallback is asked for the model that the caller named: a released version is a name that only the policy
        server knows. What it answers is no answer of the canary, so it counts as live, without a version. The caller's
        key was meant for the first upstream, and another one may belong to somebody else: it does not go there.
        """
        if not self.fallbacks:
            return (self,)
        arm = Arm.LIVE if self.arm is Arm.CANARY else self.arm
        own = replace(self, fallbacks=())
        others = (
            replace(
                own,
                upstream=upstream,
                arm=arm,
                model=None,
                tokens=upstream.token_ids and arm is not Arm.ROLLOUT,
                pass_key=False,
            )
            for upstream in self.fallbacks
        )
        return (own, *others)


class Router:
    """The upstreams of noria.toml and the rules among them. Raises `ConfigError` for a table that cannot serve."""

    def __init__(self, config: Config, releases: ReleaseTable) -> None:
        proxy = config.proxy
        self._upstreams = upstreams = open_upstreams(proxy)
        self.default = upstreams[proxy.default_upstream]
        self.policy = upstreams[proxy.policy_upstream]
        self._fallbacks = {
            name: tuple(upstreams[other] for other in upstream.fallbacks) for name, upstream in proxy.upstreams.items()
        }
        self._patterns = [
            (re.compile(fnmatch.translate(pattern)), upstreams[name])
            for name, upstream in proxy.upstreams.items()
            for pattern in upstream.models
        ]
        self._releases = releases

    def route(self, identity: Identity, model: str, kind: Kind | None) -> Route:
        """Where a user's call goes. `kind` is None for a path that is not recorded; no release answers those."""
        if kind in GENERATING:
            serving = self._releases.serving(identity.target)
            if serving.canary is not None and in_canary(identity.tenant, identity.trace_id, serving.weight):
                return self._released(serving.canary, Arm.CANARY)
            if serving.live is not None:
                return self._released(serving.live, Arm.LIVE)
        upstream = self.by_model(model)
        return Route(upstream, Arm.LIVE, tokens=upstream.token_ids, fallbacks=self._fallbacks[upstream.name])

    def by_model(self, model: str) -> Upstream:
        """The first upstream with a pattern that matches a model's name, case and all; else the default."""
        for pattern, upstream in self._patterns:
            if pattern.match(model):
                return upstream
        return self.default

    def directed(self, directive: Directive, occurrence: int) -> Route:
        """Where the target's `occurrence`-th call (from 0) of a rollout goes; no other model may stand in for it."""
        return Route(
            self.policy,
            Arm.ROLLOUT,
            model=directive.model,
            tokens=True,
            overrides={"temperature": directive.temperature, "seed": directive.seed + occurrence},
            drop=TRUNCATING,
        )

    def unrecorded(self, model: str, kind: Kind) -> Route:
        """Where a pinned node's call goes that has no recording, under `proxy.miss_policy = "live"`.

        Asked unstreamed, since the whole group is answered from it, and at temperature 0 where the API has one.
        """
        upstream = self.by_model(model)
        return Route(
            upstream,
            Arm.ROLLOUT,
            overrides={} if kind is Kind.EMBEDDING else {"temperature": 0},
            drop=_STREAMING,
            fallbacks=self._fallbacks[upstream.name],
        )

    def _released(self, version: str, arm: Arm) -> Route:
        policy = self.policy
        return Route(policy, arm, model=version, tokens=policy.token_ids, fallbacks=self._fallbacks[policy.name])


def in_canary(tenant: str, trace_id: str, weight: float) -> bool:
    """Whether a trace belongs to a canary's share of the traffic.

    A hash decides, in every process alike, so that a trace keeps its side from its first call to its last; and one that
    is in at a weight is in at every higher weight.
    """
    text = f"{tenant}\0{trace_id}".encode(errors="replace")
    # A name of its own: which traces are sampled is a hash too, and must say nothing about this one.
    digest = hashlib.blake2b(text, digest_size=8, person=b"noria canary").digest()
    return int.from_bytes(digest, "big") < weight * 2**64
