"""Huawei Ascend NPUs, through torch_npu."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from acclimate.accelerator import Accelerator
from acclimate.backends import builtin


class NPUAccelerator(Accelerator):
    """Follows torch's device conventions, with marks through MSTX and a toolkit called CANN."""

    device_type = "npu"
    communication_backend = "hccl"
    _record = builtin("npu")
    supports_nvtx_domain = True
    _processors_field = "vector_core_num"  # as torch_npu itself counts them for torch.compile

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.torch_module.mstx.range_push(msg, domain=domain or "default")

    def range_pop(self, domain: str | None = None) -> None:
        self.torch_module.mstx.range_pop(domain or "default")

    def toolkit_version(self) -> str | None:
        """CANN's, from the ``ascend_*_install.info`` that its installer writes below ``ASCEND_HOME_PATH``."""
        home = os.environ.get("ASCEND_HOME_PATH")
        if not home:
            return None
        # Beside or one below the home, in a folder named after the processor. The tree is too large to walk.
        for folder in (".", "*"):
            for notes in sorted(Path(home).glob(f"{folder}/ascend_*_install.info")):
                stated = re.search(r"^version\s*=\s*(\S+)", notes.read_text(errors="replace"), re.MULTILINE)
                if stated:
                    return stated[1]
        return None

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int | str]
    ) -> None:
        # CANN takes identifiers in ascending order only.
        super().set_visible_devices_envs(current_env, sorted(local_accelerator_ids, key=int))
