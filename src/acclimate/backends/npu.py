"""Huawei Ascend NPUs, through torch_npu."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin


class NPUAccelerator(Accelerator):
    """Follows torch's device conventions; profiler marks go through MSTX, and the toolkit is CANN."""

    device_type = "npu"
    communication_backend = "hccl"
    _record = builtin("npu")
    supports_nvtx_domain = True
    _processors_field = "vector_core_num"  # as torch_npu counts processors for torch.compile

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.torch_module.mstx.range_push(msg, domain=domain or "default")

    def range_pop(self, domain: str | None = None) -> None:
        self.torch_module.mstx.range_pop(domain or "default")

    def toolkit_version(self) -> str | None:
        """CANN's version, from its installer's ``ascend_*_install.info`` in ``ASCEND_HOME_PATH``."""
        home = os.environ.get("ASCEND_HOME_PATH")
        if not home:
            return None
        # In that folder, or in a subfolder named after the processor. The tree is too large to search.
        for folder in (".", "*"):
            for notes in sorted(Path(home).glob(f"{folder}/ascend_*_install.info")):
                stated = re.search(r"^version\s*=\s*(\S+)", notes.read_text(errors="replace"), re.MULTILINE)
                if stated:
                    return stated[1]
        return None

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        # CANN accepts indices only in ascending order.
        super().set_visible_devices_envs(current_env, sorted(local_accelerator_ids, key=int))
