"""Accelerators written for DeepSpeed, without DeepSpeed: stand-ins in their form, and the real ones if given.

``ACCLIMATE_DEEPSPEED_ACCELERATORS`` is the folder of DeepSpeed's own, ``ACCLIMATE_INTEL_EXTENSION`` the one
that holds ``intel_extension_for_deepspeed``; both unmodified.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from acclimate import use_accelerator
from acclimate.accelerator import Accelerator
from acclimate.compat.deepspeed.names import NamesFinder, offer

Make = Callable[[str], Any]


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    if not offer():
        pytest.skip("DeepSpeed is installed")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, NamesFinder)]


def that_lists_files(device: str) -> Any:
    """An accelerator that looks for builders in all modules of a folder, and keeps their classes."""
    from deepspeed.accelerator import DeepSpeedAccelerator

    class Lists(DeepSpeedAccelerator):
        found: dict[str, Any] | None = None

        def __init__(self) -> None:
            self._name, self._communication_backend_name = device, "gloo"

        def op_builder_dir(self) -> str:
            return f"deepspeed.ops.op_builder.{device}"

        def get_op_builder(self, class_name: str) -> Any:
            if self.found is None:
                self.found = {}
                folder = os.path.dirname(importlib.import_module(self.op_builder_dir()).__file__ or "")
                for _, name, is_package in pkgutil.iter_modules([folder]):
                    if name not in ("all_ops", "builder") and not is_package:
                        module = importlib.import_module(f"{self.op_builder_dir()}.{name}")
                        names = [each for each in module.__dir__() if each.endswith("Builder")]
                        self.found |= {each: getattr(module, each) for each in names}
            return self.found.get(class_name)

        def create_op_builder(self, class_name: str) -> Any:
            return self.get_op_builder(class_name)()

    return Lists()


def that_lists_members(device: str) -> Any:
    """An accelerator that takes the classes in the package of its device."""
    from deepspeed.accelerator import DeepSpeedAccelerator

    class Members(DeepSpeedAccelerator):
        def __init__(self) -> None:
            self._name, self._communication_backend_name = device, "gloo"

        def get_op_builder(self, class_name: str) -> Any:
            package = importlib.import_module(f"deepspeed.ops.op_builder.{device}")
            return dict(inspect.getmembers(package, inspect.isclass)).get(class_name)

        def create_op_builder(self, class_name: str) -> Any:
            return self.get_op_builder(class_name)()

    return Members()


@pytest.mark.parametrize("make", [that_lists_files, that_lists_members])
@pytest.mark.parametrize("device", ["cpu", "hpu", "npu", "supa"])
def test_an_accelerator_that_lists_the_builders_of_its_device_finds_them(make: Make, device: str) -> None:
    extension = make(device)
    with use_accelerator(extension):  # else it would be asked again by what it asks
        for name in ("AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder"):
            target = Accelerator.op_builders[name]
            assert type(extension.create_op_builder(name)) is pkgutil.resolve_name(target)
        assert not extension.create_op_builder("QuantizerBuilder").is_compatible()
        assert extension.get_op_builder("NoSuchBuilder") is None


def test_an_extension_takes_host_builders_from_deepspeed_and_others_from_itself() -> None:
    from deepspeed.accelerator import DeepSpeedAccelerator
    from deepspeed.ops.op_builder.builder import OpBuilder

    class Own(OpBuilder):
        def __init__(self) -> None:
            super().__init__("fused_adam")

    class Extension(DeepSpeedAccelerator):
        def __init__(self) -> None:
            self._name, self._communication_backend_name = "cpu", "gloo"

        def get_op_builder(self, class_name: str) -> Any:
            from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
            from deepspeed.ops.op_builder.sparse_attn import SparseAttnBuilder

            known = (("FusedAdamBuilder", Own), ("AsyncIOBuilder", AsyncIOBuilder))
            return {**dict(known), "SparseAttnBuilder": SparseAttnBuilder}.get(class_name)

    with use_accelerator(Extension()):
        from deepspeed.ops.op_builder import AsyncIOBuilder, FusedAdamBuilder

        assert FusedAdamBuilder is Own
        assert AsyncIOBuilder().is_compatible() in (True, False)


# -- the real ones -----------------------------------------------------------------------------------


def given(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set: see the head of this file")
    return Path(os.environ[variable])


IN_TREE = """
import importlib.util, inspect, json, sys
import acclimate.compat.deepspeed
from acclimate.accelerator import Accelerator
import deepspeed.accelerator

