"""The built-in records: the specification's order, counts without torch, and targets that load."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN, GENERIC_RANK, SPECIFIED, Backend, device_counts, presence, probes
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
def plug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Puts device files into ``/dev``; Intel is the vendor of those that all vendors' GPUs have."""
    monkeypatch.setattr(device_counts, "ROOT", tmp_path)

    def put(files: list[str], vendor: str = "0x8086") -> None:
        for name in files:
            write(tmp_path / name.lstrip("/"))
            if name.startswith("/dev/dri/renderD"):
                write(tmp_path / "sys/class/drm" / Path(name).name / "device/vendor", f"{vendor}\n")

    return put


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


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


def test_an_accelerator_whose_record_has_functions_can_be_pickled_and_copied() -> None:
    record = Backend(
        name="acme",
        target="acclimate.backends.cpu:CPUAccelerator",
        probe=lambda: None,
        rank=1,
        visible_devices_variable=lambda: "ACME_VISIBLE_DEVICES",
        exported_variable_prefixes=("ACME_",),
    )
    accelerator = record.load()
    for copied in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
        assert type(copied) is type(accelerator)
        assert copied.visible_devices_envs() == ["ACME_VISIBLE_DEVICES"]
        assert copied.exported_variable_prefixes == ("ACME_",)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        BUILTIN[0].rank = 1  # type: ignore[misc]


# -- counting devices without torch ------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICE_FILES)
@pytest.mark.parametrize("present", [0, 1, 8])
def test_devices_are_counted_by_their_files_alone(
    name: str, present: int, plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, others, variable = DEVICE_FILES[name]
    monkeypatch.delenv(variable, raising=False)
    plug([*others, *(pattern.format(index) for index in range(present))])
    assert ONE_OF_EACH[name].device_count() == present


@pytest.mark.parametrize("name", DEVICE_FILES)
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("0", 1),
        ("1,3", 2),
        (" 1, 3 ", 2),
        ("0,1,2,3,4,5", 4),
        ("-1", 0),
        ("-1,0", 0),
        ("-2,0,1", 0),
        (" -,0", 0),
        ("-GPU-1,0", 0),
        ("0,-1,2", 1),
        ("0,-7,2", 1),
        ("0,,2", 1),
    ],
)
def test_a_visible_devices_variable_limits_the_count(
    name: str, visible: str, count: int, plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, others, variable = DEVICE_FILES[name]
    monkeypatch.setenv(variable, visible)
    plug([*others, *(pattern.format(index) for index in range(4))])
    assert ONE_OF_EACH[name].device_count() == count


@pytest.mark.parametrize("record", [r for r in BUILTIN if r.name in DEVICE_FILES], ids=of_record)
def test_a_records_variable_is_the_accelerators(record: Backend) -> None:
    assert record.load().visible_devices_envs() == [DEVICE_FILES[record.name][2]]


@pytest.mark.parametrize("record", BUILTIN, ids=of_record)
def test_a_record_tells_the_launcher_what_the_accelerator_tells_a_rank(record: Backend) -> None:
    accelerator = record.load()
    assert record.visible_devices_variable() == accelerator.visible_devices_variable
    assert record.exported_variable_prefixes == accelerator.exported_variable_prefixes


def test_other_vendors_gpus_are_not_counted_as_intels(
    plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    plug(["/dev/dri/renderD128", "/dev/dri/renderD129"], vendor="0x1002")
    plug(["/dev/dri/renderD130"], vendor="0x8086")
    assert ONE_OF_EACH["xpu"].device_count() == 1


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plug: Callable[..., None]) -> Path:
    """A host with a processor and two AMD GPUs, and a build of torch for them."""
    package = tmp_path / "site" / "torch"
    write(package / "__init__.py")
    write(package / "version.py", "cuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n")
    monkeypatch.setattr(presence, "find_spec", lambda name: spec_of(package) if name == "torch" else None)
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    plug(["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"], vendor="0x1002")
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0\n")
    write(nodes / "1/properties", "cpu_cores_count 0\nsimd_count 416\ndrm_render_minor 128\n")
    write(nodes / "2/properties", "cpu_cores_count 0\nsimd_count 416\ndrm_render_minor 129\n")
    return tmp_path


def spec_of(package: Path) -> object:
    class Spec:
        origin = str(package / "__init__.py")
        submodule_search_locations = (str(package),)

    return Spec()


def test_amd_gpus_are_counted_where_torch_is_built_for_them(rocm: Path) -> None:
    assert ONE_OF_EACH["cuda"].device_count() == 2
    assert ONE_OF_EACH["cuda"].is_installed()
    assert ONE_OF_EACH["cuda"].visible_devices_variable() == "HIP_VISIBLE_DEVICES"


def test_amd_gpus_that_a_container_was_not_given_are_not_counted(rocm: Path) -> None:
    (rocm / "dev/dri/renderD129").unlink()
    assert ONE_OF_EACH["cuda"].device_count() == 1


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_hip_reads_either_variable(rocm: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert ONE_OF_EACH["cuda"].device_count() == 1
    assert variable in (
        ONE_OF_EACH["cuda"].visible_devices_variable(),
        *ONE_OF_EACH["cuda"].visible_devices_fallbacks,
    )


def test_hip_reads_its_own_variable_first(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert ONE_OF_EACH["cuda"].device_count() == 1
    assert ONE_OF_EACH["cuda"].visible_devices_variable() == "HIP_VISIBLE_DEVICES"


def test_gpus_that_rocms_lower_layer_hides_are_not_counted(
    rocm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert ONE_OF_EACH["cuda"].device_count() == 1
    assert ONE_OF_EACH["cuda"].visible_devices_variable() == "HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize("door", ["/dev/nvhost-gpu", "/dev/dxg"])
def test_a_gpu_without_a_numbered_file_is_one(
    door: str, plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plug([door])
    assert ONE_OF_EACH["cuda"].device_count() == 1


def test_what_torch_was_built_for_is_read_from_its_files() -> None:
    import torch

    built = {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": torch.version.xpu}
    assert {name: presence.torch_build().get(name) for name in built} == built


def test_software_that_is_not_installed_is_not_found() -> None:
    code = """
from acclimate.backends import BUILTIN
import sys
print([record.name for record in BUILTIN if record.is_installed()], "torch" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain_environment(), timeout=600
    )
    assert (ended.stdout, ended.stderr) == (f"{installed_here()} False\n", "")


def installed_here() -> list[str]:
    """By torch itself, for the records that need nothing else; vendors' packages are not in this suite."""
    import torch

    there = {
        "xpu": torch.version.xpu is not None,
        "mps": sys.platform == "darwin",
        "cuda": (torch.version.cuda or torch.version.hip) is not None,
        "cpu": True,
    }
    return [name for name, installed in there.items() if installed]


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
    monkeypatch.setattr(presence.sys, "platform", platform)
    monkeypatch.setattr(presence.os, "uname", lambda: uname)
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
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain_environment(), timeout=600
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
