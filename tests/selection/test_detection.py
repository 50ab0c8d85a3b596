"""Detection tries every accelerator in the specification's order and survives what vendors' packages do."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest

from fake_vendors import BREAKAGES, BY_WAY, IN_ORDER, WITH_PACKAGE, FakeMachine, FakeVendor
from fresh_process import FreshProcesses
from pairs import all_pairs
from quick_parameters import few_of

SELECT = """
from acclimate import get_accelerator
from acclimate.selection import detect_all
accelerator = get_accelerator()
tell(
    name=accelerator.name,
    device_type=accelerator.device_type,
    reasons=[[candidate.name, candidate.reason] for candidate in detect_all()],
)
"""
DEVICE_VENDORS = IN_ORDER[:-1]


def way(vendor: FakeVendor) -> str:
    return vendor.way


def preferred(vendors: tuple[FakeVendor, ...]) -> FakeVendor:
    """The one that the specification chooses: the first, but native torch.xpu only without CUDA devices."""
    ways = {vendor.way for vendor in vendors}
    return next(vendor for vendor in vendors if not (vendor.way == "xpu_native" and "cuda" in ways))


def reasons(found: dict[str, Any], name: str) -> list[str]:
    """Why each way to an accelerator cannot be used."""
    return [reason for candidate, reason in found["reasons"] if candidate == name and reason]


@pytest.mark.parametrize("vendor", IN_ORDER, ids=way)
def test_a_working_accelerator_is_detected(
    vendor: FakeVendor, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(vendor)
    found = fresh.check(machine.prelude + SELECT, path=machine.path).told
    assert found["name"] == vendor.name
    assert found["device_type"] == vendor.name.partition(".")[0]
    assert [vendor.name, None] in found["reasons"]


NEIGHBOURS = [*pairwise(DEVICE_VENDORS), (BY_WAY["xpu_native"], BY_WAY["cuda"])]
"""Each with the one after it, and the two that are chosen in another order; the test below tries the rest."""


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id="+".join(map(way, pair)), marks=() if pair in NEIGHBOURS else pytest.mark.slow)
        for pair in combinations(DEVICE_VENDORS, 2)
    ],
)
def test_of_two_working_accelerators_the_specification_order_decides(
    pair: tuple[FakeVendor, FakeVendor], machine: FakeMachine, fresh: FreshProcesses
) -> None:
    for vendor in pair:
        machine.add(vendor)
    found = fresh.check(machine.prelude + SELECT, path=machine.path).told
    assert found["name"] == preferred(pair).name


@pytest.mark.parametrize("first", few_of(range(len(IN_ORDER)), 3), ids=lambda first: way(IN_ORDER[first]))
def test_of_many_working_accelerators_the_first_is_chosen(
    first: int, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    present = IN_ORDER[first:]
    for vendor in reversed(present):
        machine.add(vendor)
    found = fresh.check(machine.prelude + SELECT, path=machine.path).told
    assert found["name"] == preferred(present).name


@pytest.mark.parametrize(("vendor", "breakage"), all_pairs(WITH_PACKAGE, BREAKAGES, way))
def test_a_package_that_breaks_at_import_is_a_reason_and_stops_nothing(
    vendor: FakeVendor, breakage: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add_broken(vendor, BREAKAGES[breakage])
    found = fresh.check(SELECT, path=machine.path).told
    assert found["name"] == "cpu"
    expected = f"{vendor.requirement}, which is installed but fails to import: {breakage}"
    assert any(reason.startswith(expected) for reason in reasons(found, vendor.name))


@pytest.mark.parametrize("vendor", few_of(WITH_PACKAGE, 3), ids=way)
def test_a_broken_package_does_not_hide_a_working_accelerator_after_it(
    vendor: FakeVendor, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add_broken(vendor, BREAKAGES["SystemExit"])
    machine.add(BY_WAY["cuda"])
    assert fresh.check(machine.prelude + SELECT, path=machine.path).told["name"] == "cuda"


@pytest.mark.parametrize(
    "vendor", few_of((v for v in DEVICE_VENDORS if v.way not in ("mps", "generic")), 3), ids=way
)
def test_a_package_without_a_device_is_rejected_and_says_so(
    vendor: FakeVendor, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(vendor, devices=0)
    found = fresh.check(machine.prelude + SELECT, path=machine.path).told
    assert found["name"] == "cpu"
    assert any("finds no" in reason for reason in reasons(found, vendor.name))


@pytest.mark.parametrize("vendor", few_of(WITH_PACKAGE, 3), ids=way)
def test_a_folder_with_the_name_of_a_package_is_no_package(
    vendor: FakeVendor, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.folder.joinpath(*vendor.module.split(".")).mkdir(parents=True)
    # With an Intel GPU there, all that speaks against the two ways through a package is the package.
    machine.add(BY_WAY["xpu_native"])
    found = fresh.check(machine.prelude + SELECT, path=machine.path).told
    assert found["name"] == "xpu"
    assert [vendor.name, f"{vendor.requirement}, which is not installed on this system."] in found["reasons"]


def test_a_module_without_the_interface_of_a_device_is_a_reason(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("torch_npu", "")
    found = fresh.check(SELECT, path=machine.path).told
    assert ["npu", "torch_npu imports, but adds no torch.npu with a device_count()."] in found["reasons"]


@pytest.mark.parametrize("answer", ["raise RuntimeError('aclInit failed')", "raise SystemExit(1)"])
def test_a_driver_that_fails_when_asked_for_devices_is_a_reason(
    answer: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("torch_npu", f"def device_count():\n    {answer}\n")
    found = fresh.check(SELECT, path=machine.path).told
    assert found["name"] == "cpu"
    assert dict(found["reasons"])["npu"].startswith("its probe failed: ")


def test_an_import_hook_that_fails_is_no_package(machine: FakeMachine, fresh: FreshProcesses) -> None:
    hook = """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch_") or name.startswith("intel_") or name.startswith("habana_"):
            raise RuntimeError("a hook of somebody else's")
