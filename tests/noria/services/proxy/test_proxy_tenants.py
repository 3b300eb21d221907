"""Keys, scopes and tenants through a running proxy, each with tests that try to cross."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from noria.contracts.access import Scope
from noria.contracts.rollout import META_HEADER, Directive
from noria.rollout.directive import sign
from noria.services.proxy.exchange import KINDS

UNKNOWN = "nk_" + "x" * 43
TRACE = "0af7651916cd43dd8448eb211c80319c"
OTHER_TRACE = "1bf7651916cd43dd8448eb211c80319c"


def traced(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(proxy: Any, method: str, path: str, headers: dict[str, str], body: Any = None) -> tuple[int, Any]:
    async with proxy.session.request(method, proxy.url + path, headers=headers, json=body) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


class Keys:
    """Keys of a running proxy, by tenant and scopes."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy
        self.texts: list[str] = []

    async def make(self, tenant: str, scopes: Iterable[Scope]) -> dict[str, str]:
        """The headers of a new key, which the proxy takes at once."""
        trainer = bearer(self._proxy.config.trainer_key())
        body = {"tenant": tenant, "scopes": [scope.value for scope in scopes]}
        status, answer = await ask(self._proxy, "POST", "/noria/v1/keys", trainer, body)
        assert status == 201
        self.texts.append(answer["key"])
        return bearer(answer["key"])


@pytest.fixture
async def proxy(start_upstream: Any, start_proxy: Any) -> Any:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, tenant="ours")
    proxy.upstream = upstream
    proxy.keys = Keys(proxy)
    return proxy


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SCORE = {"name": "right", "value": 1.0}
ENDPOINTS: list[tuple[str, str, Any, Scope]] = [
    *(("POST", path, CHAT, Scope.CALL) for path in KINDS),
    ("POST", "/apps/a/nodes/n/v1/chat/completions", CHAT, Scope.CALL),
    ("GET", "/v1/models", None, Scope.CALL),
    ("POST", "/v1/episodes", {"trace_id": TRACE, "request": "r"}, Scope.CALL),
    ("POST", "/v1/traces", {"resourceSpans": []}, Scope.CALL),
    ("POST", "/v1/feedback", {"trace_id": TRACE, **SCORE}, Scope.FEEDBACK),
    ("GET", f"/v1/traces/{TRACE}", None, Scope.TRAINER),
    ("GET", "/noria/v1/keys", None, Scope.ADMIN),
    ("POST", "/noria/v1/keys", {"scopes": ["admin"]}, Scope.ADMIN),
    ("DELETE", "/noria/v1/keys/key_0123456789abcdef", None, Scope.ADMIN),
    ("GET", "/metrics", None, Scope.ADMIN),
]


async def test_every_endpoint_against_every_scope(proxy: Any) -> None:
    everything = await proxy.keys.make("ours", Scope)
    await ask(proxy, "POST", "/v1/chat/completions", everything | traced(TRACE), CHAT)
    by_scope = {scope: await proxy.keys.make("ours", [scope]) for scope in Scope}
    for method, path, body, needed in ENDPOINTS:
        for scope, key in by_scope.items():
            status, answer = await ask(proxy, method, path, key, body)
            if scope is needed:
                assert status in (200, 201, 404), (method, path, answer)
                assert status != 404 or method == "DELETE"  # the id of no key
            else:
                assert status == 403, (method, path, scope)
                message = answer.get("error", answer)["message"]  # spans have OTLP's errors
                assert needed.value in message
                assert "key_" in message
        for wrong in ({}, bearer(UNKNOWN), bearer("sk-of-someone-else")):
            status, answer = await ask(proxy, method, path, wrong, body)
            assert status == 401, (method, path)
    for path in ("/healthz", "/openapi.json"):
        assert (await ask(proxy, "GET", path, {}))[0] == 200


async def test_a_refused_caller_is_told_how_to_show_a_key(proxy: Any) -> None:
    await proxy.keys.make("ours", [Scope.CALL])
    async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert (await answer.json())["error"]["code"]
    assert proxy.upstream.bodies == []


