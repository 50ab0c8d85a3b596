"""An explicit choice is taken, or fails with the specification's words and the next thing to do."""

from __future__ import annotations

import pytest

from acclimate.errors import UnknownAcceleratorError
from acclimate.selection import load_by_name
from fake_vendors import BREAKAGES, BY_WAY, IN_ORDER, WITH_PACKAGE, FakeMachine, FakeVendor
from fresh_process import FreshProcesses
from pairs import all_pairs
from quick_parameters import quick

SELECT = """
import acclimate
from acclimate.selection import chosen_by
try:
    tell(name=acclimate.get_accelerator().name, how=chosen_by())
except Exception as error:
    tell(
        error=str(error),
        type=type(error).__name__,
        catchable=[isinstance(error, kind) for kind in (acclimate.AcclimateError, ValueError)],
    )
"""
SPECIFIED = "['cuda', 'cpu', 'xpu', 'xpu.external', 'npu', 'mps', 'hpu', 'mlu', 'sdaa']"
NAMED = [vendor for vendor in IN_ORDER if vendor.way != "generic"]
REMEDIES = {
    "xpu.external": "Install intel_extension_for_deepspeed with intel_extension_for_pytorch",
    "xpu": "Install intel_extension_for_pytorch with XPU support, or install a build of torch for Intel GPUs",
    "npu": "Install it (pip install torch-npu) with the CANN toolkit",
    "sdaa": "Install torch_sdaa with Tecorigin's drivers",
    "mps": "Use a Mac with Apple silicon and a build of torch for it",
    "hpu": "Install the Habana SynapseAI software stack",
    "mlu": "Install torch_mlu with the Cambricon Neuware SDK",
    "cuda": "Install a build of torch for CUDA, and the GPU's driver",
}
VARIABLES = ("DS_ACCELERATOR", "ACCLIMATE_ACCELERATOR")


def way(vendor: FakeVendor) -> str:
    return vendor.way


@pytest.mark.parametrize("variable", quick(VARIABLES, "ACCLIMATE_ACCELERATOR"))
@pytest.mark.parametrize("vendor", NAMED, ids=way)
def test_an_accelerator_that_is_there_is_chosen_by_name(
    vendor: FakeVendor, variable: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["xpu.external"])  # what detection would choose
    machine.add(vendor)
    told = fresh.check(machine.prelude + SELECT, path=machine.path, env={variable: vendor.name}).told
    assert told == {"name": vendor.name, "how": f"{variable}={vendor.name}"}


@pytest.mark.parametrize("name", REMEDIES)
def test_an_accelerator_that_is_not_there_is_refused_with_the_reason_and_what_to_do(
    name: str, fresh: FreshProcesses
) -> None:
    told = fresh.check(SELECT, env={"DS_ACCELERATOR": name}).told
    assert told["type"] == "AcceleratorUnavailableError"
    assert told["catchable"] == [True, True]
    requirement = next(vendor.requirement for vendor in IN_ORDER if vendor.name == name)
    assert told["error"].startswith(requirement)
    assert told["error"].endswith(f"\n{REMEDIES[name]}, or unset DS_ACCELERATOR to detect what is here.")


