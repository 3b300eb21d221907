"""The clients of `bench.durability`: calls with content of their own, at full speed, whatever becomes of the server."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import count

from bench.calls import ECHO, ECHO_STREAM, completion, echo_stream, echo_texts, request_body
from bench.connection import Answer, Connection, connect, post

RECONNECT_SECONDS = 0.01
LARGE_EVERY, LARGE_BYTES = 250, 100_000
"""One call of so many carries a text that is above `store.inline_max_bytes`."""
STREAM_EVERY = 4
_PLACEHOLDER = "marker-0"


def is_stream(number: int) -> bool:
    """Whether the call of this number asks for a stream."""
    return number % STREAM_EVERY == STREAM_EVERY - 1


def marker(number: int) -> str:
    """The content that only the call of this number carries, in its request and in its answer."""
    return f"marker-{number}-"


def number_of(text: str) -> int | None:
    """The number whose marker stands in a text; None if there is none."""
    _, found, rest = text.partition("marker-")
    digits = rest.partition("-")[0]
    return int(digits) if found and digits.isdigit() else None


def request_of(number: int) -> bytes:
    """The body of the call of this number."""
    content = marker(number)
    if number % LARGE_EVERY == 0:
        content += f" {number:x}" * (LARGE_BYTES // len(f" {number:x}"))
    return request_body(ECHO_STREAM, content, stream=True) if is_stream(number) else request_body(ECHO, content)


def content_of(number: int) -> str:
    """The text of the assistant in the answer to the call of this number."""
    return "".join(echo_texts(marker(number))) if is_stream(number) else marker(number)


_ANSWERS = {
    True: b"".join(echo_stream(_PLACEHOLDER)).split(_PLACEHOLDER.encode()),
    False: completion(ECHO, _PLACEHOLDER).split(_PLACEHOLDER.encode()),
}


def answer_of(number: int) -> bytes:
    """The bytes that the upstream answers to the call of this number."""
    return marker(number).encode().join(_ANSWERS[is_stream(number)])


class Clients:
    """What was sent, and what came back whole.

    `delivered` has the uid of each call whose whole answer has arrived, and the call's number; `broken` counts calls
    whose connection ended before that, `refused` those that a proxy which is not ready yet has answered 503, and
    `wrong` says what else came instead of the upstream's answer.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._numbers = count(1)
        self.sent = 0
        self.delivered: dict[str, int] = {}
        self.streams = 0
        self.broken = 0
        self.refused = 0
        self.wrong: Counter[str] = Counter()

    async def run(self, connections: int, enough: Callable[[], bool]) -> None:
        """Make calls on so many connections until `enough()`, and wait for the answers of those in flight."""
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(self._client(enough))

    async def _client(self, enough: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer | None] = loop.create_future()

        def on_answer(answer: Answer | None) -> None:
            if not answered.done():
                answered.set_result(answer)

        connection: Connection | None = None
        while not enough():
            if connection is None or not connection.open:
                try:
                    connection = await connect(self._url, on_answer)
                except OSError:
                    await asyncio.sleep(RECONNECT_SECONDS)
                    continue
            self.sent = number = next(self._numbers)
            answered = loop.create_future()
            connection.send(post(self._url, request_of(number)))
            if not self._take(number, await answered):
                await asyncio.sleep(RECONNECT_SECONDS)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _take(self, number: int, answer: Answer | None) -> bool:
        """Count what came; whether it was the upstream's answer."""
        if answer is None:
            self.broken += 1
            return False
        if answer.status == 503:
            self.refused += 1
            return False
        uid = answer.header("x-noria-call-uid")
        if answer.status != 200 or answer.body != answer_of(number):
            self.wrong[f"{answer.status} {_message(answer.body)}"] += 1
        elif uid is None or uid in self.delivered:
            self.wrong[f"the header x-noria-call-uid is {'missing' if uid is None else 'that of another call'}"] += 1
        else:
            self.delivered[uid] = number
            self.streams += is_stream(number)
            return True
        return False


def _message(body: bytes) -> str:
    """What an error says, without what differs between calls."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])[:200]
    return repr(body[:200])