async def test_no_other_tenants_name_is_taken(proxy: Any) -> None:
    key = await proxy.keys.make("acme", [Scope.CALL])
    episode = {"trace_id": TRACE, "request": "r"}
    chat, under_rival = "/v1/chat/completions", "/tenants/rival/apps/a/v1/chat/completions"
    for path, said in (
        (chat, {"x-noria-tenant": "rival"}),
        (chat, {"baggage": "noria.tenant=rival"}),
        (chat, {"baggage": "noria.tenant=rival", "x-noria-tenant": "acme"}),
        (under_rival, {}),
        (under_rival, {"x-noria-tenant": "acme"}),
    ):
        assert (await ask(proxy, "POST", path, key | said, CHAT))[0] == 403, (path, said)
        assert (await ask(proxy, "POST", path.replace("chat/completions", "episodes"), key | said, episode))[0] == 403
    assert (await ask(proxy, "POST", "/v1/episodes", key, episode | {"tenant": "rival"}))[0] == 403
    assert proxy.upstream.bodies == []
    for path, said in ((chat, {}), (chat, {"x-noria-tenant": "acme"}), ("/tenants/acme/apps/a" + chat, {})):
        assert (await ask(proxy, "POST", path, key | said, CHAT))[0] == 200
    calls = await proxy.calls()
    assert [call.tenant for call in calls if call.status == "ok"] == ["acme"] * 3
    assert {call.tenant for call in calls} == {"acme"}


async def test_no_other_tenants_trace_is_read(proxy: Any) -> None:
    theirs = await proxy.keys.make("rival", [Scope.CALL])
    ours = await proxy.keys.make("acme", [Scope.CALL, Scope.TRAINER])
    await ask(proxy, "POST", "/v1/chat/completions", theirs | traced(TRACE), CHAT)
    status, answer = await ask(proxy, "GET", f"/v1/traces/{TRACE}", ours)
    unknown = await ask(proxy, "GET", f"/v1/traces/{OTHER_TRACE}", ours)
    assert status == unknown[0] == 404
    assert json.dumps(answer).replace(TRACE, "") == json.dumps(unknown[1]).replace(OTHER_TRACE, "")
    # A call of one's own in that trace shows that call, and no other.
    await ask(proxy, "POST", "/v1/chat/completions", ours | traced(TRACE), CHAT)
    status, answer = await ask(proxy, "GET", f"/v1/traces/{TRACE}", ours)
    assert (status, [call["tenant"] for call in answer["calls"]]) == (200, ["acme"])
    status, answer = await ask(proxy, "GET", f"/v1/traces/{TRACE}", bearer(proxy.config.trainer_key()))
    assert [call["tenant"] for call in answer["calls"]] == ["rival", "acme"]


async def test_no_feedback_lands_on_another_tenants_trace_or_call(proxy: Any) -> None:
    theirs = await proxy.keys.make("rival", [Scope.CALL, Scope.FEEDBACK])
    ours = await proxy.keys.make("acme", [Scope.CALL, Scope.FEEDBACK])
    await ask(proxy, "POST", "/v1/chat/completions", theirs | traced(TRACE), CHAT)
    [call] = await proxy.calls()
    for target in ({"trace_id": TRACE}, {"call_uid": call.uid}):
        assert (await ask(proxy, "POST", "/v1/feedback", ours, target | SCORE))[0] == 404
    # Nor when one has put a call of one's own into that trace: then a score of the trace would be of both.
    await ask(proxy, "POST", "/v1/chat/completions", ours | traced(TRACE), CHAT)
    status, answer = await ask(proxy, "POST", "/v1/feedback", ours, {"trace_id": TRACE} | SCORE)
    assert status == 403
    assert "call_uid" in answer["error"]["message"]
    assert (await ask(proxy, "POST", "/v1/feedback", ours, {"call_uid": call.uid} | SCORE))[0] == 404
    await proxy.calls()
    assert proxy.store.scores_of_trace(TRACE) == []
    assert (await ask(proxy, "POST", "/v1/feedback", theirs, {"call_uid": call.uid} | SCORE))[0] == 200
    await proxy.calls()
    assert [score.target_id for score in proxy.store.scores_of_trace(TRACE)] == [call.uid]


