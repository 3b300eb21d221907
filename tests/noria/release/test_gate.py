import json
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.config import GateConfig
from noria.contracts.errors import InvalidRecord
from noria.contracts.report import EvalReport, Guardrail, PairedScore, Verdict
from noria.release.gate import decide, report_from_json, report_to_json, valid_share, validation_not_worse
from noria.release.report_page import interval_png, report_html, report_markdown

GATE = GateConfig(resamples=500)
BROKEN = Guardrail("speed", 2.0, 1.0, False, "twice as slow")
HELD = replace(BROKEN, ok=True)


def pairs(candidate: Sequence[float], baseline: Sequence[float]) -> list[PairedScore]:
    return [
        PairedScore(f"item-{k}", c, b, f"answer {c}", f"answer {b}")
        for k, (c, b) in enumerate(zip(candidate, baseline, strict=True))
    ]


def report(scored: Sequence[PairedScore], **changes: Any) -> EvalReport:
    arguments: dict[str, Any] = {
        "round": "shop.router.r00003",
        "target": "shop.router",
        "candidate": "shop.router.r00003",
        "baseline": "shop.router.r00001",
        "suite": "suites/shop.router/abc.parquet",
        "suite_sha256": "abc" * 20,
        "scorer": "rewards.py:router",
        "scorer_version": "123456789abc",
        "gate": GATE,
        "seed": 5,
    }
    return decide(scored, **{**arguments, **changes})


BETTER = pairs([1.0] * 60 + [0.0] * 40, [1.0] * 20 + [0.0] * 80)
WORSE = pairs([1.0] * 20 + [0.0] * 80, [1.0] * 60 + [0.0] * 40)
ALIKE = pairs([1.0, 0.0] * 30, [0.0, 1.0] * 30)


@pytest.mark.parametrize(
    ("scored", "changes", "verdict", "reason"),
    [
        (BETTER, {}, Verdict.PASS, "Better by +0.400 on 100 items"),
        (BETTER, {"guardrails": [HELD]}, Verdict.PASS, "Better by"),
        (BETTER, {"guardrails": [HELD, BROKEN]}, Verdict.FAIL, "speed: twice as slow"),
        (BETTER, {"gate": GateConfig(resamples=500, margin=0.45)}, Verdict.INCONCLUSIVE, "margin of 0.45"),
        (BETTER, {"candidate": "shop.router.r00001"}, Verdict.INCONCLUSIVE, "is what is live already"),
        (BETTER, {"candidate": "base", "baseline": "shop.router.r00000"}, Verdict.INCONCLUSIVE, "live already"),
        (WORSE, {}, Verdict.FAIL, "Worse by -0.400"),
        (ALIKE, {}, Verdict.INCONCLUSIVE, "Not told apart: +0.000"),
        (ALIKE, {"guardrails": [BROKEN]}, Verdict.FAIL, "guardrail is broken"),
        (pairs([1.0] * 5, [0.0] * 5), {}, Verdict.INCONCLUSIVE, "Only 5 items tell them apart"),
        (pairs([0.0] * 5, [1.0] * 5), {}, Verdict.INCONCLUSIVE, "Only 5 items tell them apart"),
        (pairs([1.0] * 6, [0.0] * 6), {}, Verdict.PASS, "+1.000 on 6 items"),
        (pairs([1.0] * 50, [1.0] * 50), {}, Verdict.INCONCLUSIVE, "Only 0 items"),
    ],
)
def test_the_verdict_follows_from_the_numbers_and_says_so(
    scored: list[PairedScore], changes: dict[str, Any], verdict: Verdict, reason: str
) -> None:
    made = report(scored, **changes)
    assert made.verdict is verdict
    assert reason in made.reason
    assert made.reason.endswith(".")
    assert made.pairs == tuple(scored)
    assert made.candidate_score.mean == pytest.approx(sum(p.candidate for p in scored) / len(scored))
    assert made.baseline_score.mean == pytest.approx(sum(p.baseline for p in scored) / len(scored))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=20))
