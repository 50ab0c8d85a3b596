from __future__ import annotations

import pytest
from sim_process import run_program, run_python

from acclimate import AcclimateError
from acclimate_sim.errors import ProfileError
from acclimate_sim.profile import NAMED, Profile, parse, read_profile


def test_no_profile_is_two_devices_without_limits_on_dtypes() -> None:
    assert parse("") == Profile(devices=2)


def test_keys_set_what_they_say() -> None:
    profile = parse("devices=4,memory=8GiB,no=float64+bfloat16,sync=check,replace=yes,asserts=yes")
    assert (profile.devices, profile.memory_bytes) == (4, 8 << 30)
    assert profile.refused == {"float64", "complex128", "bfloat16"}
    assert profile.checks_synchronisation
    assert profile.replaces_parameters
    assert profile.asserts


def test_keys_after_a_name_change_that_profile() -> None:
    assert parse("mps-like,memory=1GiB") == Profile(1, 1 << 30, NAMED["mps-like"].refused)


@pytest.mark.parametrize(
    "text",
    [
        "devises=4", "devices=0", "devices=four", "memory=8GB", "memory=0", "no=float32",
        "sync=on", "replace=1", "asserts=1", "gaudi-like", "devices=2,mps-like",
    ],
)  # fmt: skip
def test_bad_profile_names_the_key_and_lists_the_keys(text: str) -> None:
    with pytest.raises(ProfileError) as raised:
        parse(text)
    message = str(raised.value)
    assert isinstance(raised.value, AcclimateError)
    assert text.split(",")[-1].split("=")[0] in message
    assert "the keys are devices, memory, no, sync, replace, asserts" in message


def test_visible_devices_limit_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_SIM", "devices=4")
    monkeypatch.setenv("ACCLIMATE_SIM_VISIBLE_DEVICES", "0,3")
    assert read_profile().devices == 2
    monkeypatch.setenv("ACCLIMATE_SIM_VISIBLE_DEVICES", "4")
    with pytest.raises(ProfileError, match="0 to 3"):
        read_profile()


def test_choosing_sim_with_a_bad_profile_says_what_is_wrong_with_it() -> None:
    result = run_python("-c", "import acclimate; acclimate.get_accelerator()", profile="devises=4")
    assert result.returncode != 0
    assert 'no key "devises"; the keys are devices' in result.stderr


def test_mps_like_refuses_float64_as_mps_does() -> None:
    program = """
import torch; from acclimate import get_accelerator
acc = get_accelerator()
try: torch.ones(2).double().to("sim")
except TypeError as error: print(acc.device_count(), acc.supported_dtypes(), error)
"""
    said = run_program(program, "mps-like")
    assert said.startswith("1 [torch.float32, torch.bfloat16, torch.float16] ")


def test_v100_like_refuses_bfloat16() -> None:
    program = """
import torch; from acclimate import get_accelerator
acc = get_accelerator()
print(acc.is_bf16_supported(), acc.supported_dtypes())
try: torch.zeros(2, dtype=torch.bfloat16, device="sim")
except TypeError: print("refused")
"""
    expected = "False [torch.float32, torch.float16, torch.float64]\nrefused"
    assert run_program(program, "v100-like") == expected


@pytest.mark.parametrize(("profile", "kept"), [("", "True True"), ("hpu-like", "False False")])
def test_module_to_keeps_parameters_except_where_the_profile_replaces_them(profile: str, kept: str) -> None:
    program = """
import torch; from acclimate import get_accelerator
get_accelerator()
embed, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
head.weight = embed.weight; before = embed.weight
torch.nn.Sequential(embed, head).to("sim")
print(embed.weight is before, head.weight is embed.weight)
"""
    assert run_program(program, profile) == kept


def test_visible_devices_work_in_a_child() -> None:
    program = """
import os, subprocess, sys; from acclimate import get_accelerator
acc = get_accelerator(); env = dict(os.environ); acc.set_visible_devices_envs(env, [1])
child = "import acclimate; print(acclimate.get_accelerator().device_count())"
said = subprocess.run([sys.executable, "-c", child], env=env, capture_output=True, text=True).stdout
print(acc.device_count(), said)
"""
    assert run_program(program, "devices=3") == "3 1"


def test_a_number_that_a_kernel_refuses_ends_the_context_at_the_next_wait() -> None:
    program = """
import torch; from acclimate import get_accelerator
acc = get_accelerator()
x = torch.ones(3, device="sim:0")
y = x[torch.tensor([[0, 7]], device="sim:0")]
print(tuple((y + 1).shape), x.tolist() if False else "no error yet")
calls = (acc.synchronize, lambda: x.cpu(), lambda: x + 1, lambda: torch.ones(2, device="sim:0"), x.exp_)
for call in calls:
    try: call()
    except torch.AcceleratorError as error: print(str(error).splitlines()[0])
print(torch.ones(2, device="sim:1").tolist())
"""
    told = run_program(program, "asserts").splitlines()
    assert told[0] == "(1, 2) no error yet"
    assert told[1:-1] == ["sim error: device-side assert triggered"] * 5
    assert told[-1] == "[1.0, 1.0]"


REFUSED = {
    "two shapes": "x + torch.ones(4, device='sim')",
    "a dtype": "x @ x.long()",
    "places of float32": "x.index_select(0, x)",
    "expanded memory": "x[:1].expand(3).add_(1)",
    "parts that overlap": "x[1:].copy_(x[:-1]).add_(1) and torch.add(x[:-1], 1, out=x[1:])",
    "a singular matrix": "torch.linalg.inv(torch.zeros(2, 2, device='sim'))",
    "a negative count": "torch.tensor([1, -1], device='sim').bincount()",
    "a chance that is a number of Python": "x.bernoulli_(1.5)",
}


@pytest.mark.parametrize("profile", ["", "asserts"])
def test_what_is_refused_for_anything_but_its_numbers_is_refused_at_once(profile: str) -> None:
    program = f"""
import torch; from acclimate import get_accelerator
acc = get_accelerator()
x = torch.ones(3, device="sim")
for call in {list(REFUSED.values())!r}:
    try: eval(call)
    except RuntimeError as error: print(isinstance(error, torch.AcceleratorError))
acc.synchronize()
"""
    assert run_program(program, profile).splitlines() == ["False"] * len(REFUSED)


@pytest.mark.parametrize(
    "call",
    [
        "torch.nn.functional.nll_loss(torch.zeros(2, 3, device='sim'), torch.tensor([0, 5], device='sim'))",
        "torch.nn.functional.binary_cross_entropy(x + 2, x)",
        "torch.poisson(-x)",
        "x.scatter_(0, torch.tensor([9], device='sim'), x + 1)",
        "torch.gather(x, 0, torch.tensor([9], device='sim'), out=torch.empty(0, device='sim'))",
        "torch._assert_async(torch.tensor(False, device='sim'))",
    ],
)
def test_losses_draws_and_writes_assert_as_on_cuda(call: str) -> None:
    program = f"""
import torch; from acclimate import get_accelerator
acc = get_accelerator()
x = torch.ones(3, device="sim")
{call}
try: acc.synchronize()
except torch.AcceleratorError: print("asserted")
"""
    assert run_program(program, "asserts") == "asserted"
    with pytest.raises(AssertionError):
        run_program(program)
