import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from examples.dispatch import data
from examples.dispatch.prompts import reply_messages, router_messages
from examples.dispatch.tool import results

SQL = Path(__file__).resolve().parents[2] / "examples" / "dispatch" / "sql"
TRAFFIC = [query.text for query in data.traffic()]
HELD_OUT = [query.text for query in data.held_out()]
RESULTS = [result for result in results() if not data.is_held_out(reply_messages(result)[-1]["content"])]


class Warehouse:
    def __init__(self) -> None:
        self.connection = duckdb.connect()
        self.connection.execute(
            "CREATE TABLE calls (id BIGINT, tenant VARCHAR, app VARCHAR, process_node VARCHAR, trace_id VARCHAR, "
            "arm VARCHAR, input VARCHAR, status VARCHAR, consent BOOLEAN)"
        )
        self.connection.execute(
            "CREATE TABLE scores (target_kind VARCHAR, target_id VARCHAR, name VARCHAR, value DOUBLE, "
            "explanation VARCHAR)"
        )
        self.last = 0

    def call(self, trace: str, node: str, input: str, **changes: object) -> int:
        self.last += 1
        row = {"tenant": "default", "app": "dispatch", "arm": "live", "status": "ok", "consent": True, **changes}
        self.connection.execute(
            "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [self.last, row["tenant"], row["app"], node, trace, row["arm"], input, row["status"], row["consent"]],
        )
        return self.last

    def trace(
        self,
        text: str,
        *,
        node: str = "router",
        episode: str | None = "ok",
        explanation: str | None = '{"expected": "x"}',
        **changes: object,
    ) -> int:
        trace = f"t{self.last}"
        messages = router_messages(text) if node == "router" else reply_messages(json.loads(text))
        id = self.call(trace, node, json.dumps({"model": "base", "messages": messages}), **changes)
        if episode:
            self.call(trace, "end2end", json.dumps({"query": text}), status=episode)
        if explanation:
            self.connection.execute(
                "INSERT INTO scores VALUES ('trace', ?, 'right_function', 1.0, ?)", [trace, explanation]
            )
        return id

    def select(self, node: str = "router", seed: int = 0, round: int = 1) -> list[tuple[int, str]]:
        parameters = {"app": "dispatch", "node": node, "tenant": "default", "seed": seed, "round": round}
        return self.connection.execute((SQL / f"{node}.sql").read_text(), parameters).fetchall()

    def ids(self, **options: object) -> list[int]:
        return [id for id, _ in self.select(**options)]  # type: ignore[arg-type]


@pytest.fixture
def warehouse() -> Iterator[Warehouse]:
    made = Warehouse()
    yield made
    made.connection.close()


def test_a_sample_is_the_id_and_the_input_of_the_nodes_call(warehouse):
    id = warehouse.trace(TRAFFIC[0])
    ((selected, input),) = warehouse.select()
    assert selected == id
    assert json.loads(input)["messages"] == router_messages(TRAFFIC[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "upstream_error"},
        {"consent": False},
        {"arm": "rollout"},
        {"tenant": "other"},
        {"app": "other"},
        {"episode": None},
        {"episode": "upstream_error"},
        {"explanation": None},
        {"explanation": "free text"},
        {"explanation": '{"other": 1}'},
    ],
)
def test_what_must_not_be_learned_from_is_left_out(warehouse, changes):
    kept = warehouse.trace(TRAFFIC[0])
    warehouse.trace(TRAFFIC[1], **changes)
    assert warehouse.ids() == [kept]


def test_each_query_once_with_its_latest_call(warehouse):
    warehouse.trace(TRAFFIC[0])
    latest = warehouse.trace("  " + TRAFFIC[0].upper().replace(" ", "  "))
    assert warehouse.ids() == [latest]


def test_held_out_queries_are_never_selected(warehouse):
    for text in HELD_OUT:
        warehouse.trace(text)
    kept = {warehouse.trace(text) for text in TRAFFIC}
    assert set(warehouse.ids()) == kept


def test_the_order_depends_on_seed_and_round_alone(warehouse):
    for text in TRAFFIC[:30]:
        warehouse.trace(text)
    orders = [warehouse.ids(seed=seed, round=round) for seed, round in ((0, 1), (0, 2), (1, 1))]
    assert orders[0] == warehouse.ids(seed=0, round=1)
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_replies_need_no_feedback_and_leave_the_held_out_results(warehouse):
    kept = {warehouse.trace(json.dumps(result), node="reply", explanation=None) for result in RESULTS}
    for result in results():
        if result not in RESULTS:
            warehouse.trace(json.dumps(result), node="reply")
    latest = warehouse.trace(json.dumps(RESULTS[0]), node="reply")
    warehouse.trace(json.dumps(RESULTS[1]), node="reply", arm="rollout")
    selected = set(warehouse.ids(node="reply"))
    assert latest in selected
    assert len(selected) == len(RESULTS)
    assert len(selected & kept) == len(RESULTS) - 1


def test_an_input_that_is_no_chat_is_left_out(warehouse):
    for node in ("router", "reply"):
        trace = f"odd {node}"
        warehouse.call(trace, node, "no json")
        warehouse.call(trace, "end2end", "{}")
        warehouse.connection.execute(
            "INSERT INTO scores VALUES ('trace', ?, 'right_function', 1.0, '{\"expected\": \"x\"}')", [trace]
        )
        assert warehouse.ids(node=node) == []
