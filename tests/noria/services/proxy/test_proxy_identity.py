import pytest

from noria.config import ProxyConfig
from noria.contracts.errors import InvalidRecord
from noria.services.proxy.identity import (
    check_model_node,
    foreign_baggage,
    hash_subject,
    identify,
    is_trace_id,
    sampled,
)

PROXY = ProxyConfig(tenant="acme", app="shop")
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_what_nobody_says_comes_from_the_configuration() -> None:
    identity = identify({}, {}, PROXY)
    assert (identity.tenant, identity.app, identity.node) == ("acme", "shop", "default")
    assert is_trace_id(identity.trace_id)
    assert identity.consent
    assert identity.client_traceparent is None


def test_header_counts_before_baggage_before_prefix() -> None:
    prefix = {"app": "from-prefix", "node": "from-prefix", "tenant": "from-prefix"}
    headers = {"baggage": "x=1, noria.app=from-baggage;p=1,noria.node=from-baggage", "x-noria-node": "from-header"}
    identity = identify(headers, prefix, PROXY)
    assert (identity.tenant, identity.app, identity.node) == ("from-prefix", "from-baggage", "from-header")


def test_the_trace_is_that_of_traceparent() -> None:
    assert identify({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, {}, PROXY).trace_id == TRACE
    assert identify({"traceparent": f"cc-{TRACE}-b7ad6b7169203331-01-later"}, {}, PROXY).trace_id == TRACE


@pytest.mark.parametrize(
    "broken",
    [
        "nonsense",
        f"00-{TRACE}-b7ad6b7169203331",
        f"00-{TRACE.upper()}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{TRACE}-b7ad6b7169203331-01-more",
    ],
)
def test_a_broken_traceparent_begins_a_new_trace_and_is_kept(broken: str) -> None:
    identity = identify({"traceparent": broken}, {}, PROXY)
    assert identity.trace_id != TRACE
    assert is_trace_id(identity.trace_id)
    assert identity.client_traceparent == broken


@pytest.mark.parametrize("header", ["x-noria-app", "x-noria-node", "x-noria-tenant"])
@pytest.mark.parametrize("value", ["with space", "a/b", "é", "a" * 129])
def test_a_name_that_cannot_be_one_is_refused_and_named(header: str, value: str) -> None:
    with pytest.raises(InvalidRecord, match=header):
        identify({header: value}, {}, PROXY)


def test_a_dot_would_split_a_target() -> None:
    with pytest.raises(InvalidRecord):
        identify({"x-noria-node": "a.b"}, {}, PROXY)
    assert identify({"x-noria-tenant": "a.b"}, {}, PROXY).tenant == "a.b"


def test_the_end2end_node_takes_no_model_calls() -> None:
    with pytest.raises(InvalidRecord, match="/v1/episodes"):
        check_model_node(identify({"x-noria-node": "end2end"}, {}, PROXY))


@pytest.mark.parametrize(
    ("said", "consent"), [("true", True), ("1", True), ("false", False), ("FALSE", False), ("", False), ("huh", False)]
)
def test_only_a_clear_yes_is_consent(said: str, consent: bool) -> None:
    assert identify({"x-noria-consent": said}, {}, PROXY).consent is consent


def test_a_subject_is_hashed_apart_in_each_tenant() -> None:
    subject = identify({"x-noria-subject": "ann@example.com"}, {}, PROXY).subject
    assert subject == hash_subject("acme", "ann@example.com")
    assert subject != hash_subject("other", "ann@example.com")
    assert "ann" not in str(subject)


def test_bytes_that_no_store_takes_are_replaced() -> None:
    identity = identify({"x-noria-agent-version": "v\udcff1"}, {"app": "a"}, PROXY)
    assert identity.agent_version == "v?1"
    assert identify({"baggage": "noria.agent_version=v%00"}, {}, PROXY).agent_version == "v?"


def test_an_upstream_sees_no_baggage_of_noria() -> None:
    assert foreign_baggage("a=1, noria.meta=secret,b=2") == "a=1,b=2"
    assert foreign_baggage("noria.meta=secret") == ""


def test_sampling_keeps_the_asked_share_and_always_the_same() -> None:
    ids = [f"{number:032x}" for number in range(1, 4001)]
    kept = [trace_id for trace_id in ids if sampled(trace_id, 0.3)]
    assert 0.27 < len(kept) / len(ids) < 0.33
    assert kept == [trace_id for trace_id in ids if sampled(trace_id, 0.3)]
    assert set(kept) <= {trace_id for trace_id in ids if sampled(trace_id, 0.6)}
    assert not any(sampled(trace_id, 0.0) for trace_id in ids)
    assert all(sampled(trace_id, 1.0) for trace_id in ids)
