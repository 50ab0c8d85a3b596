"""CUDA source is compiled by the toolkit's nvcc, for the GPUs present or for all; none of it needs a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from acclimate.backends import cuda_toolkit
from acclimate.backends.cuda import CUDAAccelerator
from acclimate.errors import CompilerNotFoundError, InvalidEnvironmentError
from acclimate.ops import OpBuilder, Source

NVCC = cuda_toolkit.home() is not None and shutil.which("c++") is not None

KERNEL = """
#include <cuda_runtime.h>
__global__ void nothing() {}
extern "C" __attribute__((visibility("default"))) int launch() {
  nothing<<<1, 1>>>();
  return cudaGetLastError();
}
"""


class OneKernelBuilder(OpBuilder):
    """An op whose sources a test puts into a folder."""

    name = "one_kernel"
    folder = Path()

    def sources(self) -> list[Source]:
        return [Source(str(self.folder / "kernel.cu"))]


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneKernelBuilder:
    (tmp_path / "kernel.cu").write_text(KERNEL)
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(OneKernelBuilder, "folder", tmp_path)
    return OneKernelBuilder.for_accelerator(CUDAAccelerator())


@pytest.mark.skipif(not NVCC, reason="there is no CUDA toolkit here")
def test_cuda_source_becomes_a_library_that_exports_only_what_is_marked(
    builder: OneKernelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    library = builder.build()
    assert library is not None
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in listing.stdout.splitlines()] == ["launch"]


def test_architectures_are_those_of_the_gpus_present() -> None:
    assert cuda_toolkit.architecture_flags([(9, 0), (8, 0), (9, 0)]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
    ]


def test_the_variable_for_architectures_goes_before_the_gpus_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;9.0a+PTX")
    assert cuda_toolkit.architecture_flags([(8, 0)]) == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_an_architecture_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 Hopper")
    with pytest.raises(InvalidEnvironmentError, match='TORCH_CUDA_ARCH_LIST has "Hopper"'):
        cuda_toolkit.architecture_flags([])


def test_without_a_gpu_all_common_architectures_and_those_to_come_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    flags = cuda_toolkit.architecture_flags([])
    assert "-gencode=arch=compute_90,code=sm_90" in flags
    assert flags[-1].rpartition("code=")[2].startswith("compute_")


@pytest.mark.parametrize(
    ("cuda", "oldest", "newest"),
    [
        ("12.7", "70", "compute_90"),
        ("12.8", "70", "compute_120"),  # the first toolkit that knows Blackwell
        ("12.9", "70", "compute_120"),
        ("13.0", "75", "compute_120"),  # the first that no longer knows Volta
        ("13.1", "75", "compute_120"),
    ],
)
def test_the_first_toolkit_that_knows_an_architecture_compiles_for_it(
    cuda: str, oldest: str, newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    flags = cuda_toolkit.architecture_flags([])
    assert flags[0] == f"-gencode=arch=compute_{oldest},code=sm_{oldest}"
    assert flags[-1].rpartition("code=")[2] == newest


@pytest.mark.parametrize(("number", "newest"), [(12070, "compute_90"), (12080, "compute_120")])
def test_the_version_of_the_toolkit_counts_where_torch_has_no_cuda(
    number: int, newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    (tmp_path / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {number}\n")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_toolkit.architecture_flags([])[-1].rpartition("code=")[2] == newest


def test_a_library_for_all_gpus_is_used_where_there_is_one(
    builder: OneKernelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithDevice(CUDAAccelerator):
        def device_count(self) -> int:
            return 1

        def get_device_capability(self, device_index: object = None) -> tuple[int, int]:
            return (9, 0)

    here = OneKernelBuilder.for_accelerator(WithDevice())
    everywhere = builder.recipe()
    assert here.recipe().source_key != everywhere.source_key
    assert here.recipe(portable=True).source_key == everywhere.source_key
    built = builder.folder / f"{everywhere.full_name}.so"
    built.touch()
    monkeypatch.setattr(here, "_folders", lambda: [builder.folder])
    assert here.built_library() == built


def test_without_a_toolkit_the_reason_says_where_it_was_looked_for(
    builder: OneKernelBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_toolkit, "_usual_homes", lambda: iter([tmp_path / "none"]))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CompilerNotFoundError, match="there is no nvcc in CUDA_HOME, on PATH"):
        cuda_toolkit.nvcc()
    assert builder.incompatibility() is not None


def test_a_source_that_the_accelerator_has_no_compiler_for_is_named() -> None:
    with pytest.raises(
        CompilerNotFoundError, match=r'the cuda accelerator has no compiler for "\.sycl" files'
    ):
        CUDAAccelerator().op_compiler(".sycl")
