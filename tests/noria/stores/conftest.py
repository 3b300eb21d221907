from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from noria.contracts.call import Arm, Call, CallStatus, CallTokens, Score, ScoreSource
from noria.stores.online import OnlineStore
from noria.stores.warehouse import Warehouse

START = datetime(2026, 3, 1, 23, 59, 59, 123456, tzinfo=UTC)


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """Call number n: two calls a trace, one second apart; any field can be set."""

    def make(n: int, **fields: Any) -> Call:
        values: dict[str, Any] = {
            "uid": f"uid-{n:08d}",
            "tenant": "default",
            "app": "dispatch",
            "process_node": "router" if n % 2 == 0 else "reply",
            "trace_id": f"{n // 2:032x}",
            "model_name": "base",
            "policy_version": "dispatch.router.r00000",
            "arm": Arm.LIVE,
            "input": f'{{"messages": [{{"role": "user", "content": "query {n}"}}]}}',
            "output": '{"choices": []}',
            "status": CallStatus.OK,
            "request_time": START + timedelta(seconds=n),
            "response_time": START + timedelta(seconds=n, microseconds=1500),
            "duration_ms": 1.5,
            "finish_reasons": ("stop",),
            "usage": {"total_tokens": 5},
            "attributes": {"pinned": None, "text": "é\u0000"},
            "tokens": CallTokens((1, 2, 2**31 - 1), (n % 100,), (-0.1,)),
        }
        return Call(**{**values, **fields})

    return make


@pytest.fixture
def make_score() -> Callable[..., Score]:
    def make(target_id: str, value: float = 1.0, **fields: Any) -> Score:
        values: dict[str, Any] = {
            "target_kind": "trace",
            "target_id": target_id,
            "name": "right_function",
            "value": value,
            "source": ScoreSource.BUSINESS,
            "scorer": "dispatch-desk",
            "scorer_version": "1",
            "at": START,
            "explanation": '{"expected": "weather"}',
        }
        return Score(**{**values, **fields})

    return make


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a store without a schema, on each of the two databases."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path / 'home' / 'online.db'}"


@pytest.fixture
def online(tmp_path: Path) -> Iterator[OnlineStore]:
    store = OnlineStore(f"sqlite:///{tmp_path / 'home' / 'online.db'}")
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path / "ware house's")