name, path = sys.argv[1:]
spec = importlib.util.spec_from_file_location(f"deepspeed.accelerator.{name}", path)
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == spec.name]
made = {"class": classes[0].__name__, "base": issubclass(classes[0], Accelerator)}
try:
    accelerator = classes[0]()
except Exception as error:  # its vendor's package is asked for in the constructor
    made["error"] = f"{type(error).__name__}: {error}"
else:
    made["name"] = accelerator.device_name()
    made["backend"] = accelerator.communication_backend_name()
    made["missing"] = []
    for member in (each for each in dir(Accelerator) if not each.startswith("_")):
        try:
            getattr(accelerator, member)
        except Exception as error:
            made["missing"].append(f"{member}: {type(error).__name__}: {error}")
    made["builder"] = type(accelerator.create_op_builder("CPUAdamBuilder")).__module__
print(json.dumps(made))
"""


@pytest.mark.slow
def test_each_of_deepspeeds_own_accelerators_loads_on_our_base_class() -> None:
    folder = given("ACCLIMATE_DEEPSPEED_ACCELERATORS")
    files = [path for path in sorted(folder.glob("*_accelerator.py")) if "CUDA" in path.read_text().upper()]
    loaded: dict[str, Any] = {}
    for path in files:
        if path.stem not in ("abstract_accelerator", "real_accelerator"):
            done = subprocess.run(
                [sys.executable, "-c", IN_TREE, path.stem, str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            loaded[path.stem.removesuffix("_accelerator")] = json.loads(done.stdout.splitlines()[-1])
    assert all(each["base"] for each in loaded.values())
    assert {name for name, each in loaded.items() if "error" in each} <= {"hpu"}  # wants habana_frameworks
    for name, each in loaded.items():
        if "error" not in each:
            assert each["builder"] == "acclimate.ops.optimizers.builders", name
            # What is missing is missing in torch, which was not built for the device.
            wrong = [member for member in each["missing"] if "deepspeed" in member]
            assert not wrong, (name, wrong)


INTEL = """
import importlib.machinery, json, sys, types

for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):  # only for its hardware
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
sys.path.insert(0, sys.argv[1])
import acclimate.compat.deepspeed
from acclimate.accelerator import Accelerator
from intel_extension_for_deepspeed import XPU_Accelerator

accelerator = XPU_Accelerator()
public = [name for name in dir(Accelerator) if not name.startswith("_")]
ours = [name for name in public if name not in vars(XPU_Accelerator)]
missing = [name for name in ours if not hasattr(accelerator, name)]
sources = {}
for name in ("CPUAdagrad", "CPUAdam", "FusedAdam", "Quantizer", "Transformer", "Inference"):
    builder = accelerator.create_op_builder(f"{name}Builder")
    recipe = builder.recipe() if name == "CPUAdam" else None
    sources[name] = [str(path) for path in map(builder._found, builder.sources())]
    if recipe is not None:
        flags = recipe.units[0].flags
result = {
    "names": [accelerator.name, accelerator.device_type, accelerator.communication_backend],
    "ours": len(ours),
    "missing": missing,
    "sources": sources,
    "flags": list(flags),
}
print(json.dumps(result))
"""


@pytest.mark.slow
def test_intels_extension_imports_and_its_builders_find_their_sources(tmp_path: Path) -> None:
    folder = given("ACCLIMATE_INTEL_EXTENSION")
    done = subprocess.run(
        [sys.executable, "-c", INTEL, str(folder)],
        env={**os.environ, "ACCLIMATE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["names"] == ["xpu", "xpu", "ccl"]
    assert found["ours"] >= 14
    assert found["missing"] == []
    assert all(os.path.exists(path) for paths in found["sources"].values() for path in paths)
    assert "-fsycl" in found["flags"]
