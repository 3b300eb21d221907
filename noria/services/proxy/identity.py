"""Whose call it is: tenant, app, node and trace, from headers, W3C baggage, the URL prefix, or the configuration.

An agent in any framework can say it with what it has: `x-noria-…` headers, `baggage` entries `noria.…`
(https://www.w3.org/TR/baggage/), or a base URL `/apps/{app}/nodes/{node}/v1`. A header counts before baggage, baggage
before the prefix, the prefix before noria.toml. The trace is that of `traceparent`
(https://www.w3.org/TR/trace-context/); a call without one begins a trace of its own.
"""

import hashlib
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from noria.config_services import ProxyConfig
from noria.contracts.call import END2END
from noria.contracts.errors import InvalidRecord
from noria.contracts.rollout import META_BAGGAGE, META_HEADER, Directive
from noria.services.proxy.refusal import Forbidden

DEFAULT_NODE = "default"
"""The node of a caller that names none."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_random = random.Random(os.urandom(32))
_GRANTED = frozenset({"true", "1", "yes"})


@dataclass(frozen=True, slots=True)
class Identity:
    """Where one call belongs.

    `meta` is the rollout directive it carries, unread; `client_traceparent` is what the client sent where that does not
    name the trace.
    """

    tenant: str
    app: str
    node: str
    trace_id: str
    agent_version: str | None = None
    subject: str | None = None
    consent: bool = True
    meta: str | None = None
    client_traceparent: str | None = None
    parent_span_id: str | None = None
    """The client's own span around the call, 16 hex digits."""

    @property
    def target(self) -> str:
        """`"{app}.{node}"`, as the release table names it."""
        return f"{self.app}.{self.node}"

    def in_rollout(self, directive: Directive, traceparent: str | None) -> "Identity":
        """The same caller, in the trace of a rollout; the client's own trace only correlates."""
        own = None if traceparent is None else _clean(traceparent)
        return replace(self, trace_id=directive.trace_id, client_traceparent=own, parent_span_id=None)


def identify(
    headers: Mapping[str, str], prefix: Mapping[str, str], proxy: ProxyConfig, own_tenant: str | None = None
) -> Identity:
    """Read the identity of a call. `prefix` holds `tenant`, `app` and `node` as far as the URL names them.

    `own_tenant` is the tenant of the caller's key, None for a caller who may speak for any. Raises `InvalidRecord` for
    a name that cannot be one, so that a misspelt label is found on the first call, and `Forbidden` for the name of
    another tenant than the caller's own.
    """
    baggage = parse_baggage(headers["baggage"]) if "baggage" in headers else {}

    def said(header: str, key: str) -> str | None:
        value = headers.get(header)
        return value if value is not None else baggage.get(key)

    said_tenants = (headers.get("x-noria-tenant"), baggage.get("noria.tenant"), prefix.get("tenant"))
    tenant = own_tenant or next(filter(None, said_tenants), None) or proxy.tenant
    if own_tenant is not None:
        for name in filter(None, said_tenants):
            if name != own_tenant:
                raise Forbidden(
                    f"this key is of tenant {own_tenant!r}, and the request names tenant {_clean(name)[:128]!r}; leave "
                    "that out of header, baggage and base URL, or use a key of that tenant"
                )
    app = said("x-noria-app", "noria.app") or prefix.get("app") or proxy.app
    node = said("x-noria-node", "noria.node") or prefix.get("node") or DEFAULT_NODE
    _check("tenant", tenant, _TENANT, "x-noria-tenant")
    _check("app", app, _NAME, "x-noria-app")
    _check("node", node, _NAME, "x-noria-node")
    trace_id, parent_span_id, unread = _trace(headers.get("traceparent"))
    version = said("x-noria-agent-version", "noria.agent_version")
    subject = said("x-noria-subject", "noria.subject")
    consent = said("x-noria-consent", "noria.consent")
    return Identity(
        tenant=tenant,
        app=app,
        node=node,
        trace_id=trace_id,
        agent_version=None if version is None else _clean(version),
        subject=None if subject is None else hash_subject(tenant, subject),
        consent=consent is None or consent.strip().lower() in _GRANTED,
        meta=said(META_HEADER, META_BAGGAGE),
        client_traceparent=unread,
        parent_span_id=parent_span_id,
    )


def anonymous(proxy: ProxyConfig, own_tenant: str | None = None) -> Identity:
    """Whose call it is when what the caller says cannot be read: a trace of its own, the defaults of noria.toml."""
    return Identity(own_tenant or proxy.tenant, proxy.app, DEFAULT_NODE, new_trace_id())


def check_model_node(identity: Identity) -> None:
    """Raise `InvalidRecord` for a model call under the node that stands for the whole task."""
    if identity.node == END2END:
        raise InvalidRecord(f"node {END2END!r} holds whole tasks, not model calls; post those to /v1/episodes")


def new_trace_id() -> str:
    """32 hex digits, random as W3C asks; not secret, so that no call waits for the system's entropy."""
    return f"{_random.getrandbits(128) or 1:032x}"


def parse_baggage(header: str) -> dict[str, str]:
    """The entries of a W3C `baggage` header, values percent-decoded, properties left out."""
    entries: dict[str, str] = {}
    for member in header.split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        if equals:
            entries[key.strip()] = unquote(value.strip())
    return entries


def foreign_baggage(header: str) -> str:
    """The `baggage` header without Noria's own entries, which are no business of an upstream."""
    return ",".join(member for member in header.split(",") if not member.strip().startswith("noria."))


def hash_subject(tenant: str, subject: str) -> str:
    """The end user as the store knows them: 32 hex digits of SHA-256, different in each tenant."""
    return hashlib.sha256(f"{tenant}\0{subject}".encode(errors="replace")).hexdigest()[:32]


def is_trace_id(text: str) -> bool:
    """Whether `text` is a W3C trace id: 32 lower-case hex digits, not all zero."""
    return bool(_TRACE_ID.fullmatch(text)) and text.strip("0") != ""


def sampled(trace_id: str, rate: float) -> bool:
    """Whether a trace is recorded, by a hash of its id: a trace is kept whole or not at all, in every process alike."""
    if rate >= 1.0:
        return True
    digest = hashlib.blake2b(trace_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


def attributes_of(identity: Identity) -> dict[str, Any]:
    """What of the identity has no field of its own in a `Call`."""
    said = {"client_traceparent": identity.client_traceparent, "parent_span_id": identity.parent_span_id}
    return {name: value for name, value in said.items() if value is not None}


def _trace(traceparent: str | None) -> tuple[str, str | None, str | None]:
    """The trace id, the client's span if the header names both, and the header as it came if it does not."""
    if traceparent is None:
        return new_trace_id(), None, None
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if (
        match
        and is_trace_id(match[2])
        and match[3].strip("0")
        and match[1] != "ff"
        and (match[1] != "00" or not match[4])
    ):
        return match[2], match[3], None
    return new_trace_id(), None, _clean(traceparent)


def _check(what: str, value: str, rule: re.Pattern[str], header: str) -> None:
    if not rule.fullmatch(value):
        letters = "letters, digits, '_' and '-'" if rule is _NAME else "letters, digits, '.', '_' and '-'"
        raise InvalidRecord(
            f"{what} {_clean(value)!r} may have 1 to 128 {letters}; mend {header}, baggage or the base URL"
        )


def _clean(text: str) -> str:
    """Header text that every store can take: bytes that are not UTF-8, and NUL, become `?`."""
    return text.encode(errors="replace").decode().replace("\0", "?")
