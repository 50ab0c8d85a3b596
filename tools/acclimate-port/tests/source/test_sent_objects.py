"""A program that sends other processes objects which hold tensors of its device keeps that device."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
ACTOR = (
    "class Actor:\n    def __init__(self, net, device):\n        self.net = {held}\n\n"
    "    def act(self):\n        return self.net(1)\n"
)
LOOP = "from multiprocessing import Process\n\n\ndef act(actor):\n    print(actor.act())\n\n\ndef run({parameters}):\n{body}\n"
MAIN = (
    "import multiprocessing\n\nimport torch\n\nfrom actors import Actor\nfrom loop import run\n\n\ndef main():\n"
    "    device = {choice}\n    {call}\n\n\n"
    "if __name__ == '__main__':\n    multiprocessing.set_start_method('{method}')\n    main()\n"
)
MADE = "Actor(torch.nn.Linear(1, 1), device=device)"
EACH = f"actors = [{MADE} for _ in range(2)]\n    run("
WAYS = {
    "an object": (f"run({MADE})", "actor", "    Process(target=act, args=(actor,)).start()"),
    "one of a list": (
        f"{EACH}actors=actors)",
        "actors",
        "    for actor in actors:\n        Process(target=act, args=(actor,)).start()",
    ),
    "one of two lists": (
        f"{EACH}actors, [1, 2])",
        "actors, names",
        "    for name, actor in zip(names, actors):\n        Process(target=act, name=name, args=(actor,)).start()",
    ),
}
OTHERS = {
    "an object that holds the device alone": ("device", *WAYS["an object"], "spawn"),
    "an object that holds what is on the host": ("net.cpu()", *WAYS["an object"], "spawn"),
    "a copy of the process": ("net.to(device)", *WAYS["an object"], "fork"),
    "the other one of two lists": (
        "net.to(device)",
        WAYS["one of two lists"][0],
        "actors, names",
        WAYS["one of two lists"][2].replace("args=(actor,)", "args=(name,)"),
        "spawn",
    ),
}


def status_of(
    folder: Path, held: str, call: str, parameters: str, body: str, method: str, target: str
) -> Status:
    files = {
        "actors.py": ACTOR.format(held=held),
        "loop.py": LOOP.format(parameters=parameters, body=body),
        "main.py": MAIN.format(call=call, method=method, choice=CHOICE),
    }
    return site(ported_project(folder, files, target)["main.py"], CHOICE).status


@EACH_TARGET
@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_holds_a_moved_network_is_found_on_its_way_to_a_process(
    way: str, target: str, tmp_path: Path
) -> None:
    assert status_of(tmp_path, "net.to(device)", *WAYS[way], "spawn", target) is Status.UNSAFE


@EACH_TARGET
@pytest.mark.parametrize("other", OTHERS)
def test_what_holds_no_tensor_of_the_device_may_go_to_a_process(
    other: str, target: str, tmp_path: Path
) -> None:
    assert status_of(tmp_path, *OTHERS[other], target) is Status.CONVERTED
