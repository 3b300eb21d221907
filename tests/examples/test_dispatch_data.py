import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples.dispatch import data
from examples.dispatch.logs import imperfect_logs
from examples.dispatch.prompts import named_tool
from examples.dispatch.tool import NOUNS, results, run_tool

ROOT = Path(__file__).resolve().parents[2]


def test_the_twelve_tools_and_their_queries():
    assert len(data.tool_names()) == 12
    assert data.tool_names()[:2] == ("Movies_3_FindMovies", "Events_3_FindEvents")
    assert data.tool_names()[10:] == ("Homes_2_FindHomeByArea", "Services_4_FindProvider")  # 27 each: by name
    assert {query.tool for query in data.queries()} == set(data.tool_names())
    assert (len(data.queries()), len(data.traffic()), len(data.held_out())) == (547, 373, 174)


def test_no_query_stands_on_both_sides_or_twice():
    sides = [{data.normalized(query.text) for query in side} for side in (data.traffic(), data.held_out())]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == len(data.queries())
    assert all(Counter(query.tool for query in data.held_out())[tool] >= 5 for tool in data.tool_names())


def test_only_what_the_user_wrote_is_the_query():
    texts = [query.text for query in data.queries()]
    assert not any(text != text.strip() or not text for text in texts)
    assert not any("You are an AI" in text or text == "system" for text in texts)


def test_accepted_arguments_say_what_is_optional():
    weather = next(query for query in data.queries() if query.tool == "Weather_1_GetWeather")
    assert weather.arguments_accepted["city"]
    assert any("" in values for query in data.queries() for values in query.arguments_accepted.values())


def test_schemas_are_openai_tool_schemas():
    schemas = data.tools()
    assert [schema["type"] for schema in schemas] == ["function"] * 12
    kinds = set(re.findall(r'"type": "(\w+)"', json.dumps([schema["function"]["parameters"] for schema in schemas])))
    assert kinds <= {"object", "string", "number", "integer", "boolean", "array"}
    for schema in schemas:
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", schema["function"]["name"])
        assert schema["function"]["parameters"]["type"] == "object"


def test_a_parameter_called_type_stays_a_parameter():
    by_name = {schema["function"]["name"]: schema["function"] for schema in data.tools()}
    assert by_name["Services_4_FindProvider"]["parameters"]["properties"]["type"]["type"] == "string"


def test_a_missing_package_says_how_to_install_it():
    # -S leaves out site-packages, and with them the package
    code = "from examples.dispatch.data import queries; queries()"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "DataMissing: the example's queries are in the package bfcl-eval" in done.stderr
    assert "pip install --no-deps bfcl-eval" in done.stderr


def test_the_package_itself_is_not_imported():
    code = "import sys; from examples.dispatch.data import queries; queries(); print('bfcl_eval' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_every_tool_has_a_noun_of_its_own():
    assert set(NOUNS) == {*data.tool_names(), "unknown"}
    words = [word for noun in NOUNS.values() for word in (noun.singular, noun.plural)]
    assert len(set(words)) == len(words)


def test_the_tool_finds_the_same_again_and_nothing_for_what_is_no_tool():
    assert run_tool("Music_3_LookupMusic", "rock") == run_tool("Music_3_LookupMusic", "rock")
    found = {run_tool("Music_3_LookupMusic", query.text)["found"] for query in data.queries()}
    assert found == set(range(10))
    for name in (None, "unknown", "Music"):
        assert run_tool(name, "rock") == {"tool": "unknown", "found": 0}
    assert run_tool("Music_3_LookupMusic", "rock") in results()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_logs_are_imperfect_and_know_no_held_out_query(seed):
    rows = list(imperfect_logs(seed))
    right = {query.text: query.tool for query in data.traffic()}
    held_out = {query.text for query in data.held_out()}
    routed = [row for row in rows if row["prompt"][0]["content"] == "route"]
    replied = [row for row in rows if row["prompt"][0]["content"] == "reply"]
    assert len(routed) == len(replied) == len(right)
    assert not held_out & {row["prompt"][-1]["content"] for row in rows}
    named = [(row["prompt"][-1]["content"], named_tool(row["completion"][0]["content"])) for row in routed]
    wrong = [tool for text, tool in named if right[text] != tool]
    assert len(wrong) / len(named) == pytest.approx(0.7, abs=0.002)
    assert set(wrong) == set(data.tool_names())
    assert rows == list(imperfect_logs(seed))
    assert rows != list(imperfect_logs(seed + 1))
