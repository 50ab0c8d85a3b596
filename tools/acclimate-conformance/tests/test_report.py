"""The report as a page: what it says, what it escapes, and how it looks in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from acclimate_conformance import command
from acclimate_conformance.result import About, Planned, Report, Result
from acclimate_conformance.runner import page as pages
from browser import LOWEST_CONTRAST, Browser
from browser import browser as browser
from fresh_process import plain_environment

HOSTILE = (
    "</p></style><script>document.title = 'taken over'</script><img src=http://127.0.0.1:9/x onerror=x()>"
    " & \"quoted\" 'too' \u202eturned\u202c \x1b[31mred \ud800 " + "unbroken" * 60
)
ABOUT = About(
    accelerator="<i>foo</i>",
    implementation="foo.accelerator:Foo<&>",
    devices=('foo:0 (Foo & Sons\' "9000")',),
    acclimate="0.1.0",
    torch="2.13.0",
    python="3.11",
    system="Linux",
)


def result(check: str, outcome: str, reason: str = "", **more: object) -> Result:
    base = Result(
        check=check,
        category=check.partition("/")[0],
        promise="What is allocated shows in ``memory_allocated``.",
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        rules=("memory_allocated: Bytes that tensors occupy; see :meth:`memory_stats` and ``None``.",),
        seconds=0.1,
    )
    return replace(base, **more)  # type: ignore[arg-type]


FAILED = result(
    "memory/peak", "failed", HOSTILE, detail=HOSTILE * 200, place="checks/memory/figures.py:9: require(<x>)",
    calls=("reset_peak_memory_stats() -> None", f"max_memory_allocated() -> {HOSTILE}"),
    changes=("max_memory_allocated: foo:Foo gives it", "memory_allocated: acclimate's own"),
    cause="max_memory_allocated",
)  # fmt: skip
PASSED = [result(f"memory/check{n}", "passed", "a note" if n == 2 else "") for n in range(5)]
ABSENT = result("graphs/replays", "not offered", "it says that it has no graphs")
REPORTS = {
    "some failed": Report(ABOUT, [*PASSED, FAILED, ABSENT], 12.3, junit=b"<testsuites/>" * 100),
    "all passed": Report(ABOUT, [*PASSED, ABSENT], 12.3),
    "cut off": Report(
        ABOUT, PASSED, 1.0,
        [Planned("memory/late", "memory", "Late.", ("memory_stats: <b>",), 60),
         Planned("streams/never", "streams", "Never.", (), 60)],
    ),
    "cut off before the first": Report(ABOUT, [], 0.0, [Planned("memory/a", "memory", "A.", (), 60)]),
}  # fmt: skip


class Elements(HTMLParser):
    """The tags of a page, and the targets of its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "a handler of a script"
            if name == "id":
                self.ids.append(str(value))
            if name in {"href", "src"}:
                self.links.append(str(value))


@pytest.mark.parametrize("name", REPORTS)
def test_no_text_of_a_vendor_becomes_part_of_the_page(name: str) -> None:
    found = Elements(pages.page(REPORTS[name]))
    assert not {"script", "img", "i", "b"} & set(found.tags)
    assert len(found.ids) == len(set(found.ids))
    assert all(link == "data:," or link.removeprefix("#") in found.ids for link in found.links)
    page = pages.page(REPORTS[name])
    assert not {"\u202e", "\x1b", "\ud800"} & set(page)


def test_a_failure_is_told_with_what_was_observed_the_call_and_where_to_change_it() -> None:
    page = pages.page(REPORTS["some failed"])
    for text in (
        "Promises not kept: 1 of 6. Not offered by the device: 1.", "memory/peak",
        "max_memory_allocated() -&gt;", "went wrong", "foo:Foo gives it", "checks/memory/figures.py:9",
        "Bytes that tensors occupy; see <code>memory_stats</code> and <code>None</code>.", "more characters",
    ):  # fmt: skip
        assert text in page
    assert "What has to change" not in pages.page(REPORTS["all passed"])
    assert "The run was interrupted: 5 of 7 checks were run." in pages.page(REPORTS["cut off"])


