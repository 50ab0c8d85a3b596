"""The built-in records: the specification's order, counts without torch, and targets that load."""

from __future__ import annotations

import fnmatch
import subprocess
import sys

import pytest

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN, GENERIC_RANK, SPECIFIED, Backend, probes
from fresh_process import plain_environment

# The files as each vendor's driver names them, with the others that it puts beside them.
DEVICE_FILES = {
    "xpu.external": ("/dev/dri/renderD{}", ["/dev/dri/card0", "/dev/dri/by-path"], "ZE_AFFINITY_MASK"),
    "xpu": ("/dev/dri/renderD{}", ["/dev/dri/card0"], "ZE_AFFINITY_MASK"),
    "npu": ("/dev/davinci{}", ["/dev/davinci_manager", "/dev/hisi_hdc"], "ASCEND_RT_VISIBLE_DEVICES"),
    "sdaa": ("/dev/tcaicard{}", ["/dev/tcaictrl"], "SDAA_VISIBLE_DEVICES"),
    "hpu": ("/dev/accel/accel{}", ["/dev/accel/accel_controlD0"], "HABANA_VISIBLE_MODULES"),
    "mlu": ("/dev/cambricon_dev{}", ["/dev/cambricon_ctl"], "MLU_VISIBLE_DEVICES"),
    "cuda": (
        "/dev/nvidia{}",
        ["/dev/nvidiactl", "/dev/nvidia-uvm"],
        "CUDA_VISIBLE_DEVICES",
    ),
}
ONE_OF_EACH = {record.name: record for record in BUILTIN}
DEVICE_TYPES = {name: name.partition(".")[0] for name in SPECIFIED}


def of_record(record: Backend) -> str:
    return f"{record.name}-{record.rank}"


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch):
    """Puts device files into ``/dev``."""

    def put(files: list[str]) -> None:
        monkeypatch.setattr(probes.glob, "glob", lambda pattern: fnmatch.filter(files, pattern))

    return put


def test_the_records_are_in_the_specifications_order() -> None:
    by_rank = sorted(BUILTIN, key=lambda record: record.rank)
    order = [record.name for record in by_rank]
    assert order == ["xpu.external", "xpu", "xpu", "npu", "sdaa", "mps", "hpu", "mlu", "cuda", "cpu"]
    assert [record.probe for record in by_rank[:3]] == [
        probes.xpu_external,
        probes.xpu_ipex,
        probes.xpu_native,
    ]
    assert len({record.rank for record in BUILTIN}) == len(BUILTIN)


def test_a_device_that_only_torch_knows_ranks_between_cuda_and_cpu() -> None:
    assert ONE_OF_EACH["cuda"].rank < GENERIC_RANK < ONE_OF_EACH["cpu"].rank


def test_the_records_have_the_specifications_nine_names() -> None:
    assert sorted(ONE_OF_EACH) == sorted(SPECIFIED)


def test_only_the_cpu_is_a_fallback() -> None:
    assert [record.name for record in BUILTIN if record.is_fallback] == ["cpu"]


def test_every_record_but_the_fallback_says_what_to_do_without_it() -> None:
    assert all(record.remedy or record.is_fallback for record in BUILTIN)


@pytest.mark.parametrize("record", BUILTIN, ids=of_record)
def test_a_target_is_an_accelerator_of_the_records_name(record: Backend) -> None:
    accelerator = record.load()
    assert isinstance(accelerator, Accelerator)
    assert accelerator.name == record.name
    assert accelerator.device_type == record.torch_type == DEVICE_TYPES[record.name]


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        BUILTIN[0].rank = 1  # type: ignore[misc]


# -- counting devices without torch ------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICE_FILES)
@pytest.mark.parametrize("present", [0, 1, 8])
def test_devices_are_counted_by_their_files_alone(
    name: str, present: int, plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, others, variable = DEVICE_FILES[name]
    monkeypatch.delenv(variable, raising=False)
    plug([*others, *(pattern.format(index) for index in range(present))])
    assert ONE_OF_EACH[name].device_count() == present


@pytest.mark.parametrize("name", DEVICE_FILES)
@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("0", 1), ("1,3", 2), (" 1, 3 ", 2), ("0,1,2,3,4,5", 4), ("-1", 0), ("0,-1,2", 1), ("0,,2", 1)],
)
def test_a_visible_devices_variable_limits_the_count(
    name: str, visible: str, count: int, plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, others, variable = DEVICE_FILES[name]
    monkeypatch.setenv(variable, visible)
    plug([*others, *(pattern.format(index) for index in range(4))])
    assert ONE_OF_EACH[name].device_count() == count


@pytest.mark.parametrize("record", [r for r in BUILTIN if r.name in DEVICE_FILES], ids=of_record)
def test_a_records_variable_is_the_accelerators(record: Backend) -> None:
    assert record.load().visible_devices_envs() == [DEVICE_FILES[record.name][2]]


@pytest.mark.parametrize(
    ("platform", "machine", "count"), [("darwin", "arm64", 1), ("darwin", "x86_64", 0), ("linux", "arm64", 0)]
)
def test_an_apple_gpu_is_counted_on_apple_silicon_only(
    platform: str, machine: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uname:
        pass

    uname = Uname()
    uname.machine = machine
    monkeypatch.setattr(probes.sys, "platform", platform)
    monkeypatch.setattr(probes.os, "uname", lambda: uname)
    assert ONE_OF_EACH["mps"].device_count() == count


def test_counting_every_kind_of_device_imports_neither_torch_nor_a_vendors_package() -> None:
    code = """
import sys
from acclimate.backends import BUILTIN
counts = [record.device_count() for record in BUILTIN]
assert all(type(count) is int and count >= 0 for count in counts), counts
assert counts[-1] >= 1, counts
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "rich")))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain_environment(), timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
