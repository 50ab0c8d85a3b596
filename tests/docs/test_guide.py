"""What docs/guide.md shows runs, on the host and on the emulated device, and prints what the page says.

A Python block is executed unless its first line says otherwise: ``# on CUDA only`` is compiled and not run,
as there is no such device here; ``# wrong`` has to end in what the page shows below it; ``# name.py`` is a
file that a command runs. A ``text`` block is the output of the block before it, on all accelerators or on
those it names. The commands of a ``console`` run as they are.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from page_blocks import DOCS, Block, agrees, anchors, blocks, links, prose, run_command

from acclimate.backends.cpu import CPUAccelerator
from acclimate.backends.presence import torch_build
from fresh_process import plain_environment
from warm_python import WarmPython

HERE = Path(__file__).parent
PAGE = DOCS / "guide.md"
BLOCKS = blocks(PAGE)
STRICTEST = "no=float64+bfloat16,replace=yes,sync=check"
ENVIRONMENTS = {
    "cpu": {"ACCLIMATE_ACCELERATOR": "cpu"},
    "sim": {"ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": STRICTEST},
}
ON_CUDA_ONLY, WRONG = "# on CUDA only", "# wrong"
HARDWARE = re.compile(r"cuda|nccl|\b(?:npu|xpu|mps|hpu|hccl)\b", re.IGNORECASE)

pytestmark = [
    pytest.mark.skipif(
        torch.accelerator.is_available(), reason="the page shows what a machine without an accelerator prints"
    ),
    pytest.mark.usefixtures("warm_starts"),
]


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


PYTHON = of_language("python")
CUDA_ONLY = [block for block in PYTHON if block.first_line == ON_CUDA_ONLY]
FILES = [block for block in PYTHON if block.file]
RUN = [block for block in PYTHON if block not in CUDA_ONLY and block not in FILES]
CONSOLES = of_language("console")
LAUNCHED = [block for block in CONSOLES if "acclimate run" in block.content]


def at_its_line(block: Block) -> str:
    return f"{PAGE.name}:{block.line}"


BUILT_FOR_GPUS = not {"cuda", "hip", "xpu"}.isdisjoint(torch_build())
"""Whether the installed torch is."""


def is_wrong(block: Block) -> bool:
    return block.first_line.startswith(WRONG)


def shown_below(block: Block, accelerator: str) -> str | None:
    """What the page shows as a block's output on an accelerator."""
    for after in BLOCKS[BLOCKS.index(block) + 1 :]:
        if after.language != "text":
            break
        if accelerator in (after.words or ENVIRONMENTS):
            return after.content
    return None


def environment(accelerator: str | None = None) -> dict[str, str]:
    """Of a program that uses an accelerator; of one that detects what is here where it names none."""
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**plain_environment(), "PATH": programs, **ENVIRONMENTS.get(accelerator or "", {})}


@dataclass(frozen=True)
class PageRun:
    """The page's program on one accelerator."""

    folder: Path
    """Where it ran."""
    process: subprocess.Popen[str]

    @cached_property
    def outcomes(self) -> dict[str, str]:
        """What each snippet came to, by its line."""
        _, errors = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, errors
        told: dict[str, str] = json.loads((self.folder / "outcomes.json").read_text())
        return told


