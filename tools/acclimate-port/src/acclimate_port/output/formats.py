"""The output formats: diff, text, JSON, SARIF and GitHub annotations."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from acclimate_port import __version__
from acclimate_port.engine import Site, Status
from acclimate_port.files.workers import FileResult
from acclimate_port.rules import BY_NAME, RULES

_PAGES = "docs/port"


def diff(result: FileResult) -> list[str]:
    """The lines of a unified diff."""
    name = str(result.path).lstrip("/")
    lines = difflib.unified_diff(
        result.before.splitlines(keepends=True),
        result.after.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def counts(results: Sequence[FileResult]) -> Counter[Status]:
    """The number of entries with each status."""
    return Counter(site.status for result in results for site in result.sites)


def remaining(result: FileResult) -> list[Site]:
    """The hardware-specific code in the original file: the entries to convert, and those left."""
    return [site for site in result.sites if site.status is not Status.EXEMPT]


def message(site: Site) -> str:
    """One entry as a sentence."""
    rule = BY_NAME.get(site.code)
    what = rule.summary.replace("`", "") if rule is not None else "a device or backend in YAML"
    if site.status is Status.LEFT:
        return f"{site.text}: left, because {site.reason}"
    how = "can be ported" if site.safe else f"can be ported with --unsafe ({site.reason})"
    return f"{site.text}: {what}; {how}"


def as_json(results: Sequence[FileResult]) -> str:
    """All results as one JSON object."""
    files = [
        {
            "path": str(result.path),
            "changed": result.changed,
            "written": result.written,
            "error": result.failure or None,
            "sites": [_site(site) for site in result.sites],
        }
        for result in results
    ]
    return json.dumps({"version": __version__, "files": files}, indent=2)


def _site(site: Site) -> dict[str, Any]:
    same = {name: getattr(site, name) for name in ("code", "rule", "line", "column", "text")}
    return {**same, "status": site.status.value, "safe": site.safe, "reason": site.reason or None}


def as_sarif(results: Sequence[FileResult]) -> str:
    """The hardware-specific code of the original files, as SARIF 2.1.0."""
    rules = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.summary},
            "helpUri": f"{_PAGES}/{rule.code}.md",
        }
        for rule in sorted(RULES, key=lambda rule: rule.code)
    ]
    found = [
        {
            "ruleId": site.code,
            "level": "warning",
            "message": {"text": message(site)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": result.path.as_posix()},
                        "region": {"startLine": site.line, "startColumn": site.column},
                    }
                }
            ],
        }
        for result in results
        for site in remaining(result)
    ]
    driver = {"name": "acclimate port", "version": __version__, "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": found}],
    }
    return json.dumps(log, indent=2)


def as_github(results: Sequence[FileResult]) -> Iterator[str]:
    """The hardware-specific code of the original files, as GitHub workflow commands."""
    for result in results:
        if result.failure:
            yield f"::error file={_property(str(result.path))}::{_data(result.failure)}"
        for site in remaining(result):
            place = f"file={_property(str(result.path))},line={site.line},col={site.column}"
            yield f"::warning {place},title={site.code}::{_data(message(site))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
