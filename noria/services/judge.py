"""The judge: answers each item of a frozen suite with each of two versions, and scores the answers.

POST /evaluations takes an `EvaluationRequest` and returns an `EvaluationResult`; GET /healthz, GET /metrics.

A version's scores are kept in `evaluations/` below the artifact root: what is live is compared with many candidates,
and a restart must not ask it everything again.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import tenacity
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from pydantic import ValidationError

from noria.config import Config
from noria.contracts.errors import ConfigError, IntegrityError, InvalidRecord, NoriaError, NotFound, PolicyUnavailable
from noria.contracts.evaluation import NODE_MODE, EvaluationRequest, EvaluationResult
from noria.contracts.report import PairedScore
from noria.contracts.round import Target
from noria.release.suite import Suite, SuiteItem, load_suite
from noria.rewards.reward import Attempt, Reward, load_reward
from noria.rollout.assemble import same_weights, shorten
from noria.rollout.chat import action_of, first_message, parse_object
from noria.services.serving import run
from noria.stores.artifacts import BASE, Artifacts

_ATTEMPTS = 4
_CONNECT_SECONDS = 5.0
_SAMPLING_KEYS = ("top_p", "top_k", "min_p", "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids")
"""What an item's own request must not decide: both versions answer under the evaluation's sampling alone."""

Scores = dict[str, tuple[float, str]]
"""Score and answer of each item, by the item's name."""