class Runs(dict[str, PageRun]):
    """By accelerator."""

    def __missing__(self, accelerator: str) -> PageRun:
        pytest.skip(f"acclimate-{accelerator} is not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Iterator[Runs]:
    """The page's program, under way on all accelerators at once."""
    snippets = [
        {"page": str(PAGE), "line": block.line, "code": block.content, "wrong": is_wrong(block)}
        for block in RUN
    ]
    started = Runs()
    for accelerator in ENVIRONMENTS:
        if accelerator == "sim" and not entry_points(group="acclimate.backends", name="sim"):
            continue
        folder = tmp_path_factory.mktemp(accelerator)
        (folder / "snippets.json").write_text(json.dumps(snippets))
        for file in FILES:
            (folder / str(file.file)).write_text(file.content)
        command = [sys.executable, str(HERE / "run_snippets.py"), "snippets.json", "outcomes.json"]
        with warm_python.in_place():
            process = subprocess.Popen(
                command,
                env=environment(accelerator),
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        started[accelerator] = PageRun(folder, process)
    yield started
    for run in started.values():
        run.process.kill()  # has no effect on one that has ended


@pytest.mark.parametrize("accelerator", ENVIRONMENTS)
@pytest.mark.parametrize("block", RUN, ids=at_its_line)
def test_a_snippet_prints_what_the_page_shows(block: Block, accelerator: str, runs: Runs) -> None:
    outcomes = runs[accelerator].outcomes
    assert str(block.line) in outcomes, "a snippet before it failed"
    outcome, shown = outcomes[str(block.line)], shown_below(block, accelerator)
    if shown and is_wrong(block) and accelerator == "cpu" and BUILT_FOR_GPUS:  # it has other words for it
        outcome, shown = outcome.partition(":")[0], shown.partition(":")[0]
    assert agrees(outcome, shown or ""), f"it came to\n{outcome}\nand the page shows\n{shown}"


def test_the_mixed_precision_loop_comes_to_the_same_on_the_strictest_device_as_on_one_without_limits(
    tmp_path: Path,
) -> None:
    (loop,) = (block for block in RUN if "GradScaler" in block.content)
    program = f"""
import json, sys, torch
from acclimate import get_accelerator
acc = get_accelerator()
dtype = torch.float16
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).to(acc.current_device_name())
batch = torch.randn(8, 4).to(acc.current_device_name())
{loop.content}
told = dict(losses=losses, scale=scaler.get_scale(), weights=model.weight.tolist())
open(sys.argv[1], "w").write(json.dumps(told))
"""
    if not entry_points(group="acclimate.backends", name="sim"):
        pytest.skip("acclimate-sim is not installed")
    told = []
    for profile in (STRICTEST, "sync=off"):
        command = [sys.executable, "-c", program, "told.json"]
        env = {**environment("sim"), "ACCLIMATE_SIM": profile}
        subprocess.run(command, env=env, cwd=tmp_path, check=True, timeout=600)
        told.append(json.loads((tmp_path / "told.json").read_text()))
    strict, forgiving = told
    assert strict == forgiving


@pytest.mark.parametrize("block", CUDA_ONLY, ids=at_its_line)
def test_code_on_cuda_only_is_python_and_names_it(block: Block) -> None:
    compile(block.content, at_its_line(block), "exec")
    assert HARDWARE.search(block.content.removeprefix(ON_CUDA_ONLY)) or "deepspeed" in block.content


@pytest.mark.parametrize("block", [block for block in RUN + FILES if not is_wrong(block)], ids=at_its_line)
def test_code_for_any_accelerator_names_none(block: Block) -> None:
    code = re.sub(r"#.*", "", block.content)
    assert HARDWARE.findall(code) == []


def test_each_wrong_snippet_goes_wrong_somewhere() -> None:
    forgiven = [at_its_line(block) for block in RUN if is_wrong(block) and not _fails(block)]
    assert forgiven == []


def _fails(block: Block) -> bool:
    return any(shown_below(block, accelerator) for accelerator in ENVIRONMENTS)


def check_commands(block: Block, folder: Path, env: dict[str, str]) -> None:
    for command, shown in block.commands:
        ended = run_command(command, env, folder)
        assert agrees(ended.stdout, shown), f"$ {command}\n{ended.stdout}"


@pytest.mark.parametrize("block", [block for block in CONSOLES if block not in LAUNCHED], ids=at_its_line)
def test_a_command_prints_what_the_page_shows(block: Block, runs: Runs) -> None:
    runs["sim"].outcomes  # noqa: B018 - has ended, so the files that it writes are there
    check_commands(block, runs["sim"].folder, environment())


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["sim", "cpu"])
@pytest.mark.parametrize("block", LAUNCHED, ids=at_its_line)
def test_ranks_print_what_the_page_shows(block: Block, accelerator: str, runs: Runs) -> None:
    runs[accelerator].outcomes  # noqa: B018 - has ended, so the device is built
    check_commands(block, runs[accelerator].folder, environment(accelerator))


# -- what the text says ------------------------------------------------------------------------------


def test_the_page_says_how_strict_the_emulated_device_was() -> None:
    assert f"ACCLIMATE_SIM={STRICTEST}" in prose(PAGE)


def test_every_method_that_the_text_names_exists() -> None:
    named = set(re.findall(r"\bacc\.(\w+)", prose(PAGE)))
    assert len(named) > 20
    assert [name for name in named if not hasattr(CPUAccelerator(), name)] == []


def test_every_message_of_the_last_table_is_one_that_is_printed() -> None:
    printed = "\n".join(block.content for block in of_language("text") + of_language("console"))
    printed += inspect.getsource(torch.cuda)  # the two that only a GPU or its absence brings about
    table = prose(PAGE).partition("## What a message means")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if message not in printed] == []


def test_the_message_quoted_in_the_text_is_torchs() -> None:
    (quoted,) = re.findall(r"`RuntimeError: (Cannot re-initialize [^`]+)`", prose(PAGE))
    source = re.sub(r'"\s*"', "", inspect.getsource(torch.cuda))
    assert " ".join(quoted.split()) in " ".join(source.split())


def test_every_link_leads_somewhere() -> None:
    for target in links(PAGE):
        name, _, anchor = target.partition("#")
        page = PAGE.parent / name if name else PAGE
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page), target
