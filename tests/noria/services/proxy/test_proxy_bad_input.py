"""Bad input to each of the recorded APIs: its own 4xx, in the OpenAI shape, and nothing of it at the upstream."""

import gzip
import json
from typing import Any

import pytest

from noria.contracts.call import CallStatus
from noria.contracts.rollout import META_HEADER, Directive
from noria.rollout.directive import sign
from noria.services.proxy.exchange import KINDS

GOOD = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
NOBODYS = "d" * 32
BROKEN = "00-zz-zz-01"


@pytest.mark.parametrize("path", KINDS)
async def test_each_mistake_has_its_own_answer(start_upstream: Any, start_proxy: Any, path: str) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url}, max_body_bytes=1000)
    directive = Directive("a.n.r00001", NOBODYS, "b" * 32, "a.n.r00001", 1, 0, 0, 0)
    signed = {META_HEADER: sign(directive, proxy.config.trainer_key()), "x-noria-app": "a", "x-noria-node": "other"}
    forged = {META_HEADER: sign(directive, "x" * 48)}
    compressed = {"Content-Encoding": "gzip"}
    mistakes: list[tuple[bytes, dict[str, str], int, str, str]] = [
        (b'{"model": ', {}, 400, "invalid_request", "not a JSON object"),
        (b"[1]", {}, 400, "invalid_request", "list"),
        (b"", {}, 400, "invalid_request", "not a JSON object"),
        (GOOD, compressed, 400, "invalid_request", "gzip"),
        (GOOD, {"Content-Encoding": "rot13"}, 400, "invalid_request", "'rot13'"),
        (json.dumps({"x": "y" * 1000}).encode(), {}, 413, "body_too_large", "proxy.max_body_bytes"),
        (gzip.compress(json.dumps({"x": "y" * 1000}).encode()), compressed, 413, "body_too_large", "1000 bytes"),
        (GOOD, {META_HEADER: "nonsense"}, 403, "directive_refused", "trainMeta"),
        (GOOD, forged, 403, "directive_refused", "NORIA_TRAINER_KEY"),
        (GOOD, {"baggage": "noria.meta=nonsense"}, 403, "directive_refused", "trainMeta"),
        (GOOD, signed, 404, "not_found", NOBODYS),
        (GOOD, {"x-noria-app": "my app"}, 400, "invalid_request", "'my app'"),
        (GOOD, {"x-noria-node": "end2end"}, 400, "invalid_request", "/v1/episodes"),
    ]
    for data, headers, status, code, said in mistakes:
        async with proxy.session.post(proxy.url + path, data=data, headers=headers) as answer:
            assert answer.status == status, (data, headers)
            error = (await answer.json())["error"]
            assert (error["code"], error["param"]) == (code, None)
            assert said in error["message"]
            assert answer.headers["x-should-retry"] == "false"
    assert upstream.bodies == []
    calls = await proxy.calls()
    assert [call.status for call in calls] == [CallStatus.REFUSED] * len(mistakes)
    assert [call.error_type for call in calls] == [code for *_, code, _ in mistakes]


async def test_a_broken_traceparent_is_no_mistake_of_the_calls(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    assert (await proxy.chat(headers={"traceparent": BROKEN}))[0] == 200
    [call] = await proxy.calls()
    assert (call.status, call.attributes["client_traceparent"]) == (CallStatus.OK, BROKEN)
    assert len(call.trace_id) == 32
