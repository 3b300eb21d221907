"""Whose a trace or a call is: what a caller of one tenant is checked against."""

from sqlalchemy import select

from noria.stores.online import OnlineStore
from noria.stores.tables import calls


def tenants_of_trace(store: OnlineStore, trace_id: str) -> frozenset[str]:
    """The tenants that have calls in a trace, mostly one; empty for an unknown trace.

    Callers choose their trace ids, and a trace may cross the border between two tenants as it does between two
    companies, so there can be several.
    """
    with store.read() as connection:
        return frozenset(connection.scalars(select(calls.c.tenant).where(calls.c.trace_id == trace_id).distinct()))


def tenants_of_call(store: OnlineStore, uid: str) -> frozenset[str]:
    """The tenant of a call; empty for an unknown uid."""
    with store.read() as connection:
        return frozenset(connection.scalars(select(calls.c.tenant).where(calls.c.uid == uid)))
