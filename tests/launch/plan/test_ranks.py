"""Which accelerator the launcher counts, and what its ranks see, on machines made of files."""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from acclimate.backends import device_counts, presence
from acclimate.errors import AcceleratorUnavailableError, InvalidEnvironmentError, LaunchOptionError
from acclimate.launch.plan.devices import count_local_ranks, find_accelerator
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan, plan_ranks

VARIABLES = (
    "DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)  # fmt: skip


class Machine:
    """A root folder with device files, and a folder of packages."""

    def __init__(self, folder: Path) -> None:
        self.root, self.site = folder / "root", folder / "site"
        self.build(cuda=None, hip=None, xpu=None)

    def build(self, **platforms: str | None) -> None:
        """Installs torch, built for these."""
        lines = (f"{name}: Optional[str] = {release!r}\n" for name, release in platforms.items())
        self.install("torch", "__version__ = '2.13.0'\n" + "".join(lines))

    def install(self, package: str, version: str = "") -> None:
        folder = self.site / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "version.py").write_text(version)

    def plug(self, *files: str) -> None:
        for name in files:
            path = self.root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def find_spec(self, name: str) -> ModuleSpec | None:
        """As Python's, but that what the machine may have is only looked for on it."""
        folder = self.site / name
        if folder.is_dir():
            return ModuleSpec(name, None, origin=str(folder / "__init__.py"))
        return None if name.startswith(("torch", "intel", "habana")) else find_spec(name)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(device_counts, "ROOT", made.root)
    monkeypatch.setattr(presence, "find_spec", made.find_spec)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return made


def found() -> tuple[str, int]:
    accelerator = find_accelerator()
    assert accelerator is not None
    return accelerator.name, count_local_ranks(accelerator)


def test_devices_that_torch_is_built_for_are_counted(machine: Machine) -> None:
    machine.plug(*(f"/dev/nvidia{index}" for index in range(4)), "/dev/nvidiactl")
    machine.build(cuda="12.8")
    assert found() == ("cuda", 4)


def test_a_build_of_torch_for_cpus_means_cpu_whatever_is_plugged_in(machine: Machine) -> None:
    machine.plug("/dev/nvidia0", "/dev/nvidia1")
    assert found()[0] == "cpu"


def test_a_build_of_torch_for_gpus_means_cpu_where_none_is_plugged_in(machine: Machine) -> None:
    machine.build(cuda="12.8")
    assert found()[0] == "cpu"


def test_a_vendors_package_goes_before_torchs_own_devices(machine: Machine) -> None:
    machine.plug("/dev/nvidia0", "/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager")
    machine.build(cuda="12.8")
    assert found() == ("cuda", 1)
    machine.install("torch_npu")
    assert found() == ("npu", 2)


