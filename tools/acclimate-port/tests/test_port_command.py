"""`acclimate port` as a command: what it writes, shows and returns, also for files that it cannot port."""

import json
import os
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from acclimate_port.__main__ import main
from acclimate_port.engine import Settings
from acclimate_port.files.workers import port_files

SOURCE = "import torch\n\ntorch.cuda.synchronize()\n"
PORTED = "import torch\nfrom acclimate import get_accelerator\n\nget_accelerator().synchronize()\n"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    return tmp_path


def port(*arguments: str) -> int:
    return main([*arguments, "--jobs", "1"])


def test_without_write_it_shows_a_diff_and_changes_nothing(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert port(".") == 0
    out = capsys.readouterr().out
    assert "+get_accelerator().synchronize()" in out
    assert "1 would be converted in 1 of 1 file" in out
    assert (repo / "a.py").read_text() == SOURCE


def test_write_applies_safe_edits_and_unsafe_adds_the_others(repo: Path) -> None:
    (repo / "a.py").write_text(f"{SOURCE}y = x.cuda()\n")
    assert port(".", "--write") == 0
    assert (repo / "a.py").read_text() == f"{PORTED}y = x.cuda()\n"
    assert port(".", "--write", "--unsafe") == 0
    assert "x.to(get_accelerator().device_name())" in (repo / "a.py").read_text()


def test_check_fails_while_something_is_left_and_passes_after(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert port(".", "--check") == 1
    assert "a.py:3:1: ACC101" in capsys.readouterr().out
    port(".", "--write")
    assert port(".", "--check") == 0
    (repo / "b.py").write_text('import torch\n\nd = {"cuda": 1}\n')
    assert port(".", "--check") == 0


def test_check_and_write_together_are_refused(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert port(".", "--check", "--write") == 2
    assert "one after the other" in capsys.readouterr().err


def test_github_annotations_cannot_be_forged_by_a_name(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repo / "a,b:c%.py").write_text(SOURCE)
    assert port(".", "--check", "--format", "github") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "::warning file=a%2Cb%3Ac%25.py,line=3,col=1,title=ACC101::torch.cuda.synchronize()"
    )
    assert all(line.startswith("::") for line in lines)


def test_json_and_sarif_are_whole_and_name_each_place(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert port(".", "--format", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [site["code"] for site in told["files"][0]["sites"]] == ["ACC101"]
    assert port(".", "--check", "--format", "sarif") == 1
    log = json.loads(capsys.readouterr().out)
    result = log["runs"][0]["results"][0]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 3, "startColumn": 1}
    assert result["ruleId"] in {rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]}


def test_the_report_is_one_page_and_escapes_hostile_text(repo: Path) -> None:
    evil = "<script>alert(1)</script>"
    (repo / "a.py").write_text(
        f'import torch\n\nx = torch.cuda.device("{evil}")\n# </pre>{evil}\ntorch.cuda.cudart()\n'
    )
    (repo / "b<b>.py").write_text("import torch\ntorch.cuda.(\n")
    assert port(".", "--report", "out.html") == 2
    page = (repo / "out.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "b&lt;b&gt;.py" in page
    assert "no other accelerator has it" in page

    class Balance(HTMLParser):
        depth: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag not in ("img", "link", "iframe")
            if tag != "meta":
                self.depth.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.depth.pop() == tag

    parser = Balance()
    parser.feed(page)
    assert parser.depth == []


BAD = {
    "syntax.py": (b"import torch\ntorch.cuda.synchronize(\n", "not valid Python 3: line"),
    "two.py": (b"import torch\nprint 'cuda', torch.cuda.device_count()\n", "not valid Python 3: line 2"),
    "encoding.py": (b"# -*- coding: klingon -*-\nimport torch\ntorch.cuda\n", "encoding is not known"),
    "bytes.py": (b"import torch\nx = 'cuda\xff'\n", "not utf-8"),
    "null.py": (b"import torch\0\ntorch.cuda.synchronize()\n", "null byte"),
    "deep.py": (
        b"import torch\nx = " + b"(" * 3000 + b"torch.cuda" + b")" * 3000 + b"\n",
        "nested too deeply",
    ),
    "branches.py": (b"import torch\nif torch.cuda: pass\n" + b"elif 1: pass\n" * 3000, ""),
    "bad.ipynb": (b'{"cells": "torch.cuda"', "not a notebook"),
}


def test_each_bad_file_is_named_on_its_own_line_and_the_others_go_on(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (data, _) in BAD.items():
        (repo / name).write_bytes(data)
    (repo / "loop.py").symlink_to("loop.py")
    (repo / "folder").mkdir()
    (repo / "folder" / "up").symlink_to("..")
    assert port(".", "missing.py", "--write") == 2
    lines = capsys.readouterr().out.splitlines()
    for name, (data, reason) in BAD.items():
        assert any(f"{name}: not ported" in line and reason in line for line in lines), name
        assert (repo / name).read_bytes() == data
    assert any("loop.py: not ported" in line for line in lines)
    assert any("missing.py: not ported: No such file" in line for line in lines)
    assert (repo / "a.py").read_text() == PORTED


def test_bom_crlf_tabs_and_other_encodings_stay(repo: Path) -> None:
    text = "# -*- coding: latin-1 -*-\r\nimport torch\r\nif 1:\r\n\ttorch.cuda.synchronize()  # é\r\n"
    (repo / "latin.py").write_bytes(text.encode("latin-1"))
    (repo / "bom.py").write_bytes(b"\xef\xbb\xbf" + SOURCE.encode())
    assert port(".", "--write") == 0
    assert b"\xe9\r\n" in (repo / "latin.py").read_bytes()
    assert b"\tget_accelerator().synchronize()" in (repo / "latin.py").read_bytes()
    assert (repo / "bom.py").read_bytes() == b"\xef\xbb\xbf" + PORTED.encode()


def test_mode_and_links_are_kept_and_a_read_only_file_is_named(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repo / "a.py").chmod(0o755)
    (repo / "link.py").symlink_to("a.py")
    (repo / "fixed.py").write_text(SOURCE)
    (repo / "fixed.py").chmod(0o444)
    assert port(".", "--write") == 2
    assert stat.S_IMODE((repo / "a.py").stat().st_mode) == 0o755
    assert (repo / "link.py").is_symlink()
    assert (repo / "a.py").read_text() == PORTED
    assert (repo / "fixed.py").read_text() == SOURCE
    assert "fixed.py: not ported: it is read-only" in capsys.readouterr().out
    assert [name for name in os.listdir(repo) if name.startswith(".")] == []


def test_a_notebook_is_ported_cell_by_cell_and_the_rest_stays(repo: Path) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["torch.cuda ü\n"]},
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": ["%matplotlib inline\n", "import torch as th"]},
        {"cell_type": "code", "execution_count": 2, "metadata": {}, "outputs": [{"text": ["cuda"]}], "source": ["!nvidia-smi\n", "th.cuda.synchronize()"]},
        {"cell_type": "code", "execution_count": 3, "metadata": {}, "outputs": [], "source": ["%%time\n", "th.cuda.synchronize()"]},
    ]  # fmt: skip
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (repo / "n.ipynb").write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    assert port("n.ipynb", "--write") == 0
    cells[1]["source"] = [
        "%matplotlib inline\n",
        "import torch as th\n",
        "from acclimate import get_accelerator",
    ]
    cells[2]["source"] = ["!nvidia-smi\n", "get_accelerator().synchronize()"]
    assert (repo / "n.ipynb").read_text() == json.dumps(book, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("target", ["acclimate", "torch"])
@pytest.mark.parametrize("magic", ["%time 1", "%env CUDA_VISIBLE_DEVICES=0"])
def test_a_notebook_names_the_accelerator_in_the_cell_that_imports_torch(
    repo: Path, target: str, magic: str
) -> None:
    sources = [
        ["import os\n"],
        ["import torch\n", "from torch import nn\n", "x = torch.ones(1)\n"],
        [f"{magic}\n", "import time\n", "start = time.time()\n", "y = x.cuda()\n", "print(time.time() - start)"],
        ["z = x.to('cuda'), torch.ones(1).cuda(), torch.zeros(1, device='cuda')"],
    ]  # fmt: skip
    cells = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": one}
        for one in sources
    ]
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (repo / "n.ipynb").write_text(json.dumps(book, indent=1) + "\n")
    assert port("n.ipynb", "--write", "--to", target) == 0
    new = ["".join(one["source"]) for one in json.loads((repo / "n.ipynb").read_text())["cells"]]
    name, call = (
        ("acc", "get_accelerator()") if target == "acclimate" else ("device_type", "accelerator_type()")
    )
    chooses_devices = "VISIBLE" in magic
    assert (f"{name} = {call}" in new[1]) != chooses_devices
    assert new[0] == sources[0][0]
    assert new[1].endswith("x = torch.ones(1)\n")
    assert new[2].startswith(f"{magic}\nimport time\nstart = time.time()\ny = x.to(")
    assert f"{name} =" not in new[2] + new[3]
    assert ".cuda()" not in new[2] + new[3]


@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_a_notebook_names_the_accelerator_where_torch_is_imported_after_a_function(
    repo: Path, target: str
) -> None:
    sources = ["import os\n", "def f():\n    pass", "import torch\ntorch.zeros(1, device='cuda')\n"]
    cells = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": one}
        for one in sources
    ]
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (repo / "n.ipynb").write_text(json.dumps(book, indent=1) + "\n")
    assert port("n.ipynb", "--write", "--unsafe", "--to", target) == 0
    new = ["".join(one["source"]) for one in json.loads((repo / "n.ipynb").read_text())["cells"]]
    assert new[:2] == sources[:2]
    assert "acceler" in new[2]


@pytest.mark.parametrize("target", ["acclimate", "torch"])
@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["import torch", "import torch\ntorch.zeros(1, device='cuda')"], [False, True]),
        (
            ["import torch", "torch.zeros(1, device='cuda')", "import torch\ntorch.ones(1, device='cuda')"],
            [True, False, True],
        ),
    ],
)
def test_a_cell_that_imports_torch_needs_no_other_cell_for_the_accelerator(
    repo: Path, sources: list[str], expected: list[bool], target: str
) -> None:
    cells = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": one}
        for one in sources
    ]
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (repo / "n.ipynb").write_text(json.dumps(book, indent=1) + "\n")
    assert port("n.ipynb", "--write", "--unsafe", "--to", target) == 0
    new = [one["source"] for one in json.loads((repo / "n.ipynb").read_text())["cells"]]
    brings = "from acclimate import get_accelerator" if target == "acclimate" else "def accelerator_type"
    assert [brings in one for one in new] == expected