class Judge:
    """Evaluates versions; one instance serves all requests, and bounds what is in flight to the policy server."""

    def __init__(self, config: Config, session: aiohttp.ClientSession) -> None:
        self.config = config
        self.artifacts = Artifacts(config.artifacts_dir)
        self.registry = CollectorRegistry()
        self._session = session
        self._slots = asyncio.Semaphore(config.judge.concurrency)
        self._locks: dict[str, asyncio.Lock] = {}
        self._evaluations = Counter(
            "noria_judge_evaluations", "Evaluations by outcome", ["outcome"], registry=self.registry
        )
        self._answers = Counter(
            "noria_judge_answers", "Answers by where they came from", ["source"], registry=self.registry
        )
        self._seconds = Histogram(
            "noria_judge_evaluation_seconds",
            "Duration of an evaluation",
            registry=self.registry,
            buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
        )

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResult:
        """Both versions on every item. Raises `NotFound`, `InvalidRecord`, `ConfigError` or `PolicyUnavailable`."""
        start = time.perf_counter()
        try:
            result = await self._evaluate(request, start)
        except BaseException as error:
            self._evaluations.labels(outcome=type(error).__name__).inc()
            raise
        self._evaluations.labels(outcome="ok").inc()
        self._seconds.observe(result.seconds)
        return result

    async def _evaluate(self, request: EvaluationRequest, start: float) -> EvaluationResult:
        if request.mode != NODE_MODE:
            raise InvalidRecord(f"mode {request.mode!r} does not exist; the only mode is {NODE_MODE!r}")
        if request.target not in self.config.targets:
            known = ", ".join(sorted(self.config.targets)) or "none"
            raise NotFound(
                f'no target {request.target!r} in noria.toml (known: {known}); add [targets."{request.target}"]'
            )
        suite = await asyncio.to_thread(load_suite, self.artifacts, request.suite)
        reward = await asyncio.to_thread(load_reward, self.config.target(request.target).reward, self.config.root)
        cached: list[str] = []
        candidate = await self._scores(request.candidate, request, suite, reward, cached)
        if same_weights(request.candidate, request.baseline):
            baseline = candidate
        else:
            baseline = await self._scores(request.baseline, request, suite, reward, cached)
        return EvaluationResult(
            target=request.target,
            candidate=request.candidate,
            baseline=request.baseline,
            suite=suite.path,
            suite_sha256=suite.sha256,
            scorer=reward.name,
            scorer_version=reward.version,
            seed=request.seed,
            temperature=request.temperature,
            pairs=tuple(
                PairedScore(
                    item.item,
                    candidate[item.item][0],
                    baseline[item.item][0],
                    candidate[item.item][1],
                    baseline[item.item][1],
                )
                for item in suite.items
            ),
            seconds=time.perf_counter() - start,
            cached=tuple(cached),
        )

    async def _scores(
        self, version: str, request: EvaluationRequest, suite: Suite, reward: Reward, cached: list[str]
    ) -> Scores:
        """One version's scores, from the cache if it holds them; two requests for the same ones wait for one answer."""
        path = await asyncio.to_thread(self._cache_path, version, request, suite, reward)
        async with self._locks.setdefault(path, asyncio.Lock()):
            scores = await asyncio.to_thread(self._read_cache, path, suite)
            if scores is not None:
                self._answers.labels(source="cache").inc(len(scores))
                cached.append(version)
                return scores
            answers = await _all([self._answer(version, item, request) for item in suite.items])
            self._answers.labels(source="policy").inc(len(answers))
            node = Target.parse(request.target).node
            # In a thread: a reward is a user's function and may be slow, and /healthz must answer meanwhile.
            scores = await asyncio.to_thread(_score, reward, node, suite.items, answers)
            entry = {"version": version, "suite": suite.path, "scorer": reward.name, "scores": scores}
            await asyncio.to_thread(self.artifacts.write_json, path, entry)
            return scores

    def _cache_path(self, version: str, request: EvaluationRequest, suite: Suite, reward: Reward) -> str:
        key = {
            "suite": suite.sha256,
            "target": request.target,
            "weights": self._weights(version),
            "scorer": reward.name,
            "scorer_version": reward.version,
            "seed": request.seed,
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return f"evaluations/{digest[:32]}.json"

    def _weights(self, version: str) -> str:
        """What tells a version's weights from others: its name alone would outlive a cold start that is made anew."""
        if same_weights(version, BASE):
            name, directory = BASE, BASE
        else:
            try:
                name, directory = version, f"{self.artifacts.round_dir(version)}/checkpoint"
            except InvalidRecord as error:
                raise NotFound(f"no version {version!r}: it is {BASE!r} or a round key; {error}") from error
        marker = self.artifacts.completed(directory) or {}
        return f"{name}@{marker.get('weights_sha256', '')}"

    def _read_cache(self, path: str, suite: Suite) -> Scores | None:
        if not self.artifacts.exists(path):
            return None
        try:
            stored = self.artifacts.read_json(path)["scores"]
            return {item.item: (float(stored[item.item][0]), str(stored[item.item][1])) for item in suite.items}
        except (ValueError, LookupError, TypeError, NoriaError):
            return None  # not whole: it is made again and overwritten

    async def _answer(self, version: str, item: SuiteItem, request: EvaluationRequest) -> str:
        """What the version answers to one item."""
        url = f"{self.config.policy.url}/v1/chat/completions"
        body = {key: value for key, value in parse_object(item.input).items() if key not in _SAMPLING_KEYS}
        body |= {
            "model": version,
            "temperature": request.temperature,
            "seed": _item_seed(request.seed, item.item),
            "n": 1,
        }
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        where = f"the policy server at {self.config.policy.url}"
        timeout = aiohttp.ClientTimeout(total=self.config.judge.timeout_seconds, connect=_CONNECT_SECONDS)
        try:
            async with self._slots:
                async for attempt in _retrying():
                    with attempt:
                        async with self._session.post(url, json=body, timeout=timeout) as response:
                            status, text = response.status, await response.text(errors="replace")
                            if status in (429, 503):
                                response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise PolicyUnavailable(
                f"{where} does not answer for version {version!r}: {why}; see [policy] port"
            ) from error
        if status == 404:
            raise NotFound(f"{where} has no version {version!r}: {shorten(text)}")
        if 400 <= status < 500:
            raise InvalidRecord(f"{where} refused item {item.item!r} for version {version!r}: {status} {shorten(text)}")
        message = first_message(parse_object(text))
        if status != 200 or not message:
            raise PolicyUnavailable(
                f"{where} answered item {item.item!r} for version {version!r} with {status}: {shorten(text)}"
            )
        return action_of(message)


def _score(reward: Reward, node: str, items: Sequence[SuiteItem], answers: Sequence[str]) -> Scores:
    return {
        item.item: (reward(Attempt(node, item.input, answer, None, item.reference)).total, answer)
        for item, answer in zip(items, answers, strict=True)
    }


def _item_seed(seed: int, item: str) -> int:
    """The same for both versions: what chance decides is paired too."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{item}".encode()).digest()[:6], "big")


async def _all(questions: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """All answers in order; the first error cancels what is still under way."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _retrying() -> tenacity.AsyncRetrying:
    """An answer changes nothing, so whatever may pass is tried again; a policy server that restarts is back soon."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(aiohttp.ClientError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(multiplier=0.2, max=2.0, jitter=0.2),
        reraise=True,
    )


async def build(config: Config) -> web.Application:
    """The judge as an aiohttp application."""
    session = aiohttp.ClientSession()
    judge = Judge(config, session)

    async def evaluations(request: web.Request) -> web.Response:
        try:
            asked = EvaluationRequest.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise InvalidRecord(f"{where}: {first['msg']}; POST /evaluations takes an EvaluationRequest") from error
        result = await judge.evaluate(asked)
        return web.Response(text=result.model_dump_json(), content_type="application/json")

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(judge.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def close_session(_: web.Application) -> None:
        await session.close()

    app = web.Application(middlewares=[_errors_as_json])
    app.router.add_post("/evaluations", evaluations)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics)
    app.on_cleanup.append(close_session)
    return app


_STATUS: tuple[tuple[type[NoriaError], int, str], ...] = (
    (NotFound, 404, "not_found"),
    (PolicyUnavailable, 502, "policy_unavailable"),
    (InvalidRecord, 400, "invalid_request"),
    (ConfigError, 400, "invalid_config"),
    (IntegrityError, 409, "integrity"),
    (NoriaError, 500, "error"),
)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error in the OpenAI shape: {"error": {"message", "type", "param", "code"}}."""
    try:
        return await handler(request)
    except NoriaError as error:
        status, kind = next((status, kind) for known, status, kind in _STATUS if isinstance(error, known))
        return _error(status, kind, str(error))
    except web.HTTPException as error:
        return _error(error.status, "http", f"{request.method} {request.path}: {error.reason}")


def _error(status: int, kind: str, message: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


if __name__ == "__main__":
    run("judge", build, lambda config: (config.judge.host, config.judge.port))
