"""The README's snippets run, its links lead somewhere, and its figures are those of the committed results."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from page_blocks import DOCS, blocks

from fresh_process import FreshProcesses

README = DOCS.parent / "README.md"
BLOCKS = blocks(README)

TRAINING = """
import torch
from torch.utils.data import DataLoader
from acclimate import get_accelerator

GPT = lambda: torch.nn.Linear(4, 1)
loss_of = torch.nn.functional.mse_loss
data = [(torch.randn(4), torch.randn(1)) for _ in range(48)]
"""


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that writes the figures' pages."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    monkeypatch.delitem(sys.modules, "results", raising=False)
    return importlib.import_module("results")


def test_the_first_snippet_has_seven_lines_and_prints_what_is_shown(fresh: FreshProcesses) -> None:
    snippet, shown = next(
        (code, text) for code, text in itertools.pairwise(BLOCKS) if code.language == "python"
    )
    assert len([line for line in snippet.content.splitlines() if line]) == 7
    outcome = fresh.check(snippet.content, env={"DS_ACCELERATOR": "cpu"})
    assert outcome.stdout == shown.content


def test_the_ported_loop_trains(fresh: FreshProcesses) -> None:
    (diff,) = (block.content for block in BLOCKS if block.language == "diff")
    ported = "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
    original = "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))
    assert "cuda" not in ported
    compile(original, "README.md", "exec")
    outcome = fresh.check(TRAINING + ported + "tell(loss=loss.item())", env={"DS_ACCELERATOR": "cpu"})
    assert outcome.told["loss"] < 100
    assert int(outcome.stdout) == 0  # a host's figure, as before


def test_it_is_about_120_lines_and_its_tables_have_at_most_five_columns() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 136
    assert max(line.count("|") - 1 for line in lines if line.startswith("|")) <= 5


def test_every_link_and_picture_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text(encoding="utf-8"))
    assert len(targets) > 10
    assert [target for target in targets if not (DOCS.parent / target).is_file()] == []


def test_the_pages_show_the_committed_results_and_nothing_else(results: Any) -> None:
    runs = results.read()
    assert runs
    assert results.BEGIN + results.origin(runs) + results.END in README.read_text(encoding="utf-8")
    assert results.table(runs) in results.PAGE.read_text(encoding="utf-8")
    for run in json.loads(results.RESULTS.read_text(encoding="utf-8")):
        assert run["date"]
        assert run["machine"]
        assert run["versions"]["torch"]


def test_the_page_of_language_models_shows_the_committed_results(results: Any) -> None:
    runs = results.read()
    block = results.inference_block(runs) if "inference" in runs else "Not measured yet.\n"
    assert results.BEGIN + block + results.END in results.INFERENCE_PAGE.read_text(encoding="utf-8")
    assert ("inference" in runs) == results.INFERENCE_CHART.exists()


def test_the_page_of_deepspeed_shows_the_committed_results(results: Any) -> None:
    runs = results.read()
    block = results.deepspeed_block(runs) if "zero_offload" in runs else "Not measured yet.\n"
    assert results.BEGIN + block + results.END in results.DEEPSPEED_PAGE.read_text(encoding="utf-8")


def test_a_benchmark_that_is_measured_for_the_first_time_leaves_file_pages_and_chart_consistent(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RESULTS", "README", "PAGE", "INFERENCE_PAGE", "DEEPSPEED_PAGE"):
        copy = tmp_path / getattr(results, name).name
        copy.write_text(getattr(results, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(results, name, copy)
    before = json.loads(results.RESULTS.read_text(encoding="utf-8"))
    kept = [entry for entry in before if entry["benchmark"] not in ("inference", "core")]
    results.RESULTS.write_text(json.dumps(kept), encoding="utf-8")
    monkeypatch.setenv(results.FOLDER_VARIABLE, str(tmp_path / "new"))
    (tmp_path / "new").mkdir()
    peers = {f"peer {number}": float(number) for number in range(1, 12)}
    works = ("decode, 1 sequence, a model int8", "decode, 1 sequence, a model bf16")
    results.record("inference", [results.Figure(work, "tokens/s", 9.0, peers) for work in works])
    results.record("core", [results.Figure("a start", "s", 9.0, peers)])
    runs = results.merge(tmp_path / "new")
    results.write_pages(runs)
    assert list(runs) == sorted(runs) == list(results.read())
    assert results.table(results.read()) in results.PAGE.read_text(encoding="utf-8")
    shown = results.INFERENCE_PAGE.read_text(encoding="utf-8")
    assert results.BEGIN + results.inference_block(runs) + results.END in shown
    if importlib.util.find_spec("matplotlib"):
        results.draw({"core": runs["core"]}, tmp_path / "costs.png")
        results.draw_inference(runs["inference"], tmp_path / "inference.png")
        assert (tmp_path / "inference.png").stat().st_size > 1000


def test_the_demos_last_line_is_that_of_its_latest_run(results: Any) -> None:
    readme = README.read_text(encoding="utf-8")
    (line,) = results.DEMO_LINE.findall(readme)
    measured = results.closing_line(results.read())
    if not measured:  # `make bench` writes it
        assert line.endswith("| …]")
    else:
        assert line == measured
        assert re.search(r"\d+ tokens at \d+\.\d tokens/s", line)


def test_the_demos_figures_are_written_into_the_readme(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "[cpu | bfloat16 | 268.1 M parameters | loaded in 1.00 s | 28 tokens at 30.0 tokens/s]"
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    results.README.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    results.write_pages({"generate": results.Run("generate", "2026-01-01", "a machine", {}, (), line)})
    assert f"\n{line}\n```\n" in results.README.read_text(encoding="utf-8")


def test_advantage_is_how_many_times_better_ours_is_for_times_and_for_rates(results: Any) -> None:
    assert results.Figure("start", "s", 2.0, {"peer": 6.0}).advantage("peer") == 3
    assert results.Figure("decode", "tokens/s", 30.0, {"peer": 20.0}).advantage("peer") == 1.5