def test_a_comment_that_asks_something_is_python_and_the_output_of_a_shell_command_is_not(repo: Path) -> None:
    sources = [
        ["files = !ls  \n", "torch.ones?  \n", "import torch\n"],
        [
            "m = torch.ones(1).cuda() # to the GPU?\n",
            "x = torch.ones(\n",
            "    2, # how many?\n",
            ").cuda()\n",
        ],
    ]
    cells = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": one}
        for one in sources
    ]
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (repo / "n.ipynb").write_text(json.dumps(book, indent=1) + "\n")
    assert port("n.ipynb", "--write", "--to", "torch") == 0
    new = ["".join(one["source"]) for one in json.loads((repo / "n.ipynb").read_text())["cells"]]
    assert new[0].startswith("files = !ls  \ntorch.ones?  \nimport torch\n")
    assert ".cuda()" not in new[1]
    assert " # to the GPU?\n" in new[1]


def test_the_reasons_in_a_notebook_name_lines_of_its_cells(repo: Path) -> None:
    sources = [
        ["import torch\n", "import os\n"],
        ["n = 1\n", "torch.cuda.device_count()\n"],
        ["\n", "\n", "os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"],
    ]
    cells = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [], "source": one}
        for one in sources
    ]
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (repo / "n.ipynb").write_text(json.dumps(book, indent=1) + "\n")
    (result,) = port_files([repo / "n.ipynb"], Settings("acclimate"), False, 1, lambda: None)
    found = next(site for site in result.sites if "device_count" in site.text)
    assert found.line == 2
    assert found.reason.startswith("cell 2: line 3 of cell 3, ")


