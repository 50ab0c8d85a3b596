"""docs/backends.md is true: names, requirements, collectives, variables, lengths, what each is held to."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate.backends import BUILTIN
from acclimate.backends.generic import GenericAccelerator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
SURFACES = ROOT / "tests" / "backends" / "surfaces"
RECORDS = {record.name: record for record in sorted(BUILTIN, key=lambda record: -record.rank)}
"""Of the two ways to xpu, the first that is tried."""

IN_ORDER = ["xpu.external", "xpu", "npu", "sdaa", "mps", "hpu", "mlu", "cuda", "any other", "cpu"]
LONGEST_WITH_TORCHS_CONVENTIONS = 60
DEPART_FROM_THEM = {"mps", "hpu", "cuda", "cpu"}
"""Backends of devices that torch's conventions do not describe, and the two that torch began with."""

PACKAGES = {
    "torch": {"xpu", "mps", "cuda", "any other"},
    "intel_extension_for_pytorch": {"xpu"},
    "torch_npu": {"npu"},
}
"""Of which devices each package's wheels have the module."""


def table(heading: str) -> dict[str, list[str]]:
    """The first table under a heading: the cells of each row by its first."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"there is no heading {heading}"
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].replace("`", ""): row[1:] for row in rows[1:]}


def backend(name: str) -> type[Accelerator]:
    return GenericAccelerator if name == "any other" else type(RECORDS[name].load())


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


WHAT = table("Overview")


def test_every_backend_is_in_every_table_in_the_order_of_detection() -> None:
    by_rank = list(dict.fromkeys(record.name for record in sorted(BUILTIN, key=lambda record: record.rank)))
    assert [name for name in IN_ORDER if name != "any other"] == by_rank
    for heading in ("Overview", "What differs from torch's conventions", "What was checked, and how"):
        assert list(table(heading)) == IN_ORDER, heading


def test_every_backend_that_can_be_absent_says_how_it_is_detected() -> None:
    told = {name for row in table("Detection") for name in row.split(", ")}
    assert told == {record.name for record in BUILTIN if not record.is_fallback}


@pytest.mark.parametrize("name", IN_ORDER)
def test_the_files_length_is_as_stated(name: str) -> None:
    source = sys.modules[backend(name).__module__].__file__
    assert source is not None
    lines = len(Path(source).read_text(encoding="utf-8").splitlines())
    assert WHAT[name][4] == str(lines)
    assert lines <= LONGEST_WITH_TORCHS_CONVENTIONS or name in DEPART_FROM_THEM


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_variable_is_the_accelerators_and_the_records(name: str) -> None:
    accelerator, record = RECORDS[name].load(), RECORDS[name]
    stated = quoted(WHAT[name][3])
    assert accelerator.visible_devices_envs() == stated[:1]
    assert (record.visible_devices_variable() or None) == accelerator.visible_devices_variable
    assert list(record.exported_variable_prefixes) == accelerator.export_envs()


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_collectives_are_the_accelerators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = WHAT[name][2].split(", ")
    found = {RECORDS[name].load().communication_backend_name()}
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: True)
    found.add(RECORDS[name].load().communication_backend_name())
    assert found <= set(stated)
    assert name == "cpu" or found == set(stated)


@pytest.mark.parametrize(
    "record",
    [record for record in BUILTIN if "requires" in (record.probe() or "")],
    ids=lambda record: record.name,
)
def test_the_requirement_is_the_one_in_the_message(record: object) -> None:
    reason = record.probe()  # type: ignore[attr-defined]
    requirement = re.search(r"requires (\S+),", reason)
    assert requirement is not None
    name = record.name  # type: ignore[attr-defined]
    assert requirement[1] in [*quoted(WHAT[name][1]), "torch.mps"]


def test_the_recorded_modules_are_the_ones_stated() -> None:
    stated = table("What was checked, and how")
    for path in SURFACES.glob("*.json"):
        package, _, version = path.stem.partition("-")
        package = package.partition(".")[0]
        for name in PACKAGES.get(package, ()):
            assert version in stated[name][0], f"{path.name} is not told of {name}"
        if package not in PACKAGES and package != "torch_sdaa":
            assert any(version.replace(".", "-") in row[0] for row in stated.values()), path.name
    versions = {
        match for row in stated.values() for match in re.findall(r"\d+\.\d+\.\d+(?:\.post\d+)?", row[0])
    }
    recorded = {path.stem.partition("-")[2] for path in SURFACES.glob("*.json")}
    assert versions <= recorded


def test_who_has_recorded_graphs_has_no_class_of_its_own_to_name() -> None:
    for name, row in table("What differs from torch's conventions").items():
        if name in RECORDS and "recorded operators" not in row[0] and not row[0].startswith("as "):
            assert f"{RECORDS[name].torch_type.upper()}Graph" in row[0]
    assert isinstance(RECORDS["cpu"].load().create_graph(), RecordedGraph)