async def test_no_feedback_lands_on_a_trace_that_becomes_another_tenants(proxy: Any) -> None:
    ours = await proxy.keys.make("acme", [Scope.FEEDBACK])
    theirs = await proxy.keys.make("rival", [Scope.CALL])
    assert (await ask(proxy, "POST", "/v1/feedback", ours, {"trace_id": TRACE} | SCORE))[0] == 404
    await ask(proxy, "POST", "/v1/chat/completions", theirs | traced(TRACE), CHAT)
    await proxy.calls()
    assert proxy.store.scores_of_trace(TRACE) == []


async def test_feedback_of_a_trace_that_is_not_sampled_is_taken_and_not_kept(
    start_upstream: Any, start_proxy: Any
) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, sampling_rate=0.0)
    key = await Keys(proxy).make("acme", [Scope.CALL, Scope.FEEDBACK])
    await ask(proxy, "POST", "/v1/chat/completions", key | traced(TRACE), CHAT)
    status, answer = await ask(proxy, "POST", "/v1/feedback", key, {"trace_id": TRACE} | SCORE)
    assert (status, answer["recorded"]) == (200, False)
    await proxy.calls()
    assert proxy.store.scores_after(0, 10) == []


async def test_whose_a_trace_is_cannot_be_said_while_the_store_is_away(proxy: Any) -> None:
    key = await proxy.keys.make("acme", [Scope.CALL, Scope.FEEDBACK])
    await ask(proxy, "POST", "/v1/chat/completions", key | traced(TRACE), CHAT)
    await proxy.calls()
    proxy.store.close()
    database = proxy.config.home_dir / "online.db"
    for file in database.parent.glob("online.db*"):
        file.rename(file.with_name(f"away-{file.name}"))
    database.mkdir()
    assert (await ask(proxy, "POST", "/v1/chat/completions", key, CHAT))[0] == 200
    async with proxy.session.post(f"{proxy.url}/v1/feedback", headers=key, json={"trace_id": TRACE} | SCORE) as answer:
        assert (answer.status, "Retry-After" in answer.headers) == (503, True)
    database.rmdir()
    for file in database.parent.glob("away-online.db*"):
        file.rename(file.with_name(file.name.removeprefix("away-")))
    assert (await ask(proxy, "POST", "/v1/feedback", key, {"trace_id": TRACE} | SCORE))[0] == 200


async def test_no_rollout_is_answered_from_another_tenants_trace(proxy: Any) -> None:
    theirs = await proxy.keys.make("rival", [Scope.CALL])
    ours = await proxy.keys.make("acme", [Scope.CALL])
    await ask(proxy, "POST", "/v1/chat/completions", theirs | traced(TRACE) | {"x-noria-node": "reply"}, CHAT)
    asked = len(proxy.upstream.bodies)
    directive = Directive("a.n.r00001", TRACE, OTHER_TRACE, "a.n.r00001", 1, 0, 0, 0)
    meta = {META_HEADER: sign(directive, proxy.config.trainer_key()), "x-noria-app": "a", "x-noria-node": "reply"}
    assert (await ask(proxy, "POST", "/v1/chat/completions", ours | meta, CHAT))[0] == 404
    assert len(proxy.upstream.bodies) == asked


async def test_a_directive_is_honoured_for_its_signature_and_for_no_scope(proxy: Any) -> None:
    key = await proxy.keys.make("ours", Scope)
    directive = Directive("a.n.r00001", TRACE, OTHER_TRACE, "a.n.r00001", 1, 0, 0, 0)
    for meta in (sign(directive, "w" * 48), "nonsense"):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/episodes", {"request": "r"})):
            status, answer = await ask(proxy, "POST", path, key | {META_HEADER: meta}, body)
            assert (status, answer["error"]["code"]) == (403, "directive_refused")


