"""Requests below /v1/ that no record is kept of: passed on as they are, streamed both ways."""

from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web
from yarl import URL

from noria.services.proxy.headers import reason_of, request_headers, response_headers
from noria.services.proxy.masking import SecretMask
from noria.services.proxy.refusal import NotSupported, TooLarge, error_response
from noria.services.proxy.request_body import too_large
from noria.services.proxy.unavailable import unavailable
from noria.services.proxy.upstreams import Upstream


class Passing:
    """Lists of models, files, fine-tunings, audio, and whatever an upstream may offer that nobody has thought of."""

    def __init__(self, session: aiohttp.ClientSession, max_bytes: int, is_own_key: Callable[[str], bool]) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._is_own_key = is_own_key

    async def handle(self, request: web.Request, upstream: Upstream, path: str) -> web.StreamResponse:
        """Pass one request on, whatever its method, and its answer back.

        Raises `NotSupported` for a request to change the protocol, `TooLarge` for a body over the limit.
        """
        if "upgrade" in request.headers.get("Connection", "").lower() and "Upgrade" in request.headers:
            raise NotSupported(
                f"Upgrade: {request.headers['Upgrade'][:40]!r} is not passed on by this proxy; connect to the upstream "
                "itself for WebSockets"
            )
        if (request.content_length or 0) > self._max_bytes:
            raise too_large(self._max_bytes)
        headers = request_headers(request.headers, upstream, self._is_own_key)
        if request.content_length is not None:
            headers["Content-Length"] = str(request.content_length)
        try:
            answer = await self._session.request(
                request.method,
                URL(upstream.url + path, encoded=True),
                data=self._body(request) if request.body_exists else None,
                headers=headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, TooLarge):
                raise error.__cause__ from error
            status, code, message = unavailable(upstream, error)
            return error_response(status, message, code)
        async with answer:
            response = web.StreamResponse(
                status=answer.status,
                reason=reason_of(answer, upstream.secrets),
                headers=response_headers(answer, upstream.secrets, resized=False),
            )
            await response.prepare(request)
            mask = SecretMask(upstream.secrets)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(mask.feed(chunk))
                await response.write(mask.end())
            except (aiohttp.ClientError, OSError):
                if request.transport is not None:
                    request.transport.close()  # without its last chunk the caller sees that the answer is not whole
            return response

    async def _body(self, request: web.Request) -> AsyncIterator[bytes]:
        passed = 0
        async for chunk in request.content.iter_any():
            passed += len(chunk)
            if passed > self._max_bytes:
                raise too_large(self._max_bytes)
            yield chunk
