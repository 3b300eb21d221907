"""Asks the judge; for assets and the command line."""

import httpx
from pydantic import ValidationError

from noria.contracts.errors import PolicyUnavailable
from noria.contracts.evaluation import EvaluationRequest, EvaluationResult


def evaluate(judge_url: str, request: EvaluationRequest, timeout: float) -> EvaluationResult:
    """The judge's scores of two versions. `timeout` in seconds bounds the whole evaluation.

    Raises `PolicyUnavailable` with what the judge said, or why it said nothing.
    """
    url = f"{judge_url.rstrip('/')}/evaluations"
    try:
        response = httpx.post(url, json=request.model_dump(), timeout=httpx.Timeout(timeout, connect=5.0))
    except httpx.TimeoutException as error:
        raise PolicyUnavailable(f"POST {url}: no answer within {timeout:g} s ([judge] timeout_seconds)") from error
    except httpx.HTTPError as error:
        raise PolicyUnavailable(f"POST {url}: {error}; see that the judge runs ([judge] port)") from error
    if response.status_code != 200:
        raise PolicyUnavailable(f"POST {url}: the judge refused ({response.status_code}): {_message(response)}")
    try:
        return EvaluationResult.model_validate_json(response.content)
    except ValidationError as error:
        raise PolicyUnavailable(f"POST {url}: the answer is no evaluation: {response.text[:200]!r}") from error


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]
