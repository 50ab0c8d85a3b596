"""NVIDIA GPUs, and AMD GPUs with a ROCm build of torch, which also calls them CUDA devices."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin, cuda_toolkit
from acclimate.backends.presence import is_installed


class CUDAAccelerator(Accelerator):
    """Overrides little, since torch's device conventions are CUDA's."""

    device_type = "cuda"
    communication_backend = "gloo" if sys.platform == "win32" else "nccl"
    _record = builtin("cuda")
    supports_nvtx_domain = True
    op_builders = {  # noqa: RUF012 - a ClassVar by the interface
        **Accelerator.op_builders,
        "FusedAdamBuilder": "acclimate.ops.optimizers.builders:FusedAdamBuilder",
        "FusedLambBuilder": "acclimate.ops.optimizers.builders:FusedLambBuilder",
        "FusedLionBuilder": "acclimate.ops.optimizers.builders:FusedLionBuilder",
    }

    def is_available(self) -> bool:
        # torch.cuda.is_available() initialises the driver, after which forked children cannot use CUDA.
        return self.device_count() > 0

    # -- data types ------------------------------------------------------------------------------

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return not self.is_available() or torch.cuda.is_bf16_supported(
            including_emulation=including_emulation
        )

    def is_fp16_supported(self) -> bool:
        if torch.version.hip or not self.is_available():
            return True
        # With compute capability 6, float16 is much slower than float32 and deprecated by NVIDIA.
        oldest = 6 if os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1" else 7
        return self.get_device_capability()[0] >= oldest

    def is_fp64_supported(self) -> bool:
        return True

    # -- graphs ----------------------------------------------------------------------------------

    @contextmanager
    def _capture_by_module(self, graph: Any, **options: Any) -> Iterator[Any]:
        try:
            with super()._capture_by_module(graph, **options) as given:
                yield given
        except BaseException:
            self._end_captures_of_generators()
            raise

    def _end_captures_of_generators(self) -> None:
        """Lets generators draw again after a capture that failed.

        Torch tells a generator that a capture has ended only if the driver could end it. Until the next
        capture that succeeds, here an empty one, it raises: "Offset increment outside graph capture".
        """
        if self.is_current_stream_capturing():
            return
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an empty graph
            with super()._capture_by_module(self.create_graph()):
                pass

    # -- pinned memory ---------------------------------------------------------------------------

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        self._require_success(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))
        return True

    def unregister_host_memory(self, address: int) -> None:
        self._require_success(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def _require_success(self, result: int) -> None:
        """Raises the error of a call of CUDA's runtime."""
        if result:
            # The runtime also keeps the error for the next launch of a kernel, whose caller it would mislead.
            # torch clears it there; it has no function that only does that.
            with suppress(RuntimeError):
                torch.ones((), device=self.current_device_name())
        torch.cuda.check_error(result)

    # -- native ops ------------------------------------------------------------------------------

    def toolkit_version(self) -> str | None:
        return torch.version.hip or super().toolkit_version()

    def op_compiler(self, suffix: str = ".cpp") -> list[str]:
        if suffix != ".cu":
            return super().op_compiler(suffix)
        return [cuda_toolkit.nvcc()]

    def op_compile_flags(self, suffix: str = ".cpp", portable: bool = False) -> list[str]:
        flags = super().op_compile_flags(suffix, portable)
        if suffix != ".cu":
            return flags
        devices = 0 if portable else self.device_count()
        capabilities = [self.get_device_capability(index) for index in range(devices)]
        host = [f"-Xcompiler={flag}" for flag in flags]
        # Without USE_CUDA torch's stable headers omit the stream and the error check.
        return [
            *host,
            "-DUSE_CUDA",
            "--expt-relaxed-constexpr",
            "--threads=0",
            *cuda_toolkit.architecture_flags(capabilities),
        ]

    def op_include_paths(self) -> list[str]:
        home = cuda_toolkit.home()
        return [str(home / "include")] if home is not None else []

    def op_link_flags(self, suffixes: Collection[str] = (".cpp",)) -> list[str]:
        if ".cu" not in suffixes:
            return []
        home = cuda_toolkit.home()
        folder = cuda_toolkit.runtime_folder(home) if home is not None else None
        # Static, so that the library does not depend on the minor release of torch's runtime.
        flags = [f"-L{folder}"] if folder is not None else []
        flags += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        built_with_cuda = (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").is_file()
        return [*flags, "-ltorch_cuda"] if built_with_cuda else flags

    # -- profiler marks: NVTX; only the nvtx package supports domains and categories -------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        if domain is not None and is_installed("nvtx"):
            import nvtx

            nvtx.push_range(msg, domain=domain, category=category)
        else:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if domain is not None and is_installed("nvtx"):
            import nvtx

            nvtx.pop_range(domain)
        else:
            torch.cuda.nvtx.range_pop()

    # -- Triton ----------------------------------------------------------------------------------

    def _triton_capability(self) -> tuple[int, int]:
        """Returns the compute capability if Triton can be used, else (0, 0).

        On ROCm always (0, 0): importing Triton there has broken torch's device API.
        """
        usable = not torch.version.hip and is_installed("triton") and self.is_available()
        return self.get_device_capability() if usable else (0, 0)

    def is_triton_supported(self) -> bool:
        return self._triton_capability() >= (8, 0)

    def prefer_triton_grouped_mm(self) -> bool:
        # torch._grouped_mm is one fused kernel from compute capability 9.0 on, and a loop on older GPUs.
        return (8, 0) <= self._triton_capability() < (9, 0)
