"""What is said where an upstream gives no answer, or breaks off in it."""

import aiohttp

from noria.services.proxy.upstreams import Upstream


def unavailable(upstream: Upstream, error: Exception) -> tuple[int, str, str]:
    """The status that the caller gets, the code that is recorded, and the sentence."""
    where = f"upstream {upstream.name!r} ({upstream.url})"
    why = str(error) or type(error).__name__
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        mend = f"start it, or mend [proxy.upstreams.{upstream.name}] url"
        return 502, "upstream_unreachable", f"{where} cannot be reached: {why}; {mend}"
    if isinstance(error, TimeoutError):
        mend = "proxy.timeout_seconds may be too short"
        return 504, "upstream_timeout", f"{where} did not answer in time: {why}; {mend}"
    return 502, "connection_lost", f"{where} broke off before its answer was whole: {why}"