def test_a_choice_by_name_is_counted_though_another_would_be_detected(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.plug("/dev/nvidia0")
    machine.build(cuda="12.8")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert found()[0] == "cpu"


def test_two_choices_that_differ_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("ACCLIMATE_ACCELERATOR", "cuda")
    with pytest.raises(InvalidEnvironmentError):
        find_accelerator()


def test_a_choice_without_a_device_says_what_to_do(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(AcceleratorUnavailableError, match=r'DS_ACCELERATOR is "npu".*--num_accelerators'):
        found()


def job(slots: tuple[int, ...], **settings: object) -> JobPlan:
    values: dict[str, object] = {
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "accelerator": "cuda",
        **settings,
    }
    return JobPlan((HostPlan("localhost", slots),), ("true",), {}, "/", **values)  # type: ignore[arg-type]


def test_all_ranks_of_a_host_see_its_devices_in_the_order_of_their_local_ranks(machine: Machine) -> None:
    plans = plan_ranks(job((1, 3)), 0, {})
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["1,3", "1,3"]
    assert [plan.environment["LOCAL_RANK"] for plan in plans] == ["0", "1"]


@pytest.mark.parametrize(
    ("visible", "slots", "seen"),
    [("4,5,6,7", (0, 2), "4,6"), ("GPU-8f2a,MIG-11", (1,), "MIG-11"), (" 3 , 1 ", (0, 1), "3,1")],
)
def test_devices_are_chosen_from_those_that_are_visible_already(
    machine: Machine, visible: str, slots: tuple[int, ...], seen: str
) -> None:
    plans = plan_ranks(job(slots), 0, {"CUDA_VISIBLE_DEVICES": visible})
    assert {plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plans} == {seen}


@pytest.mark.parametrize(
    ("own", "given", "seen"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, {}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ({}, {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        (
            {"CUDA_VISIBLE_DEVICES": "2,3"},
            {"HIP_VISIBLE_DEVICES": "5,6"},
            {"CUDA_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "6"},
        ),
        ({}, {}, {"HIP_VISIBLE_DEVICES": "1"}),
    ],
)
def test_on_rocm_the_choice_that_hip_reads_is_kept(
    machine: Machine, own: dict[str, str], given: dict[str, str], seen: dict[str, str]
) -> None:
    """HIP's variable, else CUDA's: of the launcher's own variables, or of ``--env``."""
    machine.build(hip="7.0.51831")
    (plan,) = plan_ranks(replace(job((1,)), environment=given), 0, own)
    assert {name: value for name, value in plan.environment.items() if "VISIBLE_DEVICES" in name} == seen


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1", 2), ("0,1,-1,2,3", 2), ("0,1,,2,3", 2), ("0,-1", 1), ("-1", 0), (" -1,0", 0)],
)
def test_a_slot_beyond_the_visible_devices_is_refused(machine: Machine, visible: str, count: int) -> None:
    """Vendors read the list up to the first entry that is no device."""
    with pytest.raises(LaunchOptionError, match=f"Slot 2 has no device: CUDA_VISIBLE_DEVICES names {count} "):
        plan_ranks(job((2,)), 0, {"CUDA_VISIBLE_DEVICES": visible})


def test_a_rank_on_cpu_has_no_variable_of_devices(machine: Machine) -> None:
    (plan,) = plan_ranks(job((0,), accelerator="cpu"), 0, {})
    assert not [name for name in plan.environment if "VISIBLE" in name]


def test_ranks_count_on_from_the_hosts_before(machine: Machine) -> None:
    two = JobPlan(
        (HostPlan("a", (0, 1, 2)), HostPlan("b", (0, 1))),
        ("true",),
        {"EXPORTED": "yes"},
        "/",
        "cpu",
        master_addr="10.0.0.1",
        master_port=4444,
        log_dir="/logs",
    )
    plans = plan_ranks(two, 1, {"EXPORTED": "no", "OWN": "kept"})
    assert [plan.rank for plan in plans] == [3, 4]
    assert [plan.local_rank for plan in plans] == [0, 1]
    assert [str(plan.log_path) for plan in plans] == ["/logs/rank_3.log", "/logs/rank_4.log"]
    first = plans[0].environment
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["NODE_RANK"]) == ("5", "2", "1")
    assert (first["EXPORTED"], first["OWN"], first["MASTER_ADDR"]) == ("yes", "kept", "10.0.0.1")


def test_ranks_are_not_planned_without_a_master(machine: Machine) -> None:
    with pytest.raises(LaunchOptionError, match="--master_addr"):
        plan_ranks(job((0,), master_port=None), 0, {})


def test_ranks_are_bound_where_that_is_asked_for() -> None:
    (bound,) = plan_ranks(job((0,), accelerator="cpu", bind_cores=True), 0, {})
    assert bound.binding is not None
    assert bound.environment["OMP_NUM_THREADS"] == str(bound.binding.cores)
    (free,) = plan_ranks(job((0,), accelerator="cpu"), 0, {})
    assert free.binding is None
