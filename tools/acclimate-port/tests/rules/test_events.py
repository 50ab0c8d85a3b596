"""Events and waits are ported with the devices of their function, with both targets."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, check, program

HEAD = "a = torch.ones(4, device='cuda')\ntorch.cuda.synchronize()\nstart = torch.cuda.Event(enable_timing=True)\n"
SURE = {
    "recorded at once": "start.record()\nreturn start.elapsed_time(start)\n",
    "recorded after a loop": "for _ in range(2):\n    a.to('cuda')\nstart.record()\ntorch.cuda.synchronize()\nreturn 1\n",
    "two": "end = torch.cuda.Event(enable_timing=True)\nstart.record()\nend.record()\nreturn start.elapsed_time(end)\n",
}
UNSURE = {
    "recorded behind a flag": "if flag:\n    start.record()\nreturn 1\n",
    "given to others": "return model.run(start)\n",
    "kept in an object": "model.event = start\nreturn 1\n",
}


@BOTH
@pytest.mark.parametrize("kind", SURE)
def test_an_event_that_is_recorded_in_any_case_is_ported_with_its_device(kind: str, target: str) -> None:
    ported = check(program(HEAD + SURE[kind]), target, changed=True)
    assert {one.status for one in ported.sites} == {Status.CONVERTED}
    assert "torch.cuda" not in ported.text


@pytest.mark.parametrize("kind", UNSURE)
def test_devices_stay_with_an_event_that_torch_may_lack_on_a_host(kind: str) -> None:
    source = program(HEAD + UNSURE[kind])
    ported = port_text(source, Settings("torch"))
    assert ported.text == source
    assert {one.status for one in ported.sites} == {Status.UNSAFE}
    assert {one.status for one in port_text(source, Settings("acclimate")).sites} == {Status.CONVERTED}


@BOTH
def test_an_event_whose_error_is_caught_is_not_ported_alone(target: str) -> None:
    body = "try:\n    start = torch.cuda.Event()\n    start.record()\nexcept RuntimeError:\n    start = None\nreturn start is None\n"
    check(program(body), target)


@BOTH
def test_arguments_of_events_and_streams_get_their_names_since_torchs_classes_take_no_others(
    target: str,
) -> None:
    source = "import torch\n\ns = torch.cuda.Stream({}0, {}-1)\ne = torch.cuda.Event({}True, {}False)\ne.record(s)\n"
    names = ("device=", "priority=", "enable_timing=", "blocking=")
    plain, named = source.format(*4 * [""]), source.format(*names)
    settings = Settings(target, unsafe=True)
    assert port_text(plain, settings).text == port_text(named, settings).text != named


@BOTH
def test_unpacked_arguments_of_an_event_stay_as_they_are(target: str) -> None:
    source = "import torch\n\n\ndef f(options):\n    torch.cuda.Event(*options).record()\n"
    assert "Event(*options)" in port_text(source, Settings(target, unsafe=True)).text
