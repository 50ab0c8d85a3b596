"""Code and extensions written for DeepSpeed, where DeepSpeed is not installed."""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import acclimate
from acclimate import use_accelerator
from acclimate.backends import BUILTIN
from acclimate.backends.cpu import CPUAccelerator
from acclimate.compat.deepspeed.names import NamesFinder, offer, offered_names
from acclimate.errors import AcclimateError, OpBuildError, UnsupportedError


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    if not offer():
        pytest.skip("DeepSpeed is installed")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, NamesFinder)]


def test_every_name_of_the_table_is_there() -> None:
    for module, names in offered_names().items():
        found = importlib.import_module(module)
        assert [name for name in names if getattr(found, name) is None] == [], module
        assert set(names) <= set(dir(found)), module


def test_each_class_of_an_accelerator_is_its_records() -> None:
    offered = {
        module: set(names.values())
        for module, names in offered_names().items()
        if any(name.endswith("_Accelerator") for name in names)
    }
    records = {
        f"deepspeed.accelerator.{record.name}_accelerator": {record.target}
        for record in BUILTIN
        if "." not in record.name
    }
    assert offered == records


def test_the_line_of_the_specification_gives_the_accelerator() -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    with use_accelerator("cpu"):
        assert get_accelerator() is acclimate.get_accelerator()
        assert isinstance(get_accelerator(), DeepSpeedAccelerator)
        before = get_accelerator()
        set_accelerator(CPU_Accelerator())
        assert get_accelerator() is not before
    assert not isinstance(3, DeepSpeedAccelerator)


def test_transformers_and_accelerate_find_no_deepspeed() -> None:
    accelerate = pytest.importorskip("accelerate.utils")
    integrations = pytest.importorskip("transformers.integrations")
    import deepspeed

    assert deepspeed.__spec__.origin == "acclimate.compat.deepspeed"
    assert not accelerate.is_deepspeed_available()
    assert not integrations.is_deepspeed_available()


def test_builders_are_those_of_the_accelerator() -> None:
    with use_accelerator("cpu") as accelerator:
        from deepspeed.ops import op_builder
        from deepspeed.ops.op_builder import CPUAdamBuilder
        from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

        assert CPUAdamBuilder is accelerator.get_op_builder("CPUAdamBuilder")
        assert AsyncIOBuilder is accelerator.get_op_builder("AsyncIOBuilder")
        with pytest.raises(AttributeError, match="neither the cpu accelerator nor DeepSpeed has such an op"):
            op_builder.NoSuchBuilder  # noqa: B018


def test_builders_that_only_deepspeed_has_can_be_imported_and_say_that_they_cannot_be_used() -> None:
    with use_accelerator("cpu"):
        from deepspeed.ops.op_builder import QuantizerBuilder
        from deepspeed.ops.op_builder.cpu import NotImplementedBuilder
        from deepspeed.ops.op_builder.sparse_attn import SparseAttnBuilder

        for builder in (QuantizerBuilder(), NotImplementedBuilder(), SparseAttnBuilder()):
            assert not builder.is_compatible()
            assert "acclimate run --deepspeed" in builder.error_log
            with pytest.raises(OpBuildError, match=f"no op for DeepSpeed's {type(builder).__name__}"):
                builder.load()


def test_what_is_not_here_says_what_to_use_instead() -> None:
    import deepspeed

    with pytest.raises(UnsupportedError, match=r"acclimate run --deepspeed.*fully_shard"):
        deepspeed.initialize(model=None)
    with pytest.raises(AttributeError, match=r"no zero here.*dir\(deepspeed\).*acclimate run --deepspeed"):
        deepspeed.zero  # noqa: B018
    assert not hasattr(deepspeed, "zero")


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("import deepspeed.runtime.engine", "deepspeed.runtime has no engine"),
        ("from deepspeed.runtime.engine import DeepSpeedEngine", "deepspeed.runtime has no engine"),
        ("from deepspeed import zero", "deepspeed has no zero"),
        ("from deepspeed.accelerator.real_accelerator import no_such", "real_accelerator has no no_such"),
        ("from deepspeed.ops.op_builder import MoEBuilder", "deepspeed.ops.op_builder has no MoEBuilder"),
    ],
)
def test_an_import_of_what_is_not_here_says_what_is_missing_and_what_to_do(line: str, missing: str) -> None:
    with (
        use_accelerator("cpu"),
        pytest.raises(ModuleNotFoundError, match=f"{missing} here.*acclimate run --deepspeed"),
    ):
        exec(line, {})


