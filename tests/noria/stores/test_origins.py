from collections.abc import Callable
from typing import Any

import pytest

from noria.contracts.call import END2END, Call, Score
from noria.contracts.errors import NotFound
from noria.stores.online import OnlineStore
from noria.stores.origins import look_up_origins

Make = Callable[..., Any]
TRACE = "a" * 32


def two_tenants(online: OnlineStore, make_call: Make) -> list[Call]:
    """A call and a whole task of each of two tenants, all in one trace."""
    online.add_calls(
        [
            make_call(n, tenant=tenant, trace_id=TRACE, process_node=node, input=f"{tenant} asks")
            for n, (tenant, node) in enumerate(
                [("acme", "router"), ("rival", "router"), ("acme", END2END), ("rival", END2END)]
            )
        ]
    )
    return online.trace(TRACE)


def test_a_sample_has_the_request_and_the_scores_of_its_own_tenant(
    online: OnlineStore, make_call: Make, make_score: Callable[..., Score]
) -> None:
    acme, rival, *_ = two_tenants(online, make_call)
    online.add_scores(
        [
            make_score(TRACE, name="of the trace"),
            make_score(acme.uid, target_kind="call", name="of acme"),
            make_score(rival.uid, target_kind="call", name="of rival"),
        ]
    )
    assert acme.id is not None
    assert rival.id is not None
    first, second = look_up_origins(online, [acme.id, rival.id])
    assert (first.request, set(first.reference)) == ("acme asks", {"of acme"})
    assert (second.request, set(second.reference)) == ("rival asks", {"of rival"})


def test_a_score_of_a_trace_counts_where_the_trace_is_one_tenants(
    online: OnlineStore, make_call: Make, make_score: Callable[..., Score]
) -> None:
    online.add_calls([make_call(n, trace_id=TRACE, process_node=node) for n, node in enumerate(["router", END2END])])
    online.add_scores([make_score(TRACE, name="right", value=0.5)])
    call = online.trace(TRACE)[0]
    assert call.id is not None
    [origin] = look_up_origins(online, [call.id])
    assert origin.reference["right"] == {"value": 0.5, "explanation": {"expected": "weather"}}


def test_the_request_of_another_tenant_is_none(online: OnlineStore, make_call: Make) -> None:
    online.add_calls(
        [
            make_call(0, tenant="acme", trace_id=TRACE, process_node="router"),
            make_call(1, tenant="rival", trace_id=TRACE, process_node=END2END),
        ]
    )
    call = online.trace(TRACE)[0]
    assert call.id is not None
    with pytest.raises(NotFound, match="'acme'"):
        look_up_origins(online, [call.id])