sys.meta_path.insert(0, Hook())
"""
    found = fresh.check(hook + SELECT, path=machine.path).told
    assert found["name"] == "cpu"
    assert "which is not installed" in reasons(found, "npu")[0]


def test_every_reason_is_kept(fresh: FreshProcesses) -> None:
    found = fresh.check(SELECT).told
    names = [name for name, _ in found["reasons"]]
    order = [vendor.name for vendor in IN_ORDER if vendor.way != "generic"]
    assert names == [*order[:-1], "(other)", "cpu"]
    assert [name for name, reason in found["reasons"] if reason is None] == ["cpu"]


# -- Intel's three ways ------------------------------------------------------------------------------


def test_intel_extension_built_for_cpus_only_is_no_xpu(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.add(BY_WAY["xpu_ipex"])
    machine.write("intel_extension_for_pytorch._C", "def _has_xpu(): return False")
    machine.write("intel_extension_for_pytorch", "from intel_extension_for_pytorch import _C")
    found = fresh.check(SELECT, path=machine.path).told
    assert found["name"] == "cpu"
    assert [
        "xpu",
        "intel_extension_for_pytorch is installed, but this build of it is for CPUs only.",
    ] in found["reasons"]


def test_native_xpu_serves_where_intel_extension_is_for_cpus_only(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.write("intel_extension_for_pytorch._C", "def _has_xpu(): return False")
    machine.write("intel_extension_for_pytorch", "from intel_extension_for_pytorch import _C")
    machine.add(BY_WAY["xpu_native"])
    for choice in ({}, {"DS_ACCELERATOR": "xpu"}):
        assert fresh.check(machine.prelude + SELECT, path=machine.path, env=choice).told["name"] == "xpu"


def test_intel_extension_is_preferred_to_cuda(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.add(BY_WAY["cuda"])
    machine.add(BY_WAY["xpu_ipex"])
    assert fresh.check(machine.prelude + SELECT, path=machine.path).told["name"] == "xpu"


def test_native_xpu_beside_cuda_devices_is_passed_over_with_the_reason_and_the_way_out(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["cuda"])
    machine.add(BY_WAY["xpu_native"])
    found = fresh.check(machine.prelude + SELECT).told
    assert found["name"] == "cuda"
    assert any(
        "cuda can be used, too" in reason and "DS_ACCELERATOR=xpu" in reason
        for reason in reasons(found, "xpu")
    )


def test_native_xpu_beside_a_cuda_build_without_devices_is_chosen(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["cuda"], devices=0)
    machine.add(BY_WAY["xpu_native"])
    assert fresh.check(machine.prelude + SELECT).told["name"] == "xpu"


def test_native_xpu_beside_cuda_devices_can_be_chosen_by_name(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["cuda"])
    machine.add(BY_WAY["xpu_native"])
    assert fresh.check(machine.prelude + SELECT, env={"DS_ACCELERATOR": "xpu"}).told["name"] == "xpu"


# -- the CPU -----------------------------------------------------------------------------------------


WARNINGS = """
import logging
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append(record)
logging.getLogger("acclimate").addHandler(Keep())
from acclimate import get_accelerator
for _ in range(3):
    get_accelerator()
tell(warnings=[r.getMessage() for r in records if r.levelno >= logging.WARNING])
"""


def test_the_fallback_to_cpu_warns_once_through_logging_and_prints_nothing(fresh: FreshProcesses) -> None:
    ended = fresh.check(WARNINGS)
    assert len(ended.told["warnings"]) == 1
    assert ended.told["warnings"][0].startswith("Setting accelerator to CPU")
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.parametrize(("local_rank", "warnings"), [(0, 1), (1, 0)])
def test_of_the_ranks_of_a_host_the_first_warns_of_the_fallback(
    local_rank: int, warnings: int, fresh: FreshProcesses
) -> None:
    told = fresh.check(WARNINGS, env={"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}).told
    assert len(told["warnings"]) == warnings


@pytest.mark.parametrize("variable", ["DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR"])
def test_the_cpu_chosen_by_name_does_not_warn(variable: str, fresh: FreshProcesses) -> None:
    ended = fresh.check(SELECT, env={variable: "cpu"})
    assert ended.told["name"] == "cpu"
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_detected_device_does_not_warn(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.add(BY_WAY["npu"])
    ended = fresh.check(SELECT, path=machine.path)
    assert (ended.stdout, ended.stderr) == ("", "")
