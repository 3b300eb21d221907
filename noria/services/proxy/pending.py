"""One model call in flight, from its request to the `Exchange` that is recorded of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from uuid_utils import uuid7

from noria.contracts.call import Arm
from noria.services.proxy.captured import Captured, CaptureMemory
from noria.services.proxy.exchange import Ending, Exchange, Kind, Wants
from noria.services.proxy.identity import Identity, attributes_of


@dataclass(slots=True)
class Pending:
    """What is known of a call so far.

    recorded    false where its trace is not sampled
    raw, body   the request's bytes as they came, and the JSON object in them
    path        below the upstream's URL, with the query
    started     monotonic
    ended       whether its record has been made
    """

    identity: Identity
    kind: Kind
    path: str
    memory: CaptureMemory
    recorded: bool = True
    raw: bytes = b""
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    request_encoding: str = ""
    arm: Arm = Arm.LIVE
    policy_version: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    uid: str = field(default_factory=lambda: str(uuid7()))
    request_time: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: float = field(default_factory=time.perf_counter)
    http_status: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    first_byte: float | None = None
    wants: Wants | None = None
    captured: Captured | None = None
    ended: bool = False
    lost: str | None = None

    @property
    def model(self) -> str:
        """The model that the caller asked for, "" where the request names none."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    def answered(self, status: int, content_type: str, content_encoding: str) -> None:
        """The head of an answer has come."""
        self.http_status = status
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.first_byte = time.perf_counter()

    def capture(self, chunk: bytes) -> None:
        """Keep a piece of the answer for the record, if there will be one.

        A disk that does not take it costs the record and not the call: `lost` says why.
        """
        if self.recorded and self.lost is None:
            if self.captured is None:
                self.captured = Captured(self.memory)
            try:
                self.captured.add(chunk)
            except OSError as error:
                self.lost = str(error)
                self.captured.close()

    def close(self) -> None:
        """Give back what the capture held."""
        if self.captured is not None:
            self.captured.close()

    def exchange(self, ending: Ending, error_type: str | None = None, response: bytes | None = None) -> Exchange:
        """The exchange as it ended now; `response` in place of what was captured."""
        identity = self.identity
        if response is None:
            response = b"" if self.captured is None else self.captured.whole()
        return Exchange(
            uid=self.uid,
            kind=self.kind,
            ending=ending,
            tenant=identity.tenant,
            app=identity.app,
            process_node=identity.node,
            trace_id=identity.trace_id,
            request_time=self.request_time,
            response_time=datetime.now(UTC),
            duration_ms=(time.perf_counter() - self.started) * 1000,
            request=self.raw,
            response=response,
            arm=self.arm,
            policy_version=self.policy_version,
            http_status=self.http_status,
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            request_encoding=self.request_encoding,
            error_type=error_type,
            first_byte_ms=None if self.first_byte is None else (self.first_byte - self.started) * 1000,
            wants=self.wants,
            agent_version=identity.agent_version,
            subject=identity.subject,
            consent=identity.consent,
            attributes={**attributes_of(identity), **self.attributes},
        )
