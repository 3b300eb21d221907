"""Compares a record with the cassette that it is of."""

import json

from noria.contracts.call import Call, CallStatus
from tests.recordings.cassettes import Recorded
from tests.recordings.reading import said_in, said_on_wire


def check_record(recorded: Recorded, call: Call) -> None:
    """Fail where the record says anything else than the cassette, read independently, does."""
    assert call.input == recorded.request.decode()
    assert call.attributes["endpoint"] == recorded.kind
    assert call.attributes["stream"] is recorded.streamed
    assert call.attributes["http_status"] == recorded.status
    if recorded.status >= 300:
        assert call.status is CallStatus.UPSTREAM_ERROR
        assert call.error_type
        assert call.output == recorded.text
        return
    assert (call.status, call.error_type) == (CallStatus.OK, None), recorded.source
    said = said_on_wire(recorded)
    assert call.finish_reasons == said.reasons, recorded.source
    usage = call.usage or {}
    assert usage.get("completion_tokens", usage.get("output_tokens")) == said.tokens_out, recorded.source
    if recorded.streamed:
        assert said_in(recorded.kind, json.loads(call.output)) == said, recorded.source
    else:
        assert call.output == recorded.text
