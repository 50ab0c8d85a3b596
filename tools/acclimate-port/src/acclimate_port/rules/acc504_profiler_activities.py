"""The rule ACC504, for `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source_file import SourceFile


class ProfilerActivities(Rule[cst.List | cst.Attribute]):
    """``ProfilerActivity.CUDA``."""

    code = "ACC504"
    name = "profiler-activities"
    summary = "`activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`"
    explanation = (
        "`torch.profiler.supported_activities()` returns the activities that this machine can profile."
    )
    examples = (
        Example(
            "import torch\nfrom torch.profiler import ProfilerActivity, profile\n\n"
            "p = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])\n",
            "import torch\nfrom torch.profiler import ProfilerActivity, profile\n\n"
            "p = profile(activities=torch.profiler.supported_activities())\n",
            "import torch\nfrom torch.profiler import ProfilerActivity, profile\n\n"
            "p = profile(activities=torch.profiler.supported_activities())\n",
        ),
    )
    nodes = (cst.List, cst.Attribute)

    def check(self, file: SourceFile, node: cst.List | cst.Attribute) -> Finding | None:
        names = ("torch.profiler.ProfilerActivity.CUDA", "torch.autograd.profiler.ProfilerActivity.CUDA")
        if isinstance(node, cst.Attribute):
            if file.tree.qualified(node) not in names:
                return None
            return self.left(
                file,
                node,
                "only CUDA has this activity; torch.profiler.supported_activities() returns those of this machine",
            )
        if not isinstance(node, cst.List):
            return None
        told = {file.tree.qualified(element.value) for element in node.elements}
        cuda = [element.value for element in node.elements if file.tree.qualified(element.value) in names]
        if not cuda or told != {cuda and file.tree.qualified(cuda[0]), "torch.profiler.ProfilerActivity.CPU"}:
            return None
        text = f"{file.torch}.profiler.supported_activities()"
        given = file.tree.given_to(node)
        is_profile = (
            given is not None and given.word == "activities" and given.full.endswith("profiler.profile")
        )
        unsafe = "" if is_profile else "it is a set, of which the program may expect a list"
        return self.becomes(file, node, text, unsafe=unsafe, claims=tuple(cuda))
