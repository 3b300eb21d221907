"""An evaluation report as a person reads it: Markdown for the UI, a page of HTML, and a picture of the intervals."""

import base64
import html
import io
from collections.abc import Sequence

from noria.contracts.report import EvalReport, Interval, PairedScore, Verdict

_COLOURS = {Verdict.PASS: "#2a7f4f", Verdict.FAIL: "#b03a2e", Verdict.INCONCLUSIVE: "#8a6d1d"}
_ANSWER_CHARACTERS = 80


def report_markdown(report: EvalReport, items: int = 10) -> str:
    """The report in Markdown: verdict, reason, scores, guardrails, and the `items` that differ most."""
    lines = [
        f"## {report.verdict.value.upper()}: {report.candidate} against {report.baseline}",
        "",
        _cell(report.reason, None),
        "",
        f"| {len(report.pairs)} items | mean | {report.difference.confidence:.0%} interval |",
        "|---|---:|---:|",
    ]
    lines += [f"| {name} | {interval.mean:+.3f} | {_range(interval)} |" for name, interval in _intervals(report)]
    lines += ["", "| guardrail | value | limit | holds | |", "|---|---:|---:|---|---|"]
    lines += [
        f"| {g.name} | {g.value:+.3f} | {g.limit:+.3f} | {'yes' if g.ok else 'no'} | {_cell(g.explanation, None)} |"
        for g in report.guardrails
    ]
    lines += ["", f"| item | {report.candidate} | | {report.baseline} | |", "|---|---|---:|---|---:|"]
    lines += [
        f"| {_cell(pair.item)} | {_cell(pair.candidate_answer)} | {pair.candidate:.2f} "
        f"| {_cell(pair.baseline_answer)} | {pair.baseline:.2f} |"
        for pair in _most_different(report.pairs, items)
    ]
    lines += [
        "",
        f"Scored by {report.scorer} version {report.scorer_version}, seed {report.seed}, on {_suite(report)}.",
    ]
    return "\n".join(lines) + "\n"


def report_html(report: EvalReport) -> str:
    """The whole report as one page without outside references; every text in it is escaped."""
    picture = base64.b64encode(interval_png(report)).decode()
    intervals = [(name, f"{i.mean:+.3f}", _range(i)) for name, i in _intervals(report)]
    guardrails = [
        (g.name, f"{g.value:+.3f}", f"{g.limit:+.3f}", "yes" if g.ok else "no", g.explanation)
        for g in report.guardrails
    ]
    pairs = [
        (p.item, p.candidate_answer, f"{p.candidate:.2f}", p.baseline_answer, f"{p.baseline:.2f}")
        for p in _most_different(report.pairs, len(report.pairs))
    ]
    title = f"{report.verdict.value}: {report.candidate} against {report.baseline}"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>',
            "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}",
            "table{border-collapse:collapse;margin:1rem 0}td,th{border-bottom:1px solid #ddd;padding:.2rem .7rem;"
            "text-align:left;vertical-align:top}img{max-width:100%}",
            "</style></head><body>",
            f'<h1 style="color:{_COLOURS[report.verdict]}">{html.escape(title)}</h1>',
            f"<p>{html.escape(report.reason)}</p>",
            f'<img alt="Mean scores with their intervals" src="data:image/png;base64,{picture}">',
            _table(("", "mean", f"{report.difference.confidence:.0%} interval"), intervals),
            _table(("guardrail", "value", "limit", "holds", ""), guardrails),
            _table(("item", report.candidate, "score", report.baseline, "score"), pairs),
            f"<p>Scored by {html.escape(report.scorer)} version {html.escape(report.scorer_version)}, "
            f"seed {report.seed}, on {html.escape(_suite(report))}.</p>",
            "</body></html>",
            "",
        ]
    )


def interval_png(report: EvalReport) -> bytes:
    """A PNG of both scores with their intervals, and of the difference against 0 and the margin."""
    # Imported here: matplotlib takes half a second, and only whoever draws needs it. The figure is made without pyplot,
    # whose global state is not safe in the threads of a server.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    scores, difference = figure.subplots(1, 2, width_ratios=(3, 2))
    colour = _COLOURS[report.verdict]
    for row, interval in enumerate((report.candidate_score, report.baseline_score)):
        _draw(scores, row, interval, colour if row == 0 else "#555555")
        scores.text(interval.mean, row + 0.16, f"{interval.mean:.3f}", ha="center", fontsize=9)
    scores.set_yticks([0, 1], [f"candidate\n{report.candidate}", f"baseline\n{report.baseline}"], fontsize=8)
    scores.set_ylim(1.5, -0.5)
    scores.set_xlabel("mean score")
    scores.set_title(f"{len(report.pairs)} items", fontsize=10)
    _draw(difference, 0, report.difference, colour)
    difference.axvline(0.0, color="#999999", linewidth=1)
    if report.margin > 0:
        difference.axvline(report.margin, color="#999999", linewidth=1, linestyle="--")
    difference.set_yticks([])
    difference.set_ylim(0.8, -0.8)
    difference.set_xlabel("candidate minus baseline, paired")
    difference.set_title(report.verdict.value, fontsize=10, color=colour)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw(axes: object, row: int, interval: Interval, colour: str) -> None:
    errors = [[interval.mean - interval.low], [interval.high - interval.mean]]
    axes.errorbar([interval.mean], [row], xerr=errors, fmt="o", color=colour, capsize=4)  # type: ignore[attr-defined]


def _intervals(report: EvalReport) -> list[tuple[str, Interval]]:
    return [
        (report.candidate, report.candidate_score),
        (report.baseline, report.baseline_score),
        ("difference, paired", report.difference),
    ]


def _range(interval: Interval) -> str:
    return f"{interval.low:+.3f} to {interval.high:+.3f}"


def _suite(report: EvalReport) -> str:
    return f"suite {report.suite} (sha256 {report.suite_sha256[:16]})"


def _most_different(pairs: Sequence[PairedScore], count: int) -> list[PairedScore]:
    return sorted(pairs, key=lambda pair: (-abs(pair.candidate - pair.baseline), pair.item))[:count]


def _cell(text: str, limit: int | None = _ANSWER_CHARACTERS) -> str:
    """Text for one cell of a Markdown table: on one line, cut, with nothing that Markdown or HTML would read."""
    line = " ".join(text.split())
    if limit is not None and len(line) > limit:
        line = line[: limit - 1] + "…"
    line = html.escape(line, quote=False)
    for character in "\\`*_[]|":
        line = line.replace(character, "\\" + character)
    return line


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"
