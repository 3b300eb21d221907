import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noria.contracts.errors import ConfigError, IntegrityError, InvalidRecord, NotFound
from noria.stores.artifacts import Artifacts

ROUND = "dispatch.router.r00001"


@pytest.fixture(params=["local", "memory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path / "artifacts" if request.param == "local" else f"memory://{tmp_path.name}/artifacts")


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path / "artifacts")


def test_files_anywhere(anywhere: Artifacts) -> None:
    anywhere.write_json("a/b.json", {"é": [1, None]})
    anywhere.write_json("a/b.json", {"é": [2, None]})
    assert anywhere.read_json("a/b.json") == {"é": [2, None]}
    assert anywhere.exists("a/b.json")
    assert not anywhere.exists("a/c.json")
    assert anywhere.list_dir("a") == ["b.json"]
    assert anywhere.list_dir("nothing") == []
    assert len(anywhere.sha256("a/b.json")) == 64
    assert anywhere.completed("a") is None
    anywhere.mark_complete("a", {"healthy": True})
    assert anywhere.completed("a") == {"healthy": True}
    for read in (anywhere.read_json, anywhere.read_parquet, anywhere.sha256, anywhere.sha256_dir):
        with pytest.raises(NotFound, match=r"no (file|folder) a/none below"):
            read("a/none")


def test_parquet_bytes_depend_on_rows_and_metadata_alone(anywhere: Artifacts) -> None:
    table = pa.table({"id": range(100), "input": [f"query {n % 7}" for n in range(100)]})
    chunked = pa.concat_tables([table.slice(0, 33), table.slice(33)])
    anywhere.write_parquet("one.parquet", table, {"round": ROUND, "seed": "0"})
    anywhere.write_parquet("two.parquet", chunked, {"seed": "0", "round": ROUND})
    assert anywhere.sha256("one.parquet") == anywhere.sha256("two.parquet")
    found = anywhere.read_parquet("one.parquet")
    assert found.equals(table)
    assert found.schema.metadata == {b"round": ROUND.encode(), b"seed": b"0"}
    anywhere.write_parquet("three.parquet", table)
    assert anywhere.read_parquet("three.parquet").schema.metadata is None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(artifacts: Artifacts) -> None:
    artifacts.write_bytes("a", b"old")
    with pytest.raises(TypeError):
        artifacts.write_bytes("a", "not bytes")  # type: ignore[arg-type]
    assert artifacts.read_bytes("a") == b"old"
    assert os.listdir(artifacts.root) == ["a"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifacts.write_json("a", float("nan"))
    artifacts.write_bytes("a", b"{")
    with pytest.raises(IntegrityError, match="a is not valid JSON"):
        artifacts.read_json("a")


def test_paths_stay_below_the_root(artifacts: Artifacts, tmp_path: Path) -> None:
    artifacts.write_bytes(str(artifacts.local("rounds/x")), b"1")
    assert artifacts.read_bytes("rounds/x") == b"1"
    for path in ("../x", "a/../../x", str(tmp_path / "x"), "/etc/passwd"):
        with pytest.raises(InvalidRecord, match="leaves the artifact folder"):
            artifacts.write_bytes(path, b"")


def test_links_and_local_paths(artifacts: Artifacts) -> None:
    assert artifacts.url("a b") == f"file://{artifacts.root}/a%20b"
    memory = Artifacts("memory://bucket")
    assert memory.url("a") == "memory:///bucket/a"
    with pytest.raises(ConfigError, match="needed as a local file, but artifacts are at memory://"):
        memory.local("a")


def test_hash_of_a_folder_is_that_of_sha256sum(artifacts: Artifacts) -> None:
    for name in ("b.bin", "a/c.bin", "a.bin"):
        artifacts.write_bytes(f"model/{name}", name.encode())
    shell = "find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    out = subprocess.run(shell, shell=True, cwd=artifacts.local("model"), capture_output=True, text=True, check=True)
    assert artifacts.sha256_dir("model") == out.stdout.split()[0]
    assert artifacts.sha256_file(artifacts.local("model/a.bin")) == artifacts.sha256("model/a.bin")


def test_a_version_is_there_when_its_marker_is(artifacts: Artifacts) -> None:
    for name, directory, asset in (
        ("base", "base", "asset cold_start"),
        ("dispatch.reply.r00000", "base", "asset cold_start"),
        (ROUND, f"rounds/{ROUND}/checkpoint", f"asset checkpoint, partition {ROUND}"),
    ):
        if not artifacts.exists(directory):
            artifacts.write_bytes(f"{directory}/model/config.json", b"{}")
            with pytest.raises(NotFound, match=f"not complete in .*; materialize the {asset}"):
                artifacts.version_dir(name)
            artifacts.mark_complete(directory, {})
        assert artifacts.version_dir(name) == artifacts.local(f"{directory}/model")
    for name in ("gpt-5", "../base", ""):
        with pytest.raises(NotFound, match="is 'base' or a round key"):
            artifacts.version_dir(name)
    with pytest.raises(InvalidRecord):
        artifacts.round_dir("base")


RECORDS = st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=3), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(records=RECORDS, more=RECORDS, cut=st.integers(min_value=0))
def test_a_log_cut_anywhere_keeps_every_whole_line(
    artifacts: Artifacts, records: list[dict[str, object]], more: list[dict[str, object]], cut: int
) -> None:
    file = artifacts.local("log.jsonl")
    file.unlink(missing_ok=True)
    for record in records:
        artifacts.append_jsonl("log.jsonl", record)
    assert artifacts.read_jsonl("log.jsonl") == records
    data = file.read_bytes() if file.exists() else b""
    torn = data[: cut % (len(data) + 1)]  # what a crash left of it
    artifacts.write_bytes("log.jsonl", torn)
    whole = records[: torn.count(b"\n")]
    assert artifacts.read_jsonl("log.jsonl") == whole
    for record in more:
        artifacts.append_jsonl("log.jsonl", record)
    assert artifacts.read_jsonl("log.jsonl") == whole + more


def test_a_long_torn_line_is_cut_off(artifacts: Artifacts) -> None:
    artifacts.write_bytes("log.jsonl", b'{"a": 1}\n' + b"x" * 200_000)
    artifacts.append_jsonl("log.jsonl", {"a": 2})
    assert artifacts.read_bytes("log.jsonl") == b'{"a": 1}\n{"a": 2}\n'
    artifacts.write_bytes("log.jsonl", b"x" * 200_000)
    artifacts.append_jsonl("log.jsonl", {"a": 3})
    assert artifacts.read_bytes("log.jsonl") == b'{"a": 3}\n'


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b""])
def test_a_bad_line_in_the_middle_is_named(artifacts: Artifacts, line: bytes) -> None:
    artifacts.write_bytes("log.jsonl", b'{"a": 1}\n' + line + b"\n{}\n")
    with pytest.raises(IntegrityError, match=r"log\.jsonl, line 2"):
        artifacts.read_jsonl("log.jsonl")


def test_two_processes_append_to_one_log(artifacts: Artifacts) -> None:
    script = f"""
import sys
from noria.stores.artifacts import Artifacts
for n in range(50):
    Artifacts({artifacts.root!r}).append_jsonl("log.jsonl", {{"by": sys.argv[1], "n": n, "text": "x" * 5000}})
"""
    processes = [subprocess.Popen([sys.executable, "-c", script, name]) for name in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    records = artifacts.read_jsonl("log.jsonl")
    for name in "ab":
        assert [record["n"] for record in records if record["by"] == name] == list(range(50))