def test_all_modules_are_there_after_import_deepspeed_alone() -> None:
    import deepspeed

    with use_accelerator("cpu"):
        deepspeed.accelerator.real_accelerator.set_accelerator(acclimate.get_accelerator())
        assert deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam is acclimate.ops.CPUAdam
        assert deepspeed.comm.is_initialized() in (True, False)


def test_builders_have_what_programs_read_of_deepspeeds() -> None:
    with use_accelerator("cpu") as accelerator:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        assert (CPUAdamBuilder.NAME, CPUAdamBuilder.BUILD_VAR) == ("cpu_adam", "DS_BUILD_CPU_ADAM")
        builder = CPUAdamBuilder()
        assert builder.absolute_name().rpartition(".")[2] == builder.name
        assert builder.is_compatible() is (builder.error_log is None)
        assert builder.accelerator is accelerator


def test_the_accelerator_has_the_attribute_that_programs_read_of_deepspeeds() -> None:
    with use_accelerator("cpu") as accelerator:
        assert accelerator._name == "cpu"


def test_modules_can_be_imported_with_a_star() -> None:
    found: dict[str, Any] = {}
    with use_accelerator("cpu"):
        exec("from deepspeed.accelerator import *\nfrom deepspeed.ops.op_builder.cpu import *", found)
        assert found["get_accelerator"] is acclimate.get_accelerator
        assert found["CPUAdamBuilder"].NAME == "cpu_adam"


def test_collectives_have_deepspeeds_names_and_what_is_missing_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import deepspeed.comm as dist
    from deepspeed.comm import comm

    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_local_rank() == comm.get_local_rank() == 3
    assert dist.all_reduce is comm.all_reduce is torch.distributed.all_reduce
    with pytest.raises(AttributeError, match=r"comm has no configure here.*acclimate run --deepspeed"):
        dist.configure()


def test_settings_of_inference_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import deepspeed

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("acclimate.llm.init_inference", lambda *args: calls.append(args))
    (tmp_path / "settings.json").write_text('{"tensor_parallel": {"tp_size": 2}, "dtype": "fp32"}')
    deepspeed.init_inference("m", config=str(tmp_path / "settings.json"), dtype="bf16")
    assert calls == [("m", 2, "bfloat16")]
    with pytest.raises(ValueError, match=r"must be a mapping or the path of a JSON file with one, not \[1\]"):
        deepspeed.init_inference("m", [1])  # type: ignore[arg-type]


def test_settings_of_inference_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("acclimate.llm.init_inference", lambda *args: calls.append(args))
    deepspeed.init_inference("m", mp_size=2, dtype=torch.half, replace_with_kernel_inject=True)
    deepspeed.init_inference("m", {"tensor_parallel": {"tp_size": 3}, "dtype": "bf16"})
    deepspeed.init_inference("m")
    deepspeed.init_inference("m", checkpoint=None, save_mp_checkpoint_path=None)
    assert calls == [("m", 2, "float16"), ("m", 3, "bfloat16"), ("m", 1, "auto"), ("m", 1, "auto")]
    with pytest.raises(UnsupportedError, match="quant"):
        deepspeed.init_inference("m", quant={"enabled": True})


