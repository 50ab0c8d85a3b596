"""A report as one HTML file: no script, nothing from the network, light or dark like the reader's system."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup, escape

from acclimate.host.replace_file import replace_file
from acclimate_conformance.result import Report, Tally

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
    replace_file(path, page(report).encode())


def page(report: Report) -> str:
    """The whole document."""
    environment = Environment(autoescape=True)
    environment.filters |= {"show": _shown, "marked": _marked, "named": _named, "anchor": _anchor}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    categories = list(
        dict.fromkeys(
            name for name in [*(r.category for r in report.results), *(c.category for c in report.not_run)]
        )
    )
    tallies = {tally.category: tally for tally in report.tallies}
    return template.render(
        report=report,
        written=datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M UTC"),
        categories=categories,
        tallies={name: tallies.get(name, Tally(name, 0, 0, 0)) for name in categories},
        results={name: [r for r in report.results if r.category == name] for name in categories},
        left={name: [check for check in report.not_run if check.category == name] for name in categories},
    )


def _shown(text: str) -> str:
    """Any text, including a vendor's messages, without what a page cannot show."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more characters)"
    return _UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _marked(text: str) -> Markup:
    """The text of a docstring, with its code marked as code."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"``\1``", _shown(text))
    return Markup(re.sub(r"``(.+?)``", r"<code>\1</code>", str(escape(plain))))


def _named(text: str) -> Markup:
    """``name: words``, the name as code."""
    name, colon, words = text.partition(": ")
    return Markup("<code>{}</code>{}{}").format(_shown(name), colon, _marked(words))


def _anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)
