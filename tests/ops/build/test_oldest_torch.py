"""Native sources compile with the oldest torch of the range, whose headers need not be here."""

from __future__ import annotations

import re
from pathlib import Path

import acclimate

PACKAGE = Path(acclimate.__file__).parent
RECORD = Path(__file__).parents[1] / "data" / "stable_abi_2_10.txt"
NAME = re.compile(r"\b(?:STABLE_TORCH|STD_TORCH|TORCH|aoti_torch|torch)_\w+")


def test_sources_of_the_stable_abi_use_only_names_that_torch_2_10_has() -> None:
    folders = [PACKAGE / "ops", PACKAGE / "llm"]  # collectives use all of torch's headers
    sources = [path for folder in folders for path in folder.rglob("csrc/*.*")]
    used = {name for path in sources for name in NAME.findall(path.read_text())}
    assert "STD_TORCH_CHECK" in used
    assert used - set(RECORD.read_text().split()) == set()
