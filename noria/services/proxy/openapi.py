"""What the proxy answers, as an OpenAPI 3.1 description: `GET /openapi.json`.

It has the endpoints that are the proxy's own and the recorded model endpoints. Of a model call it says only what the
proxy itself holds to; the rest of the body is between the caller and the upstream, and passes as it is.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from noria import __version__
from noria.contracts.access import Scope
from noria.services.proxy.exchange import KINDS
from noria.services.proxy.intake import IDEMPOTENCY_HEADER
from noria.services.proxy.key_endpoints import NewKey
from noria.services.proxy.reports import TRACE_ID, Episode, Feedback

_Object = dict[str, Any]

_ABOUT = """\
An agent's calls go to /v1/… as they would go to the model's own API. Below /v1/, every path that is not listed here
passes to the upstream unrecorded. Any /v1/ path but /v1/traces may stand behind /apps/{app}, /apps/{app}/nodes/{node},
/tenants/{tenant}/apps/{app} or /tenants/{tenant}/apps/{app}/nodes/{node}, which say whose call it is by the base URL
alone. The response headers x-noria-trace-id and x-noria-call-uid say under which trace and uid a call is recorded."""

_REFUSALS = {
    "400": "The request breaks a rule of this endpoint, or is no HTTP",
    "401": "No API key, or one that is unknown, revoked or malformed",
    "403": "The key may not do this, or a rollout directive is not signed",
    "404": "What was named does not exist, or is another tenant's",
    "405": "Another method is needed",
    "409": "A pinned node has no recording of this call",
    "413": "The body is over proxy.max_body_bytes",
    "429": "Over a limit on calls; Retry-After says when to try again",
    "431": "The headers are over proxy.max_header_bytes",
    "502": "The upstream cannot be reached, or broke off",
    "503": "The online store, or the proxy itself, is not ready for this",
    "504": "The upstream did not answer in time",
}
_ALWAYS = ("400", "401", "403", "405", "413", "431", "503")
_CALLS = (*_ALWAYS, "404", "409", "429", "502", "504")

# An empty header says nothing, as if it were not there.
_NAME = "^[A-Za-z0-9_-]{0,128}$"
_TENANT = "^[A-Za-z0-9._-]{0,128}$"
_CALLER_HEADERS = {
    "x-noria-tenant": ("Whose call it is; with a key, no other than the key's", _TENANT),
    "x-noria-app": ("The line of business", _NAME),
    "x-noria-node": ("The node of the agent", _NAME),
    "traceparent": ("W3C trace context; what cannot be read begins a trace of its own", None),
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`nk_…`, as OpenAI's clients send it"},
    "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients send it"},
    "xNoriaKey": {
        "type": "apiKey",
        "in": "header",
        "name": "x-noria-key",
        "description": "Leaves the other two headers to the caller's own key for the upstream",
    },
}


def description(*, keys_required: bool) -> _Object:
    """The whole description; whether this proxy asks callers for a key is part of it."""
    closed: list[_Object] = [{name: []} for name in _SECURITY]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Noria's proxy", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "paths": {**_model_paths(), **_own_paths(closed)},
        "security": closed if keys_required else [*closed, {}],
        "components": {
            "securitySchemes": _SECURITY,
            "schemas": _schemas(),
            "responses": {status: _answer(text, _ref("Error")) for status, text in _REFUSALS.items()},
        },
    }


def _model_paths() -> _Object:
    return {
        path: {
            "post": {
                "operationId": kind.value,
                "summary": f"A model call ({kind.value}); scope {Scope.CALL.value}",
                "parameters": _headers(_CALLER_HEADERS),
                "requestBody": _json_body(_ref("ModelCall")),
                "responses": {
                    "200": {
                        "description": "The upstream's answer, byte for byte",
                        "content": {
                            "application/json": {"schema": {"type": "object"}},
                            "text/event-stream": {},
                        },
                    },
                    **_errors(*_CALLS),
                    "default": {"description": "Whatever else the upstream answered"},
                },
            }
        }
        for path, kind in KINDS.items()
    }


def _own_paths(closed: list[_Object]) -> _Object:
    trace_id = _path_parameter("trace_id", TRACE_ID)
    key_id = _path_parameter("key_id", {"type": "string", "pattern": "^key_[0-9a-f]{16}$"})
    # The headers that say whose call it is hold here too, but what the body says counts before them.
    episode_headers = _headers(
        {
            IDEMPOTENCY_HEADER: ("Tells two equal episodes from one that was sent twice", None),
            "traceparent": ("Names the trace where the body does not", None),
        }
    )
    # These three ask for a key even where calls do not.
    trainer = {"security": closed}
    return {
        "/v1/feedback": {
            "post": _operation("feedback", "Say how good a trace or a call was", Scope.FEEDBACK, "Taken", also=("404",))
            | {"requestBody": _json_body(_ref("Feedback"))}
        },
        "/v1/episodes": {
            "post": _operation("episode", "Report a whole task: its request and its answer", Scope.CALL, "Taken")
            | {"requestBody": _json_body(_ref("Episode")), "parameters": episode_headers}
        },
        "/v1/traces": {"post": _spans()},
        "/v1/traces/{trace_id}": {
            "parameters": [trace_id],
            "get": trainer
            | _operation("trace", "The recorded calls of a trace", Scope.TRAINER, "Calls", "Trace", also=("404",)),
        },
        "/noria/v1/keys": {
            "get": trainer | _operation("listKeys", "The tenant's API keys", Scope.ADMIN, "Keys", "Keys"),
            "post": trainer
            | _operation("createKey", "Make an API key", Scope.ADMIN, "Made; its text is shown once", "MadeKey", "201")
            | {"requestBody": _json_body(_ref("NewKey"))},
        },
        "/noria/v1/keys/{key_id}": {
            "parameters": [key_id],
            "delete": trainer
            | _operation("revokeKey", "Close an API key for ever", Scope.ADMIN, "Closed", "Key", also=("404",)),
        },
        "/metrics": {"get": _operation("metrics", "Prometheus metrics of this process", Scope.ADMIN, "Metrics", None)},
        "/healthz": {"get": _open("health", "Whether the process answers", "It does", "Health")},
        "/readyz": {
            "get": _open("ready", "Whether the process can serve calls", "It can", "Health", ("503",)),
        },
        "/openapi.json": {"get": _open("description", "This description", "OpenAPI 3.1", "Anything")},
    }


def _operation(
    name: str,
    summary: str,
    scope: Scope,
    success: str,
    schema: str | None = "Taken",
    status: str = "200",
    *,
    also: tuple[str, ...] = (),
) -> _Object:
    """An operation that takes a key with `scope`; without a schema its answer is plain text."""
    return {
        "operationId": name,
        "summary": f"{summary}; scope {scope.value}",
        "responses": {
            status: _answer(success, None if schema is None else _ref(schema)),
            **_errors(*_ALWAYS, *also),
        },
    }


def _spans() -> _Object:
    """Spans in, whose bodies and errors are those of OTLP."""
    media = ("application/json", "application/x-protobuf")
    content = {name: {"schema": {"type": "object"} if name == media[0] else {}} for name in media}
    refused = {"description": "A google.rpc.Status, in the encoding of the request", "content": content}
    return {
        "operationId": "spans",
        "summary": f"Model calls as OpenTelemetry spans, OTLP over HTTP; scope {Scope.CALL.value}",
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "An ExportTraceServiceResponse", "content": content}, "default": refused},
    }


def _open(name: str, summary: str, success: str, schema: str, also: tuple[str, ...] = ()) -> _Object:
    """An operation that never takes a key."""
    responses = {"200": _answer(success, _ref(schema)), **_errors("400", "405", "413", "431", *also)}
    return {"operationId": name, "summary": summary, "security": [], "responses": responses}


def _errors(*statuses: str) -> _Object:
    return {status: {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}


def _answer(text: str, schema: _Object | None) -> _Object:
    if schema is None:
        return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _json_body(schema: _Object) -> _Object:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _ref(schema: str) -> _Object:
    return {"$ref": f"#/components/schemas/{schema}"}


def _path_parameter(name: str, schema: Mapping[str, Any]) -> _Object:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _headers(headers: Mapping[str, tuple[str, str | None]]) -> list[_Object]:
    return [
        {
            "name": name,
            "in": "header",
            "description": text,
            "schema": {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern},
        }
        for name, (text, pattern) in headers.items()
    ]


def _schemas() -> _Object:
    models: tuple[type[BaseModel], ...] = (Feedback, Episode, NewKey)
    _, tree = models_json_schema([(model, "validation") for model in models], ref_template=_ref("{model}")["$ref"])
    text = {"type": "string"}
    maybe_text = {"type": ["string", "null"]}
    scopes = {"type": "array", "items": {"enum": sorted(Scope)}}
    key = {
        "id": text,
        "tenant": text,
        "scopes": scopes,
        "name": text,
        "created_at": {**text, "format": "date-time"},
        "revoked_at": maybe_text,
    }
    error = {"message": text, "type": text, "param": maybe_text, "code": text}
    return {
        **tree["$defs"],
        "Anything": {"type": "object"},
        "Error": _closed({"error": _closed(error)}),
        "Health": {"type": "object", "properties": {"status": text}, "required": ["status"]},
        "Key": _closed(key),
        "Keys": _closed({"keys": {"type": "array", "items": _ref("Key")}}),
        "MadeKey": _closed({"key": text, **key}),
        "ModelCall": {
            "type": "object",
            "description": "A request of the API that the path names; it goes to the upstream as it is",
            "properties": {"model": {"description": "Which upstream answers may depend on it"}},
        },
        "Taken": {"type": "object", "properties": {"status": text, "recorded": {"type": "boolean"}}},
        "Trace": _closed({"calls": {"type": "array", "items": {"type": "object"}}}),
    }


def _closed(properties: _Object) -> _Object:
    """An object that has these properties, all of them and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