def test_messages_are_logged_on_the_named_ranks(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.utils import log_dist, logger

    with caplog.at_level(logging.INFO, logger.name):
        log_dist("everywhere")
        log_dist("elsewhere", ranks=[1])
    assert [record.getMessage() for record in caplog.records] == ["[Rank 0] everywhere"]


def test_memory_in_use_is_logged_if_forced(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.runtime.utils import see_memory_usage
    from deepspeed.utils import logger

    with use_accelerator("cpu"), caplog.at_level(logging.INFO, logger.name):
        see_memory_usage("not this")
        see_memory_usage("after the step", force=True)
    [line] = [record.getMessage() for record in caplog.records]
    assert "after the step: " in line
    assert "GiB in use" in line


# -- extensions ------------------------------------------------------------------------------------


def extension_of_2023() -> Any:
    """An accelerator with the methods, and the arguments, that DeepSpeed declared then."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    class Extension(DeepSpeedAccelerator):
        def __init__(self) -> None:
            self._name = "cpu"
            self._communication_backend_name = "gloo"
            self.calls: list[Any] = []

        def current_device(self) -> int:
            return 0

        def range_push(self, msg: str) -> None:
            self.calls.append(msg)

        def range_pop(self) -> None:
            self.calls.append("pop")

        def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            self.calls.append("pin")
            return tensor

        def amp(self) -> str:
            return "its own"

        def initial_seed(self, seed: int) -> int:
            return seed

        def default_generator(self, device_index: int) -> torch.Generator:
            self.calls.append(device_index)
            return torch.default_generator

    return Extension()


def test_an_extension_of_2023_has_all_methods_and_takes_arguments_of_both_times() -> None:
    extension = extension_of_2023()
    assert (extension.name, extension.device_type) == ("cpu", "cpu")
    assert extension.communication_backend_name() == extension.communication_backend == "gloo"
    assert extension.get_compile_backend() == "inductor"
    extension.range_push("step", domain=None)
    extension.range_push("step")
    extension.range_pop(domain=None)
    extension.pin_memory(torch.ones(2), make_copy=True)
    extension.default_generator()
    extension.default_generator(3)
    assert extension.calls == ["step", "step", "pop", "pin", 0, 3]
    assert extension.amp() == "its own"
    assert isinstance(extension.amp.GradScaler(enabled=False), torch.amp.GradScaler)
    assert extension.initial_seed(4) == 4
    assert extension.initial_seed() == torch.initial_seed()
    # An argument with a meaning that the extension does not have goes to our method.
    assert extension.pin_memory(torch.ones(2, 3), make_copy=False, match_shape=False).shape == (6,)


def test_an_extension_of_the_host_that_only_sets_its_names_has_the_hosts_methods() -> None:
    from deepspeed.accelerator import DeepSpeedAccelerator

    class Host(DeepSpeedAccelerator):
        """Of a vendor."""

        def __init__(self) -> None:
            self._name, self._communication_backend_name = "cpu", "gloo"

        def get_device_name(self) -> str:
            return "a vendor's"

        def memory_allocated(self) -> int:
            return 7

    host, ours = Host(), CPUAccelerator()
    assert isinstance(host, Host)
    assert (type(host).__name__, type(host).__doc__) == ("Host", "Of a vendor.")
    assert type(host) is type(Host())
    for method in (
        "current_device", "current_device_name", "device_count", "is_synchronized_device", "use_host_timers",
        "supported_dtypes", "total_memory", "get_device_capability",
    ):  # fmt: skip
        assert getattr(host, method)() == getattr(ours, method)(), method
    assert host.default_generator(0) is torch.default_generator
    host.reset_peak_memory_stats()
    assert host.communication_backend_name() == "gloo"
    assert (host.get_device_name(), host.memory_allocated()) == ("a vendor's", 7)
    # An argument that the extension does not know goes to the host's method.
    assert host.get_device_name(0) == ours.get_device_name(0)


class HostExtension:
    """Stands here while the extension below is pickled, which looks for its class by its name."""


def test_an_extension_and_placeholders_of_builders_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import DeepSpeedAccelerator
    from deepspeed.ops.op_builder import QuantizerBuilder

    def init(self: Any) -> None:
        self._name, self._communication_backend_name = "cpu", "gloo"

    members = {"__init__": init, "__module__": __name__}
    extension_class: Any = type(DeepSpeedAccelerator)("HostExtension", (DeepSpeedAccelerator,), members)
    monkeypatch.setattr(sys.modules[__name__], "HostExtension", extension_class)
    extension = extension_class()
    extension.setting = 7
    for copied in (pickle.loads(pickle.dumps(extension)), copy.deepcopy(extension)):
        assert type(copied) is type(extension)
        assert (copied.setting, copied.device_count()) == (7, CPUAccelerator().device_count())
    with use_accelerator("cpu"):
        assert pickle.loads(pickle.dumps(QuantizerBuilder)) is QuantizerBuilder


def test_an_extension_can_be_set_as_the_accelerator() -> None:
    extension = extension_of_2023()
    with use_accelerator(extension):
        from deepspeed.accelerator import get_accelerator

        assert get_accelerator() is extension


def test_a_subclass_without_a_name_says_so() -> None:
    from deepspeed.accelerator import DeepSpeedAccelerator

    class Nameless(DeepSpeedAccelerator):
        pass

    with pytest.raises(AcclimateError, match="Nameless must set _name"):
        Nameless().device_type  # noqa: B018


_MODULE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op", "", -1, methods};
#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""

_BUILDER = """
from deepspeed.ops.op_builder.builder import OpBuilder, TORCH_MAJOR

class AnswerBuilder(OpBuilder):
    BUILD_VAR = "DS_BUILD_ANSWER"
    NAME = "answer"

    def __init__(self, name=None):
        super().__init__(name=self.NAME if name is None else name)

    def absolute_name(self):
        return f"deepspeed.ops.{self.NAME}_op"

    def sources(self):
        return ["csrc/answer.cpp"]

    def include_paths(self):
        return []

    def cxx_args(self):
        return self.strip_empty_entries(["", f"-DANSWER={40 + TORCH_MAJOR}"])
"""


def test_a_builder_written_for_deepspeed_builds_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vendor_ops"
    (package / "csrc").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "answer.py").write_text(_BUILDER)
    (package / "csrc" / "answer.cpp").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path / "cache"))
    with use_accelerator("cpu"):
        builder = importlib.import_module("vendor_ops.answer").AnswerBuilder()
        if not builder.is_compatible():
            pytest.skip(str(builder.error_log))
        assert builder.load().answer() == 42
        assert builder.jit_load(verbose=False).answer() == 42
        (package / "csrc" / "answer.cpp").unlink()
        with pytest.raises(OpBuildError, match=r"answer needs csrc/answer\.cpp|needs csrc/answer\.cpp"):
            builder.load()


def test_a_builder_may_give_sources_and_headers_by_whole_paths(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    class Builder(OpBuilder):
        def sources(self) -> list[str]:
            return [str(tmp_path / "answer.cpp")]

        def include_paths(self) -> list[str]:
            return [str(tmp_path)]

    (tmp_path / "answer.cpp").write_text(_MODULE)
    with use_accelerator("cpu"):
        recipe = Builder("answer").recipe()
    assert recipe.units[0].path == tmp_path / "answer.cpp"
    assert recipe.include_paths == (tmp_path,)


def test_a_builder_has_the_helpers_that_deepspeeds_builders_call(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    builder = OpBuilder("helped")
    assert builder.simd_width() in ("-D__AVX512__", "-D__AVX256__", "-D__SCALAR__")
    assert builder.cpu_arch().startswith("-m")
    assert builder.nvcc_args() == []
    assert builder.is_rocm_pytorch() is (torch.version.hip is not None)
    assert builder.command_exists("no_such_command|sh")
    assert not builder.command_exists("no_such_command")
    assert "helped needs the command no_such_command" in caplog.text
    assert not builder.has_function("no_such_function", ("m", "no_such_library"))
    if find_library("m") is not None:
        assert builder.has_function("cos", ("no_such_library", "m"))
    builder.warning("libaio is missing")
    assert "libaio is missing" in caplog.text


# -- where the names are offered ---------------------------------------------------------------------


def test_an_installed_deepspeed_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("real = True")
    program = "import acclimate.compat.deepspeed, deepspeed; print(deepspeed.real)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr


def test_a_folder_called_deepspeed_does_not_hide_the_names(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    program = (
        "import acclimate.compat.deepspeed\n"
        "from deepspeed.accelerator import get_accelerator; print(get_accelerator.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "acclimate.selection\n", done.stderr


def test_a_deepspeed_that_another_finder_has_is_left_alone_and_so_are_its_missing_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Editable(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(
            self, name: str, path: Any, target: Any = None
        ) -> importlib.machinery.ModuleSpec | None:
            of = importlib.machinery.ModuleSpec
            return of(name, self, origin="here", is_package=True) if name == "deepspeed" else None

        def exec_module(self, module: ModuleType) -> None:
            module.__dict__["real"] = True

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    assert not offer()
    import deepspeed

    assert deepspeed.real
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'deepspeed\.zero'"):
        importlib.import_module("deepspeed.zero")


def test_acclimate_run_offers_the_names_to_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    # Python would run this one by itself; ours runs in its place, and then runs it.
    (tmp_path / "sitecustomize.py").write_text("print('site of the user')")
    (tmp_path / "train.py").write_text("""
import acclimate, deepspeed.accelerator as names
print(names.get_accelerator is acclimate.get_accelerator)
""")
    command = [sys.executable, "-m", "acclimate", "run", "--deepspeed_names", "--num_accelerators", "1"]
    done = subprocess.run(
        [*command, "--env", f"PYTHONPATH={tmp_path}", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "site of the user\nTrue\n", done.stderr
