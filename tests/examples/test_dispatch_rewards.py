import json
from pathlib import Path

import pytest

from examples.dispatch import data, suites
from examples.dispatch.logs import imperfect_logs
from examples.dispatch.prompts import reply_messages, router_messages
from noria.loading import load_function
from noria.rewards.reward import Attempt, load_reward

ROOT = Path(__file__).resolve().parents[2]


def router_attempt(output: str, reference: dict | None = None) -> Attempt:
    if reference is None:
        reference = {"right_function": {"value": 0.0, "explanation": {"expected": "Music_3_LookupMusic"}}}
    return Attempt("router", json.dumps({"messages": router_messages("rock")}), output, None, reference)


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ('{"name": "Music_3_LookupMusic"}', 1.0),
        (' {"name":"Music_3_LookupMusic"}\n', 1.0),
        ('{"name": "Weather_1_GetWeather"}', 0.1),
        ('{"name": "no such tool"}', 0.1),
        ('{"name": 3}', 0.0),
        ('{"tool": "Music_3_LookupMusic"}', 0.0),
        ('["name"]', 0.0),
        ('{"name": "Music_3_LookupMusic"', 0.0),
        ("Music_3_LookupMusic", 0.0),
        ("", 0.0),
    ],
)
def test_router_reward(output, reward):
    assert load_reward("examples/dispatch/rewards.py:router", ROOT)(router_attempt(output)).total == reward


@pytest.mark.parametrize("reference", [{}, {"right_function": {"value": 1.0, "explanation": "none"}}])
def test_without_feedback_no_tool_is_right(reference):
    judge = load_reward("examples/dispatch/rewards.py:router", ROOT)
    assert judge(router_attempt('{"name": "Music_3_LookupMusic"}', reference)).total == 0.1


@pytest.mark.parametrize(
    ("tool", "found", "output", "parts"),
    [
        ("Music_3_LookupMusic", 3, "I found 3 songs.", (0.5, 0.4, 0.1)),
        ("Music_3_LookupMusic", 3, "There are three songs for you!", (0.5, 0.4, 0.1)),
        ("Music_3_LookupMusic", 1, "I found 1 song.", (0.5, 0.4, 0.1)),
        ("Music_3_LookupMusic", 0, "I found no songs.", (0.5, 0.4, 0.1)),
        ("Music_3_LookupMusic", 3, "I found no songs.", (0.0, 0.4, 0.1)),
        ("Music_3_LookupMusic", 3, "I found 3 movies.", (0.5, 0.0, 0.1)),
        ("Music_3_LookupMusic", 3, "I found 3 songs", (0.5, 0.4, 0.0)),
        ("Music_3_LookupMusic", 3, "1 2 3 4 songs movies events.", (0.0, 0.0, 0.1)),
        ("Music_3_LookupMusic", 3, "I found 3 songs. I found 3 songs.", (0.5, 0.4, 0.0)),
        ("unknown", 0, "I found 0 results.", (0.5, 0.4, 0.1)),
        ("Music_3_LookupMusic", 3, "", (0.0, 0.0, 0.0)),
        ("Music_3_LookupMusic", 3, ".", (0.0, 0.0, 0.0)),
    ],
)
def test_reply_reward(tool, found, output, parts):
    messages = reply_messages({"tool": tool, "found": found})
    judge = load_reward("examples/dispatch/rewards.py:reply", ROOT)
    for text in (
        json.dumps({"messages": messages}),
        json.dumps(messages),
    ):  # a suite's body, a trajectory's observation
        rewarded = judge(Attempt("reply", text, output))
        assert tuple(rewarded.components[key] for key in ("count", "thing", "sentence")) == parts
        assert (rewarded.total == 1.0) == (all(parts))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "no json"])
def test_reply_reward_of_a_request_without_a_result_is_nothing(text):
    judge = load_reward("examples/dispatch/rewards.py:reply", ROOT)
    attempt = Attempt("reply", json.dumps({"messages": [{"role": "user", "content": text}]}), "I found 3 songs.")
    assert judge(attempt).total == 0.0


def test_the_reply_logs_are_right_in_about_a_third():
    judge = load_reward("examples/dispatch/rewards.py:reply", ROOT)
    rows = [row for row in imperfect_logs(0) if row["prompt"][0]["content"] == "reply"]
    totals = [judge(Attempt("reply", json.dumps(row["prompt"]), row["completion"][0]["content"])).total for row in rows]
    assert sum(total == 1.0 for total in totals) / len(totals) == pytest.approx(0.35, abs=0.002)
    assert sum(total >= 0.6 for total in totals) / len(totals) == pytest.approx(0.78, abs=0.06)  # the count is right


def test_the_router_suite_asks_every_held_out_query():
    items = list(load_function("examples/dispatch/suites.py:router", ROOT)())
    assert len(items) == len({item["item"] for item in items}) == len(data.held_out()) == 174
    expected = {query.text: query.tool for query in data.held_out()}
    judge = load_reward("examples/dispatch/rewards.py:router", ROOT)
    for item in items:
        messages = json.loads(item["input"])["messages"]
        answer = json.dumps({"name": expected[messages[-1]["content"]]})
        assert messages == router_messages(messages[-1]["content"])
        assert judge(Attempt("router", item["input"], answer, None, item["reference"])).total == 1.0


def test_the_reply_suite_asks_results_of_its_own():
    items = list(suites.reply())
    texts = {json.loads(item["input"])["messages"][-1]["content"] for item in items}
    assert len(items) == len({item["item"] for item in items}) == len(texts) == 39
    assert all(data.is_held_out(text) for text in texts)