@pytest.mark.parametrize(("vendor", "breakage"), all_pairs(WITH_PACKAGE, BREAKAGES, way))
def test_a_package_that_breaks_at_import_is_refused_with_what_it_raised(
    vendor: FakeVendor, breakage: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add_broken(vendor, BREAKAGES[breakage])
    told = fresh.check(SELECT, path=machine.path, env={"DS_ACCELERATOR": vendor.name}).told
    assert told["type"] == "AcceleratorUnavailableError"
    assert f"{vendor.requirement}, which is installed but fails to import: {breakage}" in told["error"]


def test_another_accelerator_that_works_does_not_replace_the_chosen_one(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["npu"])
    told = fresh.check(SELECT, path=machine.path, env={"DS_ACCELERATOR": "mlu"}).told
    assert told["type"] == "AcceleratorUnavailableError"


def test_hidden_cuda_devices_are_named_as_the_reason(machine: FakeMachine, fresh: FreshProcesses) -> None:
    machine.add(BY_WAY["cuda"], devices=0)
    hidden = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    told = fresh.check(machine.prelude + SELECT, env=hidden).told
    assert 'CUDA_VISIBLE_DEVICES is ""' in told["error"]


# -- names that none has -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "ending"),
    [
        ("cudaa", '; did you mean "cuda"?'),
        ("cdua", '; did you mean "cuda"?'),
        ("CUDA", '; did you mean "cuda"?'),
        (" npu", '; did you mean "npu"?'),
        ("xpu-external", '; did you mean "xpu.external"?'),
        ("qpu9000", "."),
        ("(other)", "."),
        ("unheard_of", "."),
    ],
)
def test_an_unknown_name_is_refused_in_the_specification_words(
    value: str, ending: str, fresh: FreshProcesses
) -> None:
    told = fresh.check(SELECT, env={"DS_ACCELERATOR": value}).told
    assert told["type"] == "UnknownAcceleratorError"
    assert told["catchable"] == [True, True]
    expected = f'DS_ACCELERATOR must be one of {SPECIFIED}. Value "{value}" is not supported{ending}'
    assert told["error"] == expected


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("gpu", "cuda"), ("GPU", "cuda"), ("cuda:0", "cuda"), ("nvidia", "cuda"), ("rocm", "cuda"),
        ("amd", "cuda"), ("hip", "cuda"), ("intel", "xpu"), ("metal", "mps"), ("apple", "mps"),
        ("ascend", "npu"), ("npu:3", "npu"), ("gaudi", "hpu"), ("habana", "hpu"), ("host", "cpu"),
    ],
)  # fmt: skip
def test_a_common_word_for_hardware_is_answered_with_the_name_that_it_means(word: str, meant: str) -> None:
    with pytest.raises(UnknownAcceleratorError, match=f'; did you mean "{meant}"'):
        load_by_name(word, "DS_ACCELERATOR")


def test_an_unknown_name_in_our_own_variable_names_that_variable(fresh: FreshProcesses) -> None:
    told = fresh.check(SELECT, env={"ACCLIMATE_ACCELERATOR": "cdua"}).told
    assert told["error"].startswith("ACCLIMATE_ACCELERATOR must be one of ['cuda', ")


# -- both variables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", VARIABLES)
def test_an_empty_variable_counts_as_unset(
    variable: str, machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["npu"])
    told = fresh.check(SELECT, path=machine.path, env={variable: ""}).told
    assert told == {"name": "npu", "how": "detection"}


def test_an_empty_variable_does_not_conflict_with_the_other(fresh: FreshProcesses) -> None:
    told = fresh.check(SELECT, env={"DS_ACCELERATOR": "", "ACCLIMATE_ACCELERATOR": "cpu"}).told
    assert told == {"name": "cpu", "how": "ACCLIMATE_ACCELERATOR=cpu"}


def test_both_variables_may_say_the_same(fresh: FreshProcesses) -> None:
    told = fresh.check(SELECT, env=dict.fromkeys(VARIABLES, "cpu")).told
    assert told["name"] == "cpu"


def test_two_variables_that_differ_are_refused_even_where_both_could_be_used(
    machine: FakeMachine, fresh: FreshProcesses
) -> None:
    machine.add(BY_WAY["npu"])
    environment = {"DS_ACCELERATOR": "cpu", "ACCLIMATE_ACCELERATOR": "npu"}
    told = fresh.check(SELECT, path=machine.path, env=environment).told
    assert told["type"] == "InvalidEnvironmentError"
    assert told["catchable"] == [True, True]
    assert told["error"] == (
        'DS_ACCELERATOR is "cpu" and ACCLIMATE_ACCELERATOR is "npu". '
        "Unset one of them, or give both the same value."
    )


def test_a_choice_that_failed_can_be_corrected_in_the_same_process(fresh: FreshProcesses) -> None:
    told = fresh.check("""
import os
from acclimate import get_accelerator
os.environ["DS_ACCELERATOR"] = "npu"
try:
    get_accelerator()
except ValueError:
    os.environ["DS_ACCELERATOR"] = "cpu"
tell(name=get_accelerator().name)
""").told
    assert told == {"name": "cpu"}
