"""Who may do what: API keys of tenants and the scopes they carry."""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

KEY_TEXT = re.compile(r"nk_[A-Za-z0-9_-]{43}")
"""The text of a key: a prefix that scanners for leaked secrets can look for, and 256 random bits in url-safe base64."""

TENANT = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""What a tenant may be called."""


class Scope(StrEnum):
    """What a key may do, within its own tenant."""

    CALL = "call"
    """Make model calls, and report those made elsewhere (`POST /v1/traces`) and whole tasks (`/v1/episodes`)."""
    FEEDBACK = "feedback"
    """Say how good a trace or a call was (`/v1/feedback`)."""
    TRAINER = "trainer"
    """Read recorded traces (`GET /v1/traces/{trace_id}`)."""
    ADMIN = "admin"
    """Make, list and revoke the tenant's keys."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the store knows it: all but its text, of which only a hash is kept.

    `id` names the key where its text must not stand: in logs, errors and the command line.
    """

    id: str
    tenant: str
    scopes: frozenset[Scope]
    name: str
    created_at: datetime
    revoked_at: datetime | None = None


def without_keys(text: str) -> str:
    """The text with every key in it cut down to its prefix, for errors that repeat what a caller sent."""
    return KEY_TEXT.sub("nk_…", text)
