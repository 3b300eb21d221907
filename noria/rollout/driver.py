"""Drives the real agent: one rollout per plan, each handed over as a trajectory the moment it ends.

The agent stays a black box. It gets the recorded request and a signed directive, forwards the directive on its model
calls, and what it did is read from the proxy's records of the rollout's trace.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import aiohttp
import tenacity

from noria.contracts.call import Call
from noria.contracts.call_json import call_from_json
from noria.contracts.errors import InvalidRecord, NoriaError, StationFailed
from noria.contracts.rollout import Directive, RolloutRequest
from noria.contracts.round import Round
from noria.contracts.trajectory import Trajectory
from noria.rollout.assemble import assemble, policy_failure, shorten
from noria.rollout.chat import parse_object
from noria.rollout.directive import sign
from noria.rollout.faults import Fault, FaultCounter
from noria.rollout.plan import RolloutPlan, rollout_seed

__all__ = ["RolloutPlan", "rollout_seed", "run_rollouts"]

_CONNECT_ATTEMPTS = 4
_CONNECT_SECONDS = 5.0
_TRACE_SECONDS = 30.0
"""How long the proxy may take to bring a rollout's records from its spool into the store."""
_MAX_BODY = 32_000_000
"""Bytes of an agent's answer that are read at most."""


class _Answer(NamedTuple):
    """What came of asking the agent: its response, or the fault and the sentence that describes it."""

    response: str = ""
    fault: Fault | None = None
    error: str | None = None


