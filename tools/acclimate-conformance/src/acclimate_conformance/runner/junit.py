"""A report as JUnit XML, which continuous-integration systems show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from acclimate.host.replace_file import replace_file
from acclimate_conformance.result import Report, Result

# What XML 1.0 cannot hold; a vendor's message may hold anything.
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(report: Report, path: Path) -> None:
    """Writes one test suite with one test case for each check.

    Raises:
        OSError: the file cannot be written.
    """
    total = report.total
    suite = ElementTree.Element(
        "testsuite",
        name=f"acclimate conformance of {report.about.accelerator}",
        tests=str(len(report.results)),
        failures=str(total.failed),
        errors="0",
        skipped=str(total.not_offered),
        time=f"{report.seconds:.3f}",
    )
    suite.extend(_case(result) for result in report.results)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    document = ElementTree.tostring(root, encoding="unicode")
    content = f"<?xml version='1.0' encoding='utf-8'?>\n{document}"
    replace_file(path, content.encode(errors="replace"))


def _case(result: Result) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase",
        classname=f"acclimate_conformance.{result.category}",
        name=result.check.partition("/")[2],
        time=f"{result.seconds:.3f}",
    )
    if result.outcome == "failed":
        failure = ElementTree.SubElement(case, "failure", message=_printable(result.reason))
        failure.text = _printable("\n".join([result.promise, *result.rules, result.detail]))
    elif result.outcome == "not offered":
        ElementTree.SubElement(case, "skipped", message=_printable(result.reason))
    return case


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("�", text)
