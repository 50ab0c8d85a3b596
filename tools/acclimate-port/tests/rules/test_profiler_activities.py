"""A profile records the activities of this machine's device, and a timer that knows only CUDA stays."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, site_of

ACTIVITIES = "[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
HEAD = "import torch\nfrom torch.profiler import ProfilerActivity, profile\n\n\ndef f(net, x):\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("code", "is_safe"),
    [
        (f"    with profile(activities={ACTIVITIES}) as p:\n        net(x)\n    return p\n", True),
        (f"    kinds = {ACTIVITIES}\n    kinds.append(x)\n    return profile(activities=kinds)\n", False),
    ],
)
def test_the_activities_of_a_profile_are_edited_if_only_the_profile_gets_them(
    code: str, is_safe: bool, target: str
) -> None:
    found = site_of(port_text(HEAD + code, Settings(target)), ACTIVITIES)
    assert found.status is (Status.CONVERTED if is_safe else Status.UNSAFE), found


TIMERS = {
    "a function of inductor's": "torch._inductor.utils.print_performance(net, (x,))",
    "marks of NVIDIA's": "torch.autograd.profiler.emit_nvtx()",
    "a profile of CUDA": "torch.autograd.profiler.profile(use_cuda=True)",
}
OF_ANY = {
    "a function that gets the device": "torch._inductor.utils.print_performance(net, (x,), device=x.device.type)",
    "a profile of the host": "torch.autograd.profiler.profile()",
    "a profile that turns CUDA off": "torch.autograd.profiler.profile(use_cuda=False)",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", [*TIMERS, *OF_ANY])
def test_a_device_stays_beside_what_measures_cuda_alone(kind: str, target: str) -> None:
    call = (TIMERS | OF_ANY)[kind]
    text = f"import torch\nimport torch._inductor.utils\n\n\ndef f(net):\n    x = torch.ones(3).cuda()\n    return {call}\n"
    found = site_of(port_text(text, Settings(target)), "torch.ones(3).cuda()")
    assert found.status is (Status.UNSAFE if kind in TIMERS else Status.CONVERTED), found