# -- in a browser ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_can_be_read_in_light_and_dark_and_on_a_telephone(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    page = tmp_path / "out.html"
    pages.write(REPORTS[name], page)
    browser.requested.clear()
    backgrounds = set()
    for scheme in ("light", "dark"):
        for width in (1100, 360):
            browser.open(page, width, scheme)
            browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
            lowest, where = browser.value(LOWEST_CONTRAST)
            assert lowest >= 4.5, where
        backgrounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    assert set(browser.requested) == {page.as_uri()}, "it asked for more than the file"
    assert browser.value("document.title") == "Conformance of <i>foo</i>"
    assert browser.value("document.scripts.length") == 0


def test_the_page_shows_every_check_and_count_and_tells_them_to_a_screen_reader(
    browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    pages.write(REPORTS["some failed"], page)
    browser.open(page)
    rows = browser.value("[...document.querySelectorAll('table tr')].map(row => row.innerText.split('\\t'))")
    assert [cell.strip() for cell in rows[1]] == ["memory", "5", "1", "0", "83 %"]
    assert [cell.strip() for cell in rows[3]] == ["all", "5", "1", "1", "83 %"]
    shown = browser.value("[...document.querySelectorAll('details .badge')].map(badge => badge.innerText)")
    assert sorted(shown) == ["failed", "not offered", *["passed"] * 5]
    assert browser.value("document.querySelector('.reason').innerText").startswith("</p></style><script>")
    browser.value("document.querySelector('a[href=\"#memory\"]').click()")
    assert browser.value("location.hash") == "#memory"
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node.get("role", {}).get("value") for node in nodes]
    assert {"main", "heading", "table", "caption", "columnheader", "rowheader", "region"} <= set(roles)
    assert browser.value("document.documentElement.lang") == "en"


# -- the files ------------------------------------------------------------------------------------------


def conformance(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "acclimate", "conformance", *arguments],
        env={**plain_environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("warm_starts")
def test_results_are_shown_and_other_files_written_where_one_cannot_be(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    run = conformance(
        "--accelerator", "cpu", "--only", "devices/counts", "--report", "/dev/full",
        "--junit", str(tmp_path / "missing" / "out.xml"), "--json", str(kept),
    )  # fmt: skip
    out, errors = run.communicate(timeout=600)
    assert run.returncode == 2
    assert "100 %" in out
    assert "--report /dev/full: No space left on device" in errors
    assert "out.xml: No such file or directory" in errors
    assert "Traceback" not in errors
    assert json.loads(kept.read_text())["total"]["passed"] == 1


@pytest.mark.parametrize(("write", "name"), [(pages.write, "out.html"), (command._write_junit, "out.xml")])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(write, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("before")
    with path.open() as reader:
        write(REPORTS["some failed"], path)
        assert reader.read() == "before"  # who has it open reads on in the old one
    assert len(path.read_text()) > 1000
    assert [written.name for written in tmp_path.iterdir()] == [name]
    link = tmp_path / "link"
    link.symlink_to(path)
    write(REPORTS["all passed"], link)
    assert link.is_symlink()
    os.chmod(tmp_path, 0o500)
    try:
        if os.geteuid():
            with pytest.raises(PermissionError):
                write(REPORTS["some failed"], path)
    finally:
        os.chmod(tmp_path, 0o700)


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(
    "signal_number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_run_that_is_cut_off_shows_and_writes_what_came_out_by_then(
    signal_number: signal.Signals, tmp_path: Path
) -> None:
    page, results, reached = (tmp_path / name for name in ("out.html", "out.json", "reached"))
    (tmp_path / "waiting.py").write_text(f"""
import pathlib, time
from acclimate.backends.cpu import CPUAccelerator

class Waiting(CPUAccelerator):
    def ipc_collect(self):
        pathlib.Path({str(reached)!r}).touch()
        time.sleep(600)
""")
    run = conformance(
        "--accelerator", "waiting:Waiting", "--only", "devices/counts", "--report", str(page),
        "--only", "memory/accumulated_statistics", "--only", "memory/statistics", "--json", str(results),
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not reached.exists():
        assert time.monotonic() < deadline, "the check that waits was not reached"
        time.sleep(0.1)
    run.send_signal(signal_number)
    out, errors = run.communicate(timeout=600)
    assert run.returncode == 130, errors
    assert "interrupted: 1 checks not run, in memory" in out
    assert "Traceback" not in errors
    found = json.loads(results.read_text())
    assert [entry["check"] for entry in found["results"]] == ["devices/counts", "memory/statistics"]
    assert found["not_run"] == ["memory/accumulated_statistics"]
    assert "The run was interrupted: 2 of 3 checks were run." in page.read_text()
