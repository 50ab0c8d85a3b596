"""The report as one HTML page without scripts or other files. All text from source files is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from acclimate_port import __version__
from acclimate_port.engine import Site, Status
from acclimate_port.files.workers import FileResult
from acclimate_port.output.formats import counts, diff

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --add: #ddf4e2; --del: #fbdcdc; }
:root { --dim: #5f5f5f; --bad: #a40e26; background: #fff; color: #1a1a1a; --link: #0047ab; }
@media (prefers-color-scheme: dark) {
  :root { background: #161616; color: #ececec; --link: #8ab4f8; }
  :root { --add: #12361f; --del: #451a1e; --dim: #a5a5a5; --bad: #ff8a93; }
}
a { color: var(--link); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .6rem;
border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } td code { overflow-wrap: anywhere; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .5rem 0; }
pre span { display: block; padding: 0 .75rem; white-space: pre; min-height: 1.45em; }
.add { background: var(--add); } .del { background: var(--del); } .hunk { color: var(--dim); }
details { margin: .5rem 0; } summary { cursor: pointer; } .failed { color: var(--bad); }
"""

_WORDS = {
    Status.CONVERTED: "converted",
    Status.UNSAFE: "needs --unsafe",
    Status.LEFT: "left",
    Status.EXEMPT: "not hardware-specific",
}


def page(results: Sequence[FileResult], target: str) -> str:
    """The report."""
    told = [result for result in results if result.sites or result.failure]
    return "".join(_page(told, target))


def _page(results: Sequence[FileResult], target: str) -> Iterator[str]:
    yield "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
    yield "<meta name='viewport' content='width=device-width'>"
    yield f"<title>acclimate port</title><style>{_STYLE}</style></head><body>\n"
    total = counts(results)
    yield f"<h1>acclimate port --to {escape(target)}</h1>\n<p>"
    yield ", ".join(f"<b>{total[status]}</b> {escape(word)}" for status, word in _WORDS.items())
    yield f"; {len(results)} files. acclimate {escape(__version__)}.</p>\n"
    yield "<table><tr><th>File</th>"
    yield "".join(f"<th class='n'>{escape(word)}</th>" for word in _WORDS.values())
    yield "</tr>\n"
    for number, result in enumerate(results):
        own = counts([result])
        yield f"<tr><td><a href='#f{number}'><code>{escape(str(result.path))}</code></a></td>"
        yield "".join(f"<td class='n'>{own[status] or ''}</td>" for status in _WORDS)
        yield "</tr>\n"
    yield "</table>\n"
    for number, result in enumerate(results):
        yield from _file(number, result)
    yield "</body></html>\n"


def _file(number: int, result: FileResult) -> Iterator[str]:
    yield f"<h2 id='f{number}'><code>{escape(str(result.path))}</code></h2>\n"
    if result.failure:
        yield f"<p class='failed'>Not ported: {escape(result.failure)}</p>\n"
    for status in (Status.LEFT, Status.UNSAFE, Status.EXEMPT):
        sites = [site for site in result.sites if site.status is status]
        if sites:
            yield from _sites(_WORDS[status], sites, is_open=status is not Status.EXEMPT)
    if result.changed:
        yield "<details open><summary>Changes</summary><pre>"
        for line in diff(result):
            kind = {"+": "add", "-": "del", "@": "hunk"}.get(line[:1], "")
            kind = "" if line.startswith(("+++", "---")) else kind
            yield f"<span class='{kind}'>{escape(line.rstrip(chr(10)))}</span>"
        yield "</pre></details>\n"


def _sites(title: str, sites: Sequence[Site], is_open: bool) -> Iterator[str]:
    yield f"<details{' open' if is_open else ''}><summary>{escape(title)}: {len(sites)}</summary><table>\n"
    for site in sites:
        yield f"<tr><td class='n'>{site.line}</td><td>{escape(site.code)}</td>"
        after = f"<pre><span class='add'>{escape(site.after)}</span></pre>" if site.after else ""
        yield f"<td><code>{escape(site.text)}</code>{after}</td><td>{escape(site.reason)}</td></tr>\n"
    yield "</table></details>\n"
