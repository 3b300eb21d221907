"""The proxy's own description of itself, and what a fuzzer that reads it finds."""

import asyncio
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from noria.contracts.access import Scope
from noria.services.proxy.app import PREFIXES
from noria.services.proxy.openapi import description
from noria.stores.api_keys import ApiKeys
from noria.stores.online import OnlineStore

# An episode names its trace in the body or in a header, and spans have a schema of their own: neither can be said in
# OpenAPI, so that what it calls valid may be refused with a 400.
SETTINGS = """
[[operations]]
include-name = ["POST /v1/episodes", "POST /v1/traces"]
checks.positive_data_acceptance.enabled = false
"""


async def anything(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An upstream that answers in every way an API does, decided by what it was asked."""
    error = {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}
    answers = [
        lambda: web.json_response(error, status=404),
        lambda: web.json_response(error, status=409),
        lambda: web.json_response(error, status=429),
        lambda: web.Response(body=b"data: x\r\n\r\n: c\n", content_type="text/event-stream"),
        lambda: web.json_response({}),
        lambda: web.json_response({"choices": [{"index": 0, "message": None, "finish_reason": []}], "usage": "much"}),
        lambda: web.json_response({"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}),
    ]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
    return answers[digest[0] % len(answers)]()


async def test_a_fuzzer_finds_no_500_and_no_answer_that_is_not_described(
    start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    store = OnlineStore(f"sqlite:///{tmp_path / '.noria' / 'online.db'}")
    store.upgrade()
    ApiKeys(store).create("default", list(Scope))
    store.close()
    upstream = await start_upstream(anything)
    proxy = await start_proxy({"main": upstream.url}, host="0.0.0.0")  # which needs keys whatever the fuzzer revokes
    key = f"Authorization: Bearer {proxy.config.trainer_key()}"
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    fuzzer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{proxy.url}/openapi.json", "--header", key),
        *("--seed", "1", "--max-examples", "15", "--generation-database", "none", "--no-color"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = (await fuzzer.communicate())[0].decode()
    assert fuzzer.returncode == 0, said
    operations = sum(len(set(path) - {"parameters"}) for path in description(keys_required=True)["paths"].values())
    assert f"Tested: {operations - 1}\n" in said  # all but the description itself
    passed = re.search(r"(\d+) generated, (\d+) passed", said)
    assert passed
    assert int(passed[1]) > 300
    assert len(upstream.bodies) > 50
    assert await proxy.calls()


@pytest.mark.parametrize("closed", [False, True])
async def test_it_says_whether_calls_need_a_key(start_upstream: Any, start_proxy: Any, closed: bool) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    if closed:
        body = {"scopes": ["call"]}
        headers = {"Authorization": f"Bearer {proxy.config.trainer_key()}"}
        async with proxy.session.post(f"{proxy.url}/noria/v1/keys", json=body, headers=headers) as answer:
            assert answer.status == 201
    async with proxy.session.get(f"{proxy.url}/openapi.json") as answer:
        described = await answer.json()
    assert ({} in described["security"]) is not closed
    assert described["paths"]["/noria/v1/keys"]["get"]["security"]
    assert [set(one) for one in described["paths"]["/noria/v1/keys"]["get"]["security"]]
    assert (await proxy.chat())[0] == (401 if closed else 200)


async def test_every_path_of_the_application_is_described_and_no_other(start_upstream: Any, start_proxy: Any) -> None:
    upstream = await start_upstream()
    proxy = await start_proxy({"main": upstream.url})
    prefixes = sorted(PREFIXES, key=len, reverse=True)
    served = set()
    for route in proxy.app.router.routes():
        path = route.resource.canonical
        path = path[len(next(prefix for prefix in prefixes if path.startswith(prefix))) :]
        if route.method not in ("*", "HEAD"):  # the rest of a path's methods, or what passes to the upstream
            served.add((route.method, path))
    described = {
        (method.upper(), path)
        for path, methods in description(keys_required=True)["paths"].items()
        for method in methods
        if method != "parameters"
    }
    assert served == described


def test_every_reference_leads_somewhere() -> None:
    tree = description(keys_required=True)
    text = json.dumps(tree)
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', text))
    assert len(references) > 10
    for reference in references:
        place = tree
        for step in reference.split("/"):
            place = place[step]
    assert str(Path.home()) not in text
