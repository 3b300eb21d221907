"""Whose a span is: what it says itself, then its resource, then the request that it came with, then its service."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.contracts.access import TENANT as TENANT_NAME
from noria.contracts.errors import InvalidRecord
from noria.services.proxy import semconv
from noria.services.proxy.identity import DEFAULT_NODE, hash_subject
from noria.services.proxy.otlp_request import Span
from noria.services.proxy.wire.json_text import plain


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent the spans, and what the request says of all of them.

    tenant        whose they are; a span that names another is refused, unless `any_tenant`
    app, node     from headers or the URL; None where the request says nothing
    default_app   where neither span nor resource nor request name one
    """

    tenant: str
    default_app: str
    app: str | None = None
    node: str | None = None
    any_tenant: bool = False


def tenant_of(span: Span, sender: Sender) -> str:
    """The tenant of the request. Raises `InvalidRecord` for a span that names another, where the sender may not."""
    said = semconv.TENANT.read(_both(span))
    if said is None or said == sender.tenant:
        return sender.tenant
    if not sender.any_tenant or not TENANT_NAME.fullmatch(said):
        raise InvalidRecord(
            f"span {span.span_id} names tenant {said[:80]!r} (noria.tenant), and the request is of {sender.tenant!r}; "
            "send it with a key of that tenant"
        )
    return str(said)


def app_of(span: Span, sender: Sender) -> str:
    """`noria.app`, else what the request says, else the service's name."""
    said = semconv.APP.read(_both(span)) or sender.app or _service(span.source.resource)
    return _label(said or sender.default_app)


def node_of(span: Span, sender: Sender) -> str:
    """`noria.node` or the agent's name of the span, else `noria.node` of the resource, else what the request says."""
    # A resource's own agent name is that of the service, and a node is a place within it.
    of_resource = semconv.as_text(span.source.resource.get(semconv.NODE.name))
    return _label(semconv.NODE.read(span.attributes) or of_resource or sender.node or DEFAULT_NODE)


def subject_of(span: Span, tenant: str) -> str | None:
    """The end user, hashed as the proxy does; spans of a proxy have the hash already."""
    both = _both(span)
    hashed = semconv.SUBJECT_HASH.read(both)
    if hashed is not None:
        return plain(hashed)
    clear = semconv.SUBJECT.read(both)
    return None if clear is None else hash_subject(tenant, clear)


def _both(span: Span) -> Mapping[str, Any]:
    return {**span.source.resource, **span.attributes}


def _service(resource: Mapping[str, Any]) -> str | None:
    name = semconv.as_text(resource.get("service.name"))
    return None if name is None or name.startswith("unknown_service") else name


def _label(text: str) -> str:
    """A label of `identity`'s rules, from a name that may be anything: what cannot stand in one becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text)[:128]