async def test_an_admin_reaches_the_keys_of_its_own_tenant_alone(proxy: Any) -> None:
    ours = await proxy.keys.make("acme", [Scope.ADMIN, Scope.CALL])
    theirs = await proxy.keys.make("rival", [Scope.CALL])
    _, listed = await ask(proxy, "GET", "/noria/v1/keys", ours)
    assert {key["tenant"] for key in listed["keys"]} == {"acme"}
    _, listed = await ask(proxy, "GET", "/noria/v1/keys", bearer(proxy.config.trainer_key()))
    [rival] = [key["id"] for key in listed["keys"] if key["tenant"] == "rival"]
    assert (await ask(proxy, "DELETE", f"/noria/v1/keys/{rival}", ours))[0] == 404
    assert (await ask(proxy, "POST", "/v1/chat/completions", theirs, CHAT))[0] == 200
    for body, said in (
        ({"tenant": "rival", "scopes": ["call"]}, "rival"),
        ({"scopes": ["call", "trainer"]}, "trainer"),
        ({"tenant": "acme", "scopes": ["feedback"]}, "feedback"),
    ):
        status, answer = await ask(proxy, "POST", "/noria/v1/keys", ours, body)
        assert status == 403
        assert said in answer["error"]["message"]
    assert (await ask(proxy, "GET", "/metrics", ours))[0] == 403  # it has the nodes of every tenant
    status, made = await ask(proxy, "POST", "/noria/v1/keys", ours, {"scopes": ["call"], "name": "checkout"})
    assert (status, made["tenant"], made["scopes"], made["name"]) == (201, "acme", ["call"], "checkout")
    key = bearer(made["key"])
    assert (await ask(proxy, "POST", "/v1/chat/completions", key, CHAT))[0] == 200
    for _ in range(2):
        status, revoked = await ask(proxy, "DELETE", f"/noria/v1/keys/{made['id']}", ours)
        assert status == 200
        assert revoked["revoked_at"]
    assert (await ask(proxy, "POST", "/v1/chat/completions", key, CHAT))[0] == 401


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["everything"]}, "everything"),
        ({"scopes": ["call"], "tenant": "a/b"}, "a/b"),
        ({"scopes": ["call"], "name": "a\nb"}, "printable"),
        ({"scopes": ["call"], "nmae": "x"}, "nmae"),
    ],
)
async def test_a_key_that_cannot_be_made_says_why(proxy: Any, body: Any, named: str) -> None:
    status, answer = await ask(proxy, "POST", "/noria/v1/keys", bearer(proxy.config.trainer_key()), body)
    assert status == 400
    assert named in answer["error"]["message"]


async def test_no_key_reaches_upstream_log_store_spool_or_error(
    proxy: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    key = await proxy.keys.make("ours", Scope)
    text = key["Authorization"].removeprefix("Bearer ")
    trainer = proxy.config.trainer_key()
    wrong = text[:-1] + ("a" if text[-1] != "a" else "b")
    answers = []
    ways = (
        key,
        {"x-api-key": text},
        {"x-noria-key": text, "Authorization": "Bearer sk-of-the-agent"},
        {"x-noria-key": text, "Authorization": f"Bearer {text}", "api-key": text},
        bearer(trainer),
        bearer(wrong),
        {"x-api-key": wrong},
    )
    for sent in ways:
        for method, path, body, _ in ENDPOINTS[:-2]:
            answers.append(await ask(proxy, method, path, sent | traced(TRACE), body))
    answers.append(await ask(proxy, "DELETE", f"/noria/v1/keys/{text}", key))
    answers.append(await ask(proxy, "GET", f"/nowhere/{text}", key))
    answers.append(await ask(proxy, "GET", f"/v1/traces/{text}", key))
    assert {status for status, _ in answers} == {200, 201, 400, 401, 404}
    said = [json.dumps(answer) for status, answer in answers if status != 201]
    upstream = [str(sent.items()) for sent in proxy.upstream.headers]
    assert any("sk-of-the-agent" in one for one in upstream)
    await proxy.calls()
    folder = proxy.config.home_dir
    files = [path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()]
    files = [one for one in files if one.strip() != trainer]  # the trainer's key has its own file
    out, err = capfd.readouterr()
    assert len(proxy.upstream.headers) > 5
    for secret in (text, wrong, trainer):
        for place in (*said, *upstream, *files, out, err, caplog.text):
            assert secret not in place
