"""Numbers of devices that a scheduler such as Ray gets are unsafe, however they get there: it may know NVIDIA's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.resources import resources_given
from porting import EACH_TARGET, ported_project, site

COUNT = "torch.cuda.device_count()"
TRAIN = "import ray\nfrom ray import tune\n\nfrom devices import given\n\n\n"
REACHED = {
    "a dictionary that a function returns": (
        f"def given():\n    n = {COUNT}\n    return {{'cpu': 1, 'gpu': n}}",
        "tune.run(f, resources_per_trial=given())",
    ),
    "what a branch returns": (
        f"def given():\n    if {COUNT} > 0:\n        return {{'cpu': 1, 'gpu': 1}}\n    return {{'cpu': 1}}",
        "devices = given()\ntune.run(f, resources_per_trial=devices)",
    ),
    "a number that a function returns": (
        f"def given():\n    return {COUNT}",
        "@ray.remote(num_gpus=given())\nclass A: ...",
    ),
    "a setting": (f"def given(cfg):\n    cfg.gpus_each = {COUNT}", "ray.init(num_gpus=cfg.gpus_each)"),
    "a field": (f"class given:\n    gpus_each: int = {COUNT}", "f.options(num_gpus=given.gpus_each)"),
    "an argument of a class": (
        f"def given(Resources):\n    return Resources(gpus_each={COUNT})",
        "tune.with_resources(f, {'gpu': given.gpus_each})",
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("name", REACHED)
def test_a_number_of_devices_that_reaches_a_scheduler_is_unsafe(
    name: str, target: str, tmp_path: Path
) -> None:
    devices, use = REACHED[name]
    files = {"devices.py": f"import torch\n\n\n{devices}\n", "train.py": f"{TRAIN}{use}\n"}
    entry = site(ported_project(tmp_path, files, target)["devices.py"], COUNT)
    assert (entry.status, "a scheduler such as Ray" in entry.reason) == (Status.UNSAFE, True)


@EACH_TARGET
def test_a_number_of_devices_for_torch_is_safe_beside_a_scheduler(target: str, tmp_path: Path) -> None:
    for head in (TRAIN, TRAIN.replace("ray", "os")):
        files = {
            "devices.py": f"import torch\n\n\ndef given(batch):\n    return batch * max(1, {COUNT})\n\n\ndef gpus():\n    return {{'a': {COUNT} + 1}}\n",
            "train.py": f"{head}tune.run(f, resources_per_trial={{'gpu': args.gpus_each}}, batch_size=given(4))\n",
        }
        found = ported_project(tmp_path, files, target)["devices.py"]
        assert {one.status for one in found.sites} == {Status.CONVERTED}, [one.reason for one in found.sites]


def test_the_names_of_resources_are_those_that_a_scheduler_gets() -> None:
    source = "import ray\nn = count(args.wanted)\nray.init(num_gpus=n)\ntorch.zeros(size=other)\n"
    assert resources_given(source.encode()) == {"n", "count", "wanted"}
    assert not resources_given(source.replace("ray", "os").encode())
