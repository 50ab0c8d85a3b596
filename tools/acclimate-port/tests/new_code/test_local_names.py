"""A function or module that asks for the accelerator often names it once."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import ported_once_for_all

MANY = "torch.cuda.synchronize()\ntorch.cuda.empty_cache()\ntorch.cuda.set_device(0)\ny = torch.zeros(1, device='cuda')\n"


def inside(head: str, body: str, margin: int = 4) -> str:
    return f"import torch\n\n\n{head}\n" + "".join(f"{' ' * margin}{line}\n" for line in body.splitlines())


def test_a_function_that_asks_often_names_the_accelerator_before_the_first_use() -> None:
    text = ported_once_for_all(inside("def f(x):", f'"""A step."""\nx = x + 1\n{MANY}'), "acclimate")
    assert text.count("get_accelerator()") == 1
    assert '"""A step."""\n    x = x + 1\n    acc = get_accelerator()\n    acc.synchronize()\n' in text


def test_a_module_that_asks_often_names_the_accelerator() -> None:
    text = ported_once_for_all(f"import torch\n\nx = 1\n{MANY}", "acclimate")
    assert "x = 1\nacc = get_accelerator()\nacc.synchronize()\n" in text


def test_code_for_torch_names_the_device_type() -> None:
    body = 'a = torch.zeros(1, device="cuda")\n' * 4
    text = ported_once_for_all(inside("def f():", body), "torch")
    assert "    device_type = accelerator_type()\n    a = torch.zeros(1, device=device_type)\n" in text


@pytest.mark.parametrize(
    "source",
    [
        inside("def f(x):", "torch.cuda.synchronize()\ntorch.cuda.empty_cache()\n"),
        inside("def f(x):", 'os.environ["CUDA_VISIBLE_DEVICES"] = "1"\n' + MANY),
        inside("def f(acc, accelerator):", MANY),
        "import torch\n\n\ndef f(): torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.ipc_collect(), torch.cuda.init()\n",
    ],
    ids=["few", "chooses devices", "names taken", "one line"],
)
def test_no_name_is_made(source: str) -> None:
    assert "= get_accelerator()\n" not in ported_once_for_all(source, "acclimate")


def test_another_name_is_taken_where_acc_is_an_accuracy() -> None:
    text = ported_once_for_all(inside("def f(x):", f"acc = 0.5\n{MANY}return acc"), "acclimate")
    assert "    acc = 0.5\n    accelerator = get_accelerator()\n" in text


def test_the_name_is_bound_in_the_block_that_uses_it_and_not_in_a_loop() -> None:
    guarded = ported_once_for_all(inside('if __name__ == "__main__":', MANY), "acclimate")
    assert '"__main__":\n    acc = get_accelerator()\n' in guarded
    looped = ported_once_for_all(inside("for i in range(3):", MANY), "acclimate")
    assert "acc = get_accelerator()\nfor i in range(3):\n" in looped


GUARD = 'if __name__ == "__main__":\n'
TWICE = "    torch.cuda.synchronize()\n    torch.cuda.empty_cache()\n"
BRANCHES = {
    "two guards": f"{GUARD}{TWICE}{TWICE}\n\ndef f():\n    return 1\n\n\n{GUARD}{TWICE}{TWICE}",
    "a guard, and a branch": f"{GUARD}{TWICE}{TWICE}\nif flag:\n{TWICE}{TWICE}",
    "two branches": f"if flag:\n{TWICE}{TWICE}else:\n{TWICE}{TWICE}",
    "two guards, in which few ask": f"{GUARD}{TWICE}\n{GUARD}{TWICE}",
}


@pytest.mark.parametrize("target", ["acclimate", "torch"])
@pytest.mark.parametrize("kind", BRANCHES)
def test_an_import_makes_no_call_that_only_branches_make(kind: str, target: str) -> None:
    source = BRANCHES[kind].replace("torch.cuda.synchronize()", 'x = torch.zeros(1, device="cuda")')
    text = ported_once_for_all(f"import torch\n\nflag = False\n{source}", target)
    call = "get_accelerator()" if target == "acclimate" else "accelerator_type()"
    assert f"\nacc = {call}" not in text
    assert f"\ndevice_type = {call}" not in text
    assert text.count(f" = {call}") == (0 if "few" in kind else 2)
    assert call in text


def test_a_name_serves_all_branches_after_a_statement_that_surely_makes_the_call() -> None:
    source = f"import torch\n\nx = torch.zeros(1, device='cuda')\n{GUARD}{TWICE}{TWICE}"
    text = ported_once_for_all(source, "acclimate")
    assert text.count("get_accelerator()") == 1
    assert "\nacc = get_accelerator()\nx = torch.zeros(1, device=acc.device_name())\n" in text


def test_each_function_has_its_own_name_and_a_branch_does_not_hide_it() -> None:
    body = "if x:\n    torch.cuda.synchronize()\n    torch.cuda.empty_cache()\nelse:\n    torch.cuda.set_device(0)\n"
    body += "def g():\n    torch.cuda.synchronize()\ntorch.cuda.empty_cache()\n"
    text = ported_once_for_all(inside("def f(x):", body), "acclimate")
    assert "    acc = get_accelerator()\n    if x:\n" in text
    assert "    def g():\n        get_accelerator().synchronize()\n" in text


def test_new_functions_come_before_a_statement_that_starts_where_they_go() -> None:
    text = port_text("import torch\ntorch.nn.DataParallel(x.cuda())\n", Settings("torch", unsafe=True)).text
    compile(text, "ported", "exec")
    assert text.endswith("\non_any_device(torch.nn.DataParallel(x.to(accelerator_type())))\n")


USED_FIRST = {
    "a branch": "if x:\n    x = CONVERT(x)\n",
    "a statement": "x = CONVERT(x)\n",
    "a loop": "for i in range(2):\n    x = CONVERT(x)\n",
    "a try": "try:\n    x = CONVERT(x)\nfinally:\n    pass\n",
    "a comprehension": "x = [CONVERT(x) for i in range(2)]\n",
    "a default argument": "def g(y=CONVERT(x)):\n    return y\n",
    "a decorator": "@CONVERT(x)\ndef g():\n    return 1\n",
    "a class": "class A:\n    a = CONVERT(x)\n",
    "a lambda": "g = lambda: CONVERT(x)\n",
}


@pytest.mark.parametrize("target", ["acclimate", "torch"])
@pytest.mark.parametrize("kind", USED_FIRST)
def test_an_edit_at_the_end_of_a_statement_uses_the_name_after_its_assignment(kind: str, target: str) -> None:
    first = USED_FIRST[kind].replace("CONVERT", "torch.nn.SyncBatchNorm.convert_sync_batchnorm")
    devices = 'a = torch.zeros(1, device="cuda")\n' * 3
    text = ported_once_for_all(inside("def f(x):", f"x = x + 1\n{first}{devices}{MANY}"), target)
    name, call = (
        ("acc", "get_accelerator()") if target == "acclimate" else ("device_type", "accelerator_type()")
    )
    assignment = f"    {name} = {call}\n"
    assert text.count(assignment) == 1
    body = text.partition("def f(x):")[2]
    assert name not in body.partition(assignment)[0]