async def run_rollouts(
    plans: Sequence[RolloutPlan],
    *,
    agent_url: str,
    proxy_url: str,
    trainer_key: str,
    policy_version: str,
    temperature: float,
    concurrency: int,
    timeout_seconds: float,
    on_trajectory: Callable[[Trajectory], None],
    progress: Callable[[int, int], None] | None = None,
    rollout_path: str = "/rollout",
) -> None:
    """Make each planned rollout with at most `concurrency` in flight; `on_trajectory` gets each as soon as it ends.

    A rollout that fails is handed over too, with `error` saying at which step and what was seen. Only a refused
    connection is tried again, for then nothing was executed. A run of failures with one cause ends everything early:
    `AgentUnavailable` (unreachable, slow or nonsense), `PolicyUnavailable` (the target's calls get no answer) or
    `StationFailed` (the proxy does not hand out its records). What was handed over before stays with the caller.

    `timeout_seconds` bounds one rollout of the agent. Trace ids are new at each attempt; the seed is the plan's.
    `progress` is called with (ended, planned) after each rollout.
    """
    run = _Run(
        rollout_url=agent_url.rstrip("/") + rollout_path,
        proxy_url=proxy_url.rstrip("/"),
        trainer_key=trainer_key,
        policy_version=policy_version,
        temperature=temperature,
        timeout_seconds=timeout_seconds,
    )
    faults = FaultCounter(len(plans), run.rollout_url, run.proxy_url, policy_version)
    waiting = iter(plans)
    ended = 0

    async def worker(agent: aiohttp.ClientSession, proxy: aiohttp.ClientSession) -> None:
        nonlocal ended
        for plan in waiting:
            trajectory, fault = await run.one(plan, agent, proxy)
            ended += 1
            on_trajectory(trajectory)
            if progress is not None:
                progress(ended, len(plans))
            faults.count(fault, plan.sample_id, trajectory.error or "")

    # The agent gets a new connection for each rollout: one that its server has just closed for idleness breaks in a
    # way that cannot be told from a rollout that died, so that it could not be tried again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as agent, aiohttp.ClientSession() as proxy:
        workers = [asyncio.ensure_future(worker(agent, proxy)) for _ in range(min(concurrency, len(plans)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


class _Run:
    """What all rollouts of one run share."""

    def __init__(
        self,
        *,
        rollout_url: str,
        proxy_url: str,
        trainer_key: str,
        policy_version: str,
        temperature: float,
        timeout_seconds: float,
    ) -> None:
        self.rollout_url = rollout_url
        self.proxy_url = proxy_url
        self.trainer_key = trainer_key
        self.policy_version = policy_version
        self.temperature = temperature
        self.timeout_seconds = timeout_seconds

    async def one(
        self, plan: RolloutPlan, agent: aiohttp.ClientSession, proxy: aiohttp.ClientSession
    ) -> tuple[Trajectory, Fault | None]:
        """One rollout from the signed directive to the trajectory, and the fault that it counts as."""
        trace_id = secrets.token_hex(16)
        start = time.perf_counter()
        answer = await self._ask_agent(agent, plan, trace_id)
        duration_ms = (time.perf_counter() - start) * 1000.0
        fault, error = answer.fault, answer.error
        calls: list[Call] = []
        if fault is not Fault.UNREACHABLE:
            try:
                calls = await self._records(proxy, trace_id)
            except StationFailed as problem:
                fault, error = fault or Fault.PROXY, error or str(problem)
            failure = policy_failure(calls, Round.parse(plan.round).target.node)
            if failure is not None:
                fault = Fault.POLICY  # whatever the agent made of it, this is the cause
                error = f"{error}; cause: {failure}" if error else failure
        trajectory = assemble(
            plan,
            calls,
            trace_id=trace_id,
            policy_version=self.policy_version,
            origin_response=answer.response,
            duration_ms=duration_ms,
            error=error,
        )
        return trajectory, fault

    def _directive(self, plan: RolloutPlan, trace_id: str) -> str:
        directive = Directive(
            model=self.policy_version,
            invariant=plan.origin_trace_id,
            trace_id=trace_id,
            round=plan.round,
            sample_id=plan.sample_id,
            group=plan.group,
            member=plan.member,
            seed=plan.seed,
            temperature=self.temperature,
        )
        return sign(directive, self.trainer_key)

    async def _ask_agent(self, agent: aiohttp.ClientSession, plan: RolloutPlan, trace_id: str) -> _Answer:
        step = f"POST {self.rollout_url}"
        body = asdict(RolloutRequest(plan.origin_request, self._directive(plan, trace_id)))
        timeout = aiohttp.ClientTimeout(total=self.timeout_seconds, connect=_CONNECT_SECONDS)
        try:
            async for attempt in _only_if_nothing_was_executed():
                with attempt:
                    async with agent.post(self.rollout_url, json=body, timeout=timeout) as response:
                        status, raw = response.status, await _read(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return _Answer(fault=Fault.UNREACHABLE, error=f"{step}: cannot connect: {error}")
        except TimeoutError:
            seconds = f"{self.timeout_seconds:g} s"
            return _Answer(fault=Fault.SLOW, error=f"{step}: no answer within {seconds} ([agent] timeout_seconds)")
        except (aiohttp.ClientError, OSError) as error:
            return _Answer(
                fault=Fault.NONSENSE, error=f"{step}: the connection broke during the rollout: {error or type(error)}"
            )
        text = raw.decode(errors="replace")
        if status != 200:
            return _Answer(fault=Fault.NONSENSE, error=f"{step}: status {status}, not 200: {shorten(text)}")
        value = parse_object(text).get("originResponse")
        if not isinstance(value, str):
            wanted = '{"originResponse": string}'
            return _Answer(fault=Fault.NONSENSE, error=f"{step}: the body is not {wanted}: {shorten(text)!r}")
        return _Answer(response=value)

    async def _records(self, proxy: aiohttp.ClientSession, trace_id: str) -> list[Call]:
        """The proxy's records of one trace. Raises `StationFailed` with what the proxy said."""
        url = f"{self.proxy_url}/v1/traces/{trace_id}"
        step = f"GET {self.proxy_url}/v1/traces/…"  # without the id: one cause gives one text, which can be counted
        headers = {"Authorization": f"Bearer {self.trainer_key}"}
        timeout = aiohttp.ClientTimeout(total=_TRACE_SECONDS, connect=_CONNECT_SECONDS)
        try:
            async for attempt in _reading():
                with attempt:
                    async with proxy.get(url, headers=headers, timeout=timeout) as response:
                        status, text = response.status, await response.text(errors="replace")
                        if status >= 500:
                            response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StationFailed(f"{step}: the proxy did not answer: {error or type(error).__name__}") from error
        if status != 200:
            raise StationFailed(f"{step}: status {status}, not 200: {shorten(text)}")
        calls = parse_object(text).get("calls")
        try:
            if not isinstance(calls, list):
                raise InvalidRecord('no list under "calls"')
            return [call_from_json(call) for call in calls]
        except (NoriaError, ValueError, TypeError, LookupError) as error:
            raise StationFailed(f"{step}: the proxy's records cannot be read: {error}: {shorten(text)!r}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, cut at `_MAX_BODY`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MAX_BODY:
            break
    return b"".join(parts)[:_MAX_BODY]


def _only_if_nothing_was_executed() -> tenacity.AsyncRetrying:
    """Tries again where the connection was refused: the agent saw nothing of the rollout."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type((aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)),
        stop=tenacity.stop_after_attempt(_CONNECT_ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(multiplier=0.1, max=1.0, jitter=0.1),
        reraise=True,
    )


def _reading() -> tenacity.AsyncRetrying:
    """Tries again whatever the proxy's trouble: reading changes nothing."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(aiohttp.ClientError),
        stop=tenacity.stop_after_attempt(_CONNECT_ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(multiplier=0.1, max=1.0, jitter=0.1),
        reraise=True,
    )