def test_exchanging_the_versions_never_passes_both(scores: list[tuple[float, float]]) -> None:
    one = report(pairs([c for c, _ in scores], [b for _, b in scores]))
    other = report(pairs([b for _, b in scores], [c for c, _ in scores]))
    assert {one.verdict, other.verdict} != {Verdict.PASS}
    if one.verdict is Verdict.PASS:
        assert one.difference.low > 0
        assert other.difference.mean < 0


def test_bad_scores_are_refused() -> None:
    with pytest.raises(InvalidRecord, match="candidate 0 is nan"):
        report(pairs([float("nan")], [0.0]))
    with pytest.raises(InvalidRecord, match="no items"):
        report([])
    with pytest.raises(InvalidRecord, match=r"item 'item-0' .* twice"):
        report([*BETTER, BETTER[0]])


def test_the_guardrail_on_valid_answers_breaks_on_clear_loss_only() -> None:
    lost = valid_share(pairs([0.0] * 12 + [1.0] * 28, [0.1] * 40), gate=GATE, seed=1)
    assert not lost.ok
    assert lost.value < 0
    assert "70.0%" in lost.explanation
    assert "100.0%" in lost.explanation
    assert valid_share(pairs([0.0] * 3 + [1.0] * 37, [0.1] * 40), gate=GATE, seed=1).ok, "three items are no evidence"
    assert valid_share(pairs([0.1] * 40, [1.0] * 40), gate=GATE, seed=1).ok, "worth less, but still valid"
    assert valid_share(BETTER, gate=GATE, seed=1).ok


def test_the_guardrail_on_validation_breaks_on_a_loss_beyond_tolerance_and_chance() -> None:
    gate = GateConfig(resamples=500, validation_tolerance=0.05)

    def guardrail(lost: int, kept: int) -> Guardrail:
        return validation_not_worse(pairs([0.0] * lost + [1.0] * kept, [1.0] * (lost + kept)), gate=gate, seed=0)

    assert guardrail(2, 28).ok  # -0.067, but two items out of thirty may be chance
    broken = guardrail(20, 10)
    assert not broken.ok
    assert broken.value < -0.05
    assert "-0.667 on 30 validation samples" in broken.explanation
    assert validation_not_worse([], gate=gate, seed=0).ok


def test_a_report_survives_json() -> None:
    made = report(BETTER, guardrails=[HELD, BROKEN])
    text = report_to_json(made)
    assert report_from_json(text) == made
    assert json.loads(text)["verdict"] == "fail"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"pairs": 1}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecord, match="no evaluation report"):
        report_from_json(text)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_it_all_and_runs_nothing_of_what_models_answer() -> None:
    evil = '<script>alert(1)</script> | "quoted" `code`\nsecond line'
    made = report([replace(BETTER[0], candidate_answer=evil), *BETTER[1:]], guardrails=[HELD])
    page = _Page()
    page.feed(report_html(made))
    assert "script" not in page.tags
    assert evil in page.text
    assert made.reason in page.text
    assert page.tags.count("tr") == 1 + 3 + 1 + 1 + 1 + 100
    assert page.tags.count("img") == 1


def test_the_markdown_keeps_its_tables_whole() -> None:
    evil = "a | b\n<b>bold</b> [link](http://x)"
    made = report([replace(BETTER[30], candidate_answer=evil), *BETTER[:30]], guardrails=[BROKEN])
    text = report_markdown(made, items=3)
    rows = [line for line in text.splitlines() if line.startswith("| item-")]
    assert len(rows) == 3
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)
    assert "<b>" not in text
    assert made.baseline in text


@pytest.mark.parametrize("scored", [BETTER, WORSE, ALIKE, pairs([1.0], [1.0])])
def test_the_picture_is_a_png(scored: list[PairedScore]) -> None:
    data = interval_png(report(scored, gate=GateConfig(resamples=500, margin=0.02)))
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 5000
