"""A report as one HTML file: no script, nothing from the network, light or dark like the reader's system."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

from acclimate.host.replace_file import replace_file
from acclimate_conformance.result import Planned, Report, Result, Tally

_CLASSES = {"passed": "passed", "failed": "failed", "not offered": "absent", "not run": "not-run"}
"""The CSS class of each outcome."""
# Control characters, lone surrogates, and marks that change the direction of the text after them.
_UNSHOWABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u061b\u061d-\u200d\u2010-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd"
    "\U00010000-\U0010ffff]"
)
_LONGEST = 20_000
"""Characters of a text; a crash may leave megabytes."""


def write(report: Report, path: Path) -> None:
    """Writes the report.

    Raises:
        OSError: the file cannot be written; what was there before is still there.
    """
    replace_file(path, page(report).encode(errors="replace"))


def page(report: Report) -> str:
    """The whole document."""
    name = _text(report.about.accelerator)
    style = files("acclimate_conformance.runner").joinpath("report.css").read_text(encoding="utf-8")
    failed = report.with_outcome("failed")
    parts = [
        _header(report),
        _summary(report),
        _faults(failed),
        *(_category(report, tally) for tally in _all_tallies(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>Conformance of {name}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the results</a>\n'
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# -- what came out -----------------------------------------------------------------------------------


def _header(report: Report) -> str:
    about = report.about
    kind, verdict = _verdict(report)
    devices = "<br>".join(_text(device) for device in about.devices)
    facts = {
        "Class": f"<code>{_text(about.implementation)}</code>",
        "Devices": devices,
        "Software": _text(f"acclimate {about.acclimate}, torch {about.torch}, Python {about.python}"),
        "System": _text(about.system),
        "Written": datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M UTC")
        + f", after a run of {report.seconds:.0f} s",
    }
    rows = "\n".join(f"<dt>{term}</dt><dd>{value}</dd>" for term, value in facts.items())
    return (
        f"<header>\n<h1>Conformance of {_text(about.accelerator)}</h1>\n"
        f'<p class="verdict {kind}">{verdict}</p>\n<dl class="facts">\n{rows}\n</dl>\n</header>\n'
        '<main id="main">'
    )


def _verdict(report: Report) -> tuple[str, str]:
    total, left = report.total, len(report.not_run)
    applicable = total.passed + total.failed
    found = (
        f"Promises not kept: {total.failed} of {applicable}."
        if total.failed
        else f"Every promise that was checked is kept: {applicable} of {applicable}."
    )
    absent = f" Not offered by the device: {total.not_offered}." if total.not_offered else ""
    if left:
        planned = len(report.results) + left
        return (
            "failed" if total.failed else "not-run",
            f"The run was interrupted: {len(report.results)} of {planned} checks were run. {found}{absent}",
        )
    return "failed" if total.failed else "passed", found + absent


def _all_tallies(report: Report) -> list[Tally]:
    """By category in the order of the run, including those that it did not reach."""
    reached = {tally.category for tally in report.tallies}
    rest = dict.fromkeys(check.category for check in report.not_run if check.category not in reached)
    return [*report.tallies, *(Tally(category, 0, 0, 0) for category in rest)]


def _summary(report: Report) -> str:
    left = {tally.category: 0 for tally in _all_tallies(report)}
    for check in report.not_run:
        left[check.category] += 1
    shows_left = bool(report.not_run)
    heads = ["category", "passed", "failed", "not offered", *(["not run"] if shows_left else []), "score"]
    head = "".join(f'<th scope="col">{title}</th>' for title in heads)
    rows = "\n".join(
        _summary_row(
            f'<a href="#{_anchor(tally.category)}">{_text(tally.category)}</a>',
            tally,
            left[tally.category] if shows_left else None,
        )
        for tally in _all_tallies(report)
    )
    foot = _summary_row("all", report.total, len(report.not_run) if shows_left else None)
    return (
        '<section aria-labelledby="summary">\n<h2 id="summary">Summary</h2>\n'
        '<div class="wide" tabindex="0" role="region" aria-labelledby="summary">\n<table>\n'
        "<caption>Checks by category; the score is passed of passed and failed.</caption>\n"
        f'<thead><tr>{head}<th scope="col" class="left">share</th></tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        f"<tfoot>\n{foot}\n</tfoot>\n</table>\n</div>\n</section>"
    )


def _summary_row(name: str, tally: Tally, left: int | None) -> str:
    counts = {"passed": tally.passed, "failed": tally.failed, "absent": tally.not_offered}
    if left is not None:
        counts["not-run"] = left
    score = "-" if tally.score is None else f"{int(tally.score * 100)} %"
    whole = max(1, sum(counts.values()))
    bar = "".join(
        f'<span class="{kind}" style="width:{count / whole:.2%}"></span>'
        for kind, count in counts.items()
        if count
    )
    cells = "".join(f"<td>{count}</td>" for count in counts.values())
    return (
        f'<tr><th scope="row">{name}</th>{cells}<td>{score}</td>'
        f'<td><div class="bar" aria-hidden="true">{bar}</div></td></tr>'
    )


# -- what has to change --------------------------------------------------------------------------------


def _faults(failed: list[Result]) -> str:
    if not failed:
        return ""
    return (
        '<section aria-labelledby="faults">\n<h2 id="faults">What has to change</h2>\n'
        + "\n".join(_fault(result) for result in failed)
        + "\n</section>"
    )


def _fault(result: Result) -> str:
    parts = [
        f'<article class="fault" id="{_anchor("fault-" + result.check)}">',
        f"<h3>{_text(result.check)}</h3>",
        f"<p>Promised: {_marked(result.promise)}</p>",
        f'<h4>Observed</h4><p class="reason">{_text(result.reason)}</p>',
    ]
    if result.calls:
        *before, wrong = result.calls
        items = [f"<li><code>{_text(call)}</code></li>" for call in before]
        items.append(f'<li class="wrong"><code>{_text(wrong)}</code><span>← went wrong</span></li>')
        parts.append(f'<h4>Calls of the interface that led to it</h4><ol class="calls">{"".join(items)}</ol>')
    if result.changes:
        likeliest, *others = result.changes
        parts.append(f"<h4>Where to change it</h4><p>{_named(likeliest)}</p>")
        if others:
            rest = "".join(f"<li>{_named(change)}</li>" for change in others)
            parts.append(
                f'<details><summary>Others involved</summary><div><ul class="plain">{rest}</ul></div>'
                "</details>"
            )
    parts.append(f"<h4>What the interface says</h4>{_rules(result.rules)}")
    if result.place:
        parts.append(f"<h4>Seen by</h4><p><code>{_text(result.place)}</code></p>")
    if result.detail:
        parts.append(
            "<details><summary>Traceback, or what the process wrote</summary>"
            f'<div><pre tabindex="0">{_text(result.detail)}</pre></div></details>'
        )
    return "\n".join([*parts, "</article>"])


# -- every check -----------------------------------------------------------------------------------


def _category(report: Report, tally: Tally) -> str:
    anchor = _anchor(tally.category)
    results = [result for result in report.results if result.category == tally.category]
    left = [check for check in report.not_run if check.category == tally.category]
    rows = [*(_row(result) for result in results), *(_row_not_run(check) for check in left)]
    return (
        f'<section aria-labelledby="{anchor}">\n<h2 id="{anchor}">{_text(tally.category)}</h2>\n'
        + "\n".join(rows)
        + "\n</section>"
    )


def _row(result: Result) -> str:
    body = [_rules(result.rules)]
    if result.outcome == "failed":
        target = _anchor("fault-" + result.check)
        body.insert(0, f'<p><a href="#{target}">What was observed, and what has to change</a></p>')
    elif result.reason:
        body.insert(0, f'<p class="soft">{_text(result.reason)}</p>')
    return _details(result.outcome, result.check, result.promise, body)


def _row_not_run(check: Planned) -> str:
    return _details("not run", check.id, check.promise, [_rules(check.rules)])


def _details(outcome: str, check: str, promise: str, body: Iterable[str]) -> str:
    return (
        f'<details><summary><span class="badge {_CLASSES[outcome]}">{outcome}</span>'
        f"<h3>{_text(check.partition('/')[2])}</h3> <p>{_marked(promise)}</p></summary>"
        f"<div>{''.join(body)}</div></details>"
    )


def _rules(rules: Iterable[str]) -> str:
    items = "".join(f"<li>{_named(rule)}</li>" for rule in rules)
    return f'<ul class="plain">{items}</ul>'


def _named(text: str) -> str:
    """``name: words``, the name as code."""
    name, colon, words = text.partition(": ")
    return f"<code>{_text(name)}</code>{colon}{_marked(words)}"


def _marked(text: str) -> str:
    """The text of a docstring, with its code marked as code."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"``\1``", text)
    return re.sub(r"``(.+?)``", r"<code>\1</code>", _text(plain))


def _text(text: str) -> str:
    """Any text, including a vendor's messages, escaped for the document."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more characters)"
    return html.escape(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def _anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)
