import json
from pathlib import Path
from typing import Any

from resources.trainer import Tail


def lines(steps: range, **extra: Any) -> str:
    return "".join(json.dumps({"step": step, **extra}) + "\n" for step in steps)


def steps(tail: Tail) -> list[int]:
    return [record["step"] for record in tail.new_records()]


def replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def test_a_tail_reads_each_whole_line_once(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    tail = Tail(log)
    assert steps(tail) == []
    log.write_text(lines(range(1, 3)) + '{"st')
    assert steps(tail) == [1, 2]
    with log.open("a") as file:
        file.write('ep": 3}\n')
    assert steps(tail) == [3]
    assert [record["step"] for record in tail.records] == [1, 2, 3]


def test_a_log_that_a_resumed_training_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    # The killed training had written three steps and was saved at two; the lines of the resumed one are of other
    # lengths, so that the old position lies in the middle of a line.
    log = tmp_path / "log.jsonl"
    log.write_text(lines(range(1, 4)))
    tail = Tail(log)
    assert steps(tail) == [1, 2, 3]
    replace(log, lines(range(1, 3)) + lines(range(3, 9), loss=-0.123456))
    assert steps(tail) == [3, 4, 5, 6, 7, 8]
    assert [record["step"] for record in tail.records] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_log_that_is_replaced_between_two_looks_shows_no_step_twice(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(lines(range(1, 4)))
    tail = Tail(log)
    assert steps(tail) == [1, 2, 3]
    replace(log, lines(range(1, 3)))
    assert steps(tail) == []
    with log.open("a") as file:
        file.write(lines(range(3, 5), loss=0.5))
    assert steps(tail) == [3, 4]
