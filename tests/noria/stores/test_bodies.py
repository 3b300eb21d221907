"""Large strings of calls, moved to files and put back byte for byte."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import select

from noria.contracts.call import Call
from noria.contracts.errors import ConfigError, IntegrityError
from noria.stores.bodies import Bodies, externalize, has_large, restore
from noria.stores.bodies_rows import move_out, require_all
from noria.stores.online import OnlineStore, is_away
from noria.stores.tables import call_bodies, call_to_row

MakeCall = Callable[..., Call]

LIMIT = 1024
IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 20_000


def reference(data: str) -> str:
    return f'"noria:body:sha256:{hashlib.sha256(data.encode()).hexdigest()}"'


@pytest.fixture
def online(store_url: str, tmp_path: Path) -> Iterator[OnlineStore]:
    store = OnlineStore(store_url, bodies=Bodies(tmp_path / "bodies"), inline_max_bytes=LIMIT)
    store.upgrade()
    yield store
    store.close()


def request_with(*contents: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content} for content in contents]})


def test_large_strings_go_to_files_and_come_back(online: OnlineStore, make_call: MakeCall, tmp_path: Path) -> None:
    text = request_with("look", IMAGE, "again", IMAGE)
    records = [make_call(0, input=text), make_call(1, output=request_with(IMAGE)), make_call(2)]
    assert online.add_calls(records) == 3
    literal = json.dumps(IMAGE)
    sha256 = hashlib.sha256(literal.encode()).hexdigest()
    assert (tmp_path / "bodies" / sha256[:2] / sha256).read_text() == literal
    assert len(list((tmp_path / "bodies").rglob("*"))) == 2, "one folder, one file: the content is kept once"

    followed = online.calls_after(0, 10)
    assert len(followed[0].input) < 400
    assert json.loads(followed[0].input)["messages"][1]["content"] == f"noria:body:sha256:{sha256}"
    assert followed[0].attributes["large"] == {
        "input_bytes": len(text),
        "output_bytes": len(records[0].output),
        "sha256": [sha256],
    }
    assert followed[2] == replace(records[2], id=3), "nothing is said about a call without large strings"

    whole = online.trace(records[0].trace_id)
    assert [call.input for call in whole] == [records[0].input, records[1].input]
    assert [call.output for call in whole] == [records[0].output, records[1].output]
    assert online.call(1).input == text
    assert online.traces([records[0].trace_id]) == whole
    with online.read() as connection:
        rows = connection.execute(select(call_bodies).order_by(call_bodies.c.call_id)).all()
    assert [tuple(row) for row in rows] == [(1, sha256, len(literal)), (2, sha256, len(literal))]
    assert online.add_calls(records) == 0, "a replayed write stays idempotent"


def test_a_call_that_was_read_can_be_written_elsewhere(online: OnlineStore, make_call: MakeCall) -> None:
    online.add_calls([make_call(0, input=request_with(IMAGE))])
    assert online.add_calls([replace(online.call(1), uid="copy", id=None)]) == 1
    assert online.call(2) == replace(online.call(1), uid="copy", id=2)


def test_a_row_cannot_claim_content_that_is_not_its_own(online: OnlineStore, make_call: MakeCall) -> None:
    online.add_calls([make_call(0, tenant="a", input=request_with(IMAGE))])
    stolen = online.calls_after(0, 1)[0]
    thief = make_call(2, tenant="b", input=stolen.input, attributes={"large": stolen.attributes["large"]})
    also = make_call(3, tenant="b", input=stolen.input, output=request_with("y" * 2000))
    online.add_calls([thief, also])
    assert [call.input for call in online.trace(thief.trace_id)] == [stolen.input, stolen.input]
    assert online.call(2).attributes == {}


def test_what_looks_like_a_reference_survives_beside_its_own_content(online: OnlineStore, make_call: MakeCall) -> None:
    literal = json.dumps(IMAGE)
    for n, text in enumerate(
        [
            f"[{literal}, {reference(literal)}]",
            f'[{literal}, {{{reference(literal)}: 1, "a\\{reference(literal)[:-1]}\\"": {reference("other")}}}]',
            f"[{reference(literal)}]",
        ]
    ):
        online.add_calls([make_call(2 * n, input=text, output=reference(literal))])
        call = online.call(n + 1)
        assert call.input == text
        assert call.output == reference(literal)


@pytest.mark.parametrize(
    "text", ["no json at all " * 200, "\\" * 5000, '"' + "x" * 5000, '"' + '\\"' * 5000, "é" * 600]
)
def test_a_large_text_that_is_no_json_is_moved_as_a_whole(online: OnlineStore, make_call: MakeCall, text: str) -> None:
    online.add_calls([make_call(0, input=text)])
    assert len(online.calls_after(0, 1)[0].input) < 200
    assert online.call(1).input == text


class Kept(dict[str, bytes]):
    """Content in memory, by its hash."""

    def put(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        self[sha256] = data
        return sha256


PIECES = st.sampled_from(
    [
        '"',
        "\\",
        '\\"',
        "\\\\",
        "{",
        "}",
        "[",
        ",",
        ":",
        " ",
        "\n",
        "a",
        "é",
        "🜚",
        "x" * 90,
        "]",
        "-1.5e3, " * 20,
        "[" + "1," * 60 + "1]",
        reference("x"),
        reference('"' + "x" * 90 + '"'),
    ]
)


@given(st.lists(PIECES, max_size=30).map("".join), st.integers(1, 300))
@example('"\\', 1)
@example("[" + reference('"a"') + ', "a"]', 2)
def test_any_text_comes_back_byte_for_byte(text: str, limit: int) -> None:
    kept = Kept()
    stored = externalize(text, limit, kept.put)
    assert restore(stored, kept, kept.__getitem__) == text
    assert bool(kept) >= has_large(text, limit)
    if limit >= 200:
        assert not has_large(stored, limit), "what remains is small, or many small pieces"


@given(
    st.recursive(
        st.text(st.characters(codec="utf-8")) | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_stays_json(value: object) -> None:
    for ensure_ascii in (True, False):
        text = json.dumps([value, "x" * 200], ensure_ascii=ensure_ascii)
        kept = Kept()
        stored = externalize(text, 100, kept.put)
        assert isinstance(json.loads(stored), list)
        assert restore(stored, kept, kept.__getitem__) == text


def test_an_array_of_numbers_is_large_content_too(online: OnlineStore, make_call: MakeCall) -> None:
    output = json.dumps({"data": [{"index": n, "embedding": [n + 0.125] * 400} for n in range(3)], "usage": [1, 2]})
    online.add_calls([make_call(0, output=output)])
    stored = json.loads(online.calls_after(0, 1)[0].output)
    assert [item["embedding"][:18] for item in stored["data"]] == ["noria:body:sha256:"] * 3
    assert stored["usage"] == [1, 2]
    assert online.call(1).output == output


@pytest.mark.parametrize("unit", ["1,", "[1,", '"', '\\"', '"\\', "\\", 'a"', '"a",', "[", '{"a":'])
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    begun = time.process_time()
    for first in ('"', "["):
        text = first + unit * (500_000 // len(unit))
        kept = Kept()
        stored = externalize(text, 4096, kept.put)
        assert restore(stored, kept, kept.__getitem__) == text
    assert time.process_time() - begun < 5, "quadratic takes minutes"


def test_a_missing_or_changed_file_is_named(online: OnlineStore, make_call: MakeCall, tmp_path: Path) -> None:
    online.add_calls([make_call(0, input=request_with(IMAGE))])
    (path,) = (path for path in (tmp_path / "bodies").rglob("*") if path.is_file())
    path.write_text("other")
    with pytest.raises(IntegrityError, match=f"{path} has the SHA-256"):
        online.call(1)
    path.unlink()
    with pytest.raises(IntegrityError, match=f"{path} is missing"):
        online.trace(make_call(0).trace_id)
    assert online.calls_after(0, 10), "following does not need the files"
    assert len(online.trace(make_call(0).trace_id, whole=False)) == 1, "nor does a look at what stands in the row"


def test_a_store_that_was_opened_without_the_folder_says_so(online: OnlineStore, make_call: MakeCall) -> None:
    online.add_calls([make_call(0, input=request_with(IMAGE)), make_call(2)])
    plain = OnlineStore(online.url)
    with pytest.raises(ConfigError, match=r"call 1 has content in files.*bodies=Bodies"):
        plain.call(1)
    assert plain.call(2).input == make_call(2).input
    assert plain.add_calls([make_call(4, input=request_with(IMAGE))]) == 1
    assert plain.call(3).input == request_with(IMAGE), "without a folder it stays in the row"
    plain.close()


def test_a_file_that_retention_took_before_the_row_was_written_is_written_again(
    tmp_path: Path, make_call: MakeCall
) -> None:
    bodies = Bodies(tmp_path)
    rows = [call_to_row(make_call(0, input=request_with(IMAGE)))]
    references = move_out(bodies, rows, LIMIT)
    require_all(bodies, references)
    bodies.path(references[0]["sha256"]).unlink()
    with pytest.raises(FileNotFoundError, match="write again") as caught:
        require_all(bodies, references)
    assert is_away(caught.value), "so the writer does"
    move_out(bodies, [call_to_row(make_call(0, input=request_with(IMAGE)))], LIMIT)
    require_all(bodies, references)


def test_content_that_is_written_again_is_young_again(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path)
    sha256 = bodies.put(b"x")
    os.utime(bodies.path(sha256), (0, 0))
    assert list(bodies.older_than(time.time() - 60)) == [bodies.path(sha256)]
    assert bodies.put(b"x") == sha256
    assert list(bodies.older_than(time.time() - 60)) == []
    assert bodies.get(sha256) == b"x"
