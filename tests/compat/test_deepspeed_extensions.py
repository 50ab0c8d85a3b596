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
import torch

from acclimate import use_accelerator
from acclimate.accelerator import Accelerator
from acclimate.compat.deepspeed.names import NamesFinder, offer
from fake_vendors import FakeMachine
from fresh_process import FreshProcesses

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
                        names = [attribute for attribute in module.__dir__() if attribute.endswith("Builder")]
                        self.found |= {builder: getattr(module, builder) for builder in names}
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


# -- one that is written as the specification says ---------------------------------------------------

_FILES = {
    "__init__.py": "from .acme_accelerator import ACME_Accelerator",
    "acme_accelerator.py": """
import torch
import deepspeed
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


class ACME_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name = "cpu"
        self._communication_backend_name = "gloo"

    def device_name(self, device_index=None):
        return "cpu"

    def current_device_name(self):
        return "cpu"

    def default_generator(self, device_index):
        return torch.default_generator

    def amp(self):
        return torch.cpu.amp

    def range_push(self, msg):
        pass

    def op_builder_dir(self):
        return "acme_extension_for_deepspeed.op_builder"

    def create_op_builder(self, op_name):
        builder = self.get_op_builder(op_name)
        return builder() if builder is not None else None

    def get_op_builder(self, class_name):
        from acme_extension_for_deepspeed.op_builder import AnswerBuilder
        from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

        return {"AnswerBuilder": AnswerBuilder, "AsyncIOBuilder": AsyncIOBuilder}.get(class_name)


def install():
    deepspeed.accelerator.real_accelerator.set_accelerator(ACME_Accelerator())
""",
    "op_builder/__init__.py": "from .answer import AnswerBuilder",
    "op_builder/builder.py": """
import filecmp, importlib, os, shutil
from pathlib import Path
from deepspeed.ops.op_builder.builder import OpBuilder, TORCH_MAJOR, TORCH_MINOR


class ACMEOpBuilder(OpBuilder):
    def version_dependent_macros(self):
        return ["-DVERSION_GE_1_5"] if (TORCH_MAJOR, TORCH_MINOR) > (1, 4) else []

    def cxx_args(self):
        return ["-O1", "-std=c++17"]

    def extra_ldflags(self):
        return ["-Wl,--as-needed -Wl,-O1", ""]

    def load(self, verbose=True):
        from deepspeed.git_version_info import installed_ops, torch_info  # noqa: F401

        if installed_ops.get(self.name, False):
            return importlib.import_module(self.absolute_name())
        return self.jit_load(verbose)


def acme_kernel_path(code_path):
    from .answer import AnswerBuilder

    source = os.path.join(Path(__file__).parent.absolute(), code_path)
    target = AnswerBuilder().deepspeed_src_path(os.path.join("third-party", code_path))
    if not (os.path.exists(target) and filecmp.cmp(target, source)):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, target)
    return os.path.join("third-party", code_path)


def acme_kernel_include(code_path):
    return os.path.join(Path(__file__).parent.absolute(), code_path)
""",
    "op_builder/answer.py": """
from .builder import ACMEOpBuilder, acme_kernel_include, acme_kernel_path


class AnswerBuilder(ACMEOpBuilder):
    BUILD_VAR = "DS_BUILD_ANSWER"
    NAME = "answer"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"deepspeed.ops.acme.{self.NAME}_op"

    def sources(self):
        return [acme_kernel_path("csrc/answer.cpp")]

    def include_paths(self):
        return [acme_kernel_include("csrc/includes")]

    def cxx_args(self):
        return super().cxx_args() + self.version_dependent_macros()
""",
    "op_builder/csrc/includes/answer.h": "#define ANSWER 42",
    "op_builder/csrc/answer.cpp": """
#include <Python.h>
#include "answer.h"
#ifndef VERSION_GE_1_5
#error "the builder's own flags are missing"
#endif
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op", "", -1, methods};
#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
""",
}


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension's module with its accelerator, from files."""
    for name, text in _FILES.items():
        path = tmp_path / "acme_extension_for_deepspeed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path / "cache"))
    yield importlib.import_module("acme_extension_for_deepspeed.acme_accelerator")
    for name in [name for name in sys.modules if name.startswith("acme_extension_for_deepspeed")]:
        del sys.modules[name]


def test_an_extension_as_the_specification_describes_it_is_the_accelerator(extension: Any) -> None:
    with use_accelerator("cpu"):
        extension.install()
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        assert isinstance(accelerator, extension.ACME_Accelerator)
        assert torch.ones(2, device=accelerator.current_device_name()).sum() == 2
        accelerator.range_push("step", domain=None)
        missing = [name for name in dir(Accelerator) if not hasattr(accelerator, name)]
        assert not missing


def test_its_builder_compiles_the_sources_of_its_own_folder(extension: Any) -> None:
    with use_accelerator("cpu"):
        extension.install()
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("AnswerBuilder")
        if not builder.is_compatible():
            pytest.skip(str(builder.error_log))
        assert builder.load().answer() == 42
        assert get_accelerator().create_op_builder("QuantizerBuilder") is None


def test_intels_extension_is_detected_without_deepspeed(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.write(
        "intel_extension_for_deepspeed",
        """
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.ops.op_builder.builder import OpBuilder


class XPU_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name, self._communication_backend_name = "xpu", "ccl"


torch.xpu.device_count = lambda: 1  # its hardware
""",
    )
    told = fresh.check(
        "from acclimate import get_accelerator; tell(name=get_accelerator().name)", path=machine.path
    ).told
    assert told == {"name": "xpu.external"}


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
    assert all(result["base"] for result in loaded.values())
    assert {name for name, result in loaded.items() if "error" in result} <= {
        "hpu"
    }  # wants habana_frameworks
    for name, result in loaded.items():
        if "error" not in result:
            assert result["builder"] == "acclimate.ops.optimizers.builders", name
            # What is missing is missing in torch, which was not built for the device.
            wrong = [member for member in result["missing"] if "deepspeed" in member]
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