def test_yaml_is_reported_and_not_edited(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "trainer:\n  device: cuda:0  # torch\n  name: cuda\n"
    (repo / "c.yaml").write_text(text)
    assert port("c.yaml", "--write") == 0
    assert "c.yaml:2: ACC701" in capsys.readouterr().out
    assert (repo / "c.yaml").read_text() == text


def test_pyproject_chooses_target_rules_and_files(repo: Path) -> None:
    (repo / "vendored").mkdir()
    (repo / "vendored" / "b.py").write_text(SOURCE)
    (repo / "pyproject.toml").write_text('[tool.acclimate.port]\nto = "torch"\nexclude = ["vendored"]\n')
    assert port(".", "--write") == 0
    assert "torch.accelerator.synchronize()" in (repo / "a.py").read_text()
    assert (repo / "vendored" / "b.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('to = "jax"', 'not "jax"'),
        ('select = ["ACC999"]', 'no rule "ACC999"'),
        ("colour = 1", 'no setting "colour"'),
        ("exclude = 3", "must be a list of strings"),
        ("to = [", "cannot be read"),
    ],
)
def test_a_wrong_setting_is_named(
    repo: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    (repo / "pyproject.toml").write_text(f"[tool.acclimate.port]\n{setting}\n")
    assert port(".") == 2
    assert message in capsys.readouterr().err


def test_several_processes_give_what_one_gives(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        (repo / f"f{number}.py").write_text(SOURCE + f"x{number} = 1\n")
    assert main([".", "--jobs", "2"]) == 0
    several = capsys.readouterr().out
    assert port(".") == 0
    assert several == capsys.readouterr().out


def test_it_needs_neither_torch_nor_acclimate(repo: Path) -> None:
    code = "import sys; sys.modules.update(torch=None, acclimate=None); from acclimate_port.__main__ import main; sys.exit(main(['.', '--write']))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (repo / "a.py").read_text() == PORTED


def test_a_long_file_is_ported(repo: Path) -> None:
    filler = "".join(f"value_{number} = {number}\n" for number in range(3000))
    (repo / "a.py").write_text(SOURCE + filler)
    assert port(".", "--write") == 0
    assert (repo / "a.py").read_text() == PORTED + filler
