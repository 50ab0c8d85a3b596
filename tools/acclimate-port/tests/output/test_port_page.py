"""The report page, as a browser shows it."""

from pathlib import Path

from acclimate_port.engine import Settings
from acclimate_port.files.workers import FileResult, port_file
from acclimate_port.output.page import page
from browser import LOWEST_CONTRAST, Browser
from browser import browser as browser

SOURCE = """\
import torch

g = torch.cuda.CUDAGraph(keep_graph=True)
data = {"cuda": 1, "note": "<b>"}


def f(x: torch.Tensor):
    return x.cuda()  # <script>alert(1)</script>
"""


def results(folder: Path) -> list[FileResult]:
    good, bad = folder / "a_rather_long_name_of_a_file_that_must_wrap_on_a_telephone.py", folder / "bad.py"
    good.write_text(SOURCE, encoding="utf-8")
    bad.write_text("import torch\ntorch.cuda.(\n", encoding="utf-8")
    return [port_file(path, Settings(unsafe=True)) for path in (good, bad)]


def test_the_page_can_be_read_in_light_and_dark_and_on_a_telephone(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    path.write_text(page(results(tmp_path), "acclimate"), encoding="utf-8")
    browser.requested.clear()
    for scheme in ("light", "dark"):
        for width in (1100, 360):
            browser.open(path, width, scheme)
            browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
            lowest, where = browser.value(LOWEST_CONTRAST)
            assert lowest >= 4.5, where
    assert set(browser.requested) == {path.as_uri()}, "it asked for more than the file"
    assert browser.value("document.scripts.length") == 0
    text = browser.value("document.body.innerText")
    for said in (
        "<script>alert(1)</script>",
        "Not ported: it is not valid Python 3",
        "not hardware-specific: 1",
    ):
        assert said in text
