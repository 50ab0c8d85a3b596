"""What CUDA's branch opens for: a host that is listed already, Apple's and Intel's devices, forms that are not known."""

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.new_code import targets
from porting import EACH_TARGET, ported_once_for_all

torch = pytest.importorskip("torch", reason="runs ported code")
acclimate = pytest.importorskip("acclimate", reason="runs ported code")


def in_function(lines: str, target: str) -> str:
    source = "import torch\n\n\ndef f(a=0):\n" + textwrap.indent(textwrap.dedent(lines), "    ")
    return ported_once_for_all(source, target)


@EACH_TARGET
@pytest.mark.parametrize(
    "lines",
    [
        'return torch.device(f"cuda")\n',
        "if torch.cuda.is_available():\n    return torch.device(f'cuda')\nreturn torch.device('cpu')\n",
        'return torch.device(f"cuda" if torch.cuda.is_available() else "cpu")\n',
        'return torch.zeros(1, device=f"cuda:0")\n',
    ],
)
def test_a_format_string_without_a_field_is_a_device_too(lines: str, target: str) -> None:
    assert "cuda" not in in_function(lines, target)


FORMS = [
    *('f"cuda:{a}{a}"', '"cuda" ":0"', 'f"cuda:{a}" f"{a}"', 'f"cuda:{a!r}"', '"cuda:{!r}".format(a)'),
    *('"cuda:%(a)d" % {"a": a}', '"cuda:{a}".format(**locals())', '"cuda:{a}".format_map({"a": a})'),
    *(
        '"".join(["cuda:", str(a)])',
        '"cuda:N".replace("N", str(a))',
        '"cuda" + ":" + str(a)',
        "FORM.format(a)",
    ),
]
"""Texts that begin with the name of CUDA, and become a device's in ways that no rule converts."""


@EACH_TARGET
@pytest.mark.parametrize("text", FORMS)
def test_a_branch_that_names_a_device_in_an_unknown_form_stays(text: str, target: str) -> None:
    lines = f"if torch.cuda.is_available():\n    return torch.device({text})\nreturn torch.device('cpu')\n"
    source = 'import torch\n\nFORM = "cuda:{}"\n\n\ndef f(a=0):\n' + textwrap.indent(lines, "    ")
    assert ported_once_for_all(source, target) == source


DECIDED = {
    "a flag": 'use = torch.cuda.is_available()\nreturn torch.device({} if use else "cpu")',
    "a function": 'if torch.cuda.is_available():\n    return torch.device(name(a))\nreturn torch.device("cpu")',
    "the same device": "torch.empty(a).cuda()\nreturn torch.device({})",
}


@EACH_TARGET
@pytest.mark.parametrize("text", FORMS[3:5])
@pytest.mark.parametrize("kind", DECIDED)
def test_a_device_in_an_unknown_form_holds_what_decides_about_it(kind: str, text: str, target: str) -> None:
    source = f"import torch\n\n\ndef name(a):\n    return {text}\n\n\ndef f(a=0):\n"
    source += textwrap.indent(DECIDED[kind].format(text), "    ")
    assert port_text(source, Settings(target)).text == source


LISTS = [
    'devices = (torch.device("cpu"),) + ((torch.device("cuda"),) if torch.cuda.is_available() else ())',
    'devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])',
    'devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]',
    'devices = ["cpu"]\nif torch.cuda.is_available():\n    devices.append("cuda")',
    'devices = ["cpu"]\nif torch.cuda.is_available():\n    devices += ["cuda"]',
    'has_gpu = torch.cuda.is_available()\ndevices = ["cpu"] + (["cuda"] if has_gpu else [])',
]


@EACH_TARGET
@pytest.mark.parametrize("lines", LISTS)
def test_a_list_of_devices_names_a_host_once(
    lines: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    text = in_function(f"{lines}\nreturn devices\n", target)
    assert "cuda" not in text
    space: dict[str, Any] = {}
    exec(text, space)
    with acclimate.use_accelerator("cpu"):
        assert [str(device) for device in space["f"]()] == ["cpu"]


APPLE = """
def ask():
    torch.cuda.manual_seed_all(1)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(1)
    kind = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    name = torch.cuda.get_device_name(0), torch.cuda.get_device_name(device=0)
    memory = torch.cuda.get_device_properties(0).total_memory
    return kind, name, memory, torch.cuda.get_device_capability()[0], f"{torch.cuda.get_device_name()}"
"""


def test_what_apples_devices_lack_in_torch_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ported_once_for_all("import torch\n" + APPLE, "torch")
    space: dict[str, Any] = {}
    exec(text, space)
    space["accelerator_type"] = lambda: "mps"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert space["ask"]() == (True, ("mps", "mps"), 0, 0, "mps")


def test_torch_has_on_apples_devices_what_is_not_said_to_be_missing() -> None:
    names = {name for module, name in targets.torch_calls() if module == "device module"} & targets._SAME
    alone = {name for name in names if ("torch.accelerator", name) not in targets.torch_calls()}
    missing = {name for name in alone if not hasattr(torch.mps, name)} - set(targets._RENAMED)
    assert missing <= targets._NOT_ON_APPLE | {"device", "get_device_capability"}


def test_an_edit_of_streams_for_torch_is_unsafe() -> None:
    source = (
        "import torch\n\n\ndef f():\n    if torch.cuda.is_available():\n        return torch.cuda.Stream()\n"
    )
    sites = port_text(source, Settings("torch")).sites
    assert {site.status for site in sites} == {Status.UNSAFE}
    assert any("torch's Stream of a CPU" in site.reason for site in sites)


STATEMENTS = """
def prefetch(stream, x):
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream(0).wait_stream(
        torch.cuda.current_stream()
    )
    x.record_stream(torch.cuda.current_stream())
    return x
"""


@pytest.mark.parametrize("type_", ["cpu", "mps"])
def test_statements_about_the_current_stream_are_left_out_where_there_is_none(type_: str) -> None:
    space: dict[str, Any] = {}
    exec(ported_once_for_all("import torch\n" + STATEMENTS, "torch"), space)
    space["accelerator_type"] = lambda: type_
    assert space["prefetch"](None, 3) == 3


STREAMS = [
    "if torch.cuda.is_available():\n    torch.cuda.current_stream().wait_stream(a)\n",
    "if torch.cuda.is_available():\n    return torch.cuda.Stream()\n",
    "if a.device.type == 'cuda':\n    return torch.cuda.Stream()\n",
    "if a.device.type != 'cuda':\n    return None\nreturn torch.cuda.Stream()\n",
    "if a.is_cuda:\n    return torch.cuda.Stream()\n",
    "a.on_gpu = a.device.type == 'cuda' and torch.cuda.is_available()\n"
    "if a.on_gpu:\n    return partial(torch.cuda.stream, stream=torch.cuda.Stream())\n",
]


@pytest.mark.parametrize("lines", STREAMS)
def test_a_branch_that_makes_streams_is_not_taken_on_apples_devices(
    lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict[str, Any] = {}
    exec(in_function(lines, "torch"), space)
    space["accelerator_type"] = lambda: "mps"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert space["f"](SimpleNamespace(device=torch.device("mps"))) is None


@pytest.mark.parametrize("type_", ["cpu", "xpu", "mps"])
def test_properties_that_only_cudas_devices_have_are_answered_elsewhere(
    type_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "held = torch.cuda.get_device_properties(torch.device('cuda'))\n"
        "a.held = torch.cuda.get_device_properties(0)\n"
        "n = torch.cuda.get_device_properties(0).multi_processor_count\n"
        "return held.major, held.total_memory, f'{a.held.minor}', n\n"
    )
    space: dict[str, Any] = {}
    exec(in_function(lines, "torch"), space)
    space["accelerator_type"] = lambda: type_
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace(total_memory=5))
    assert space["f"](SimpleNamespace()) == (0, 5 if type_ == "xpu" else 0, "0", 1)


@pytest.mark.parametrize(
    "lines",
    [
        "torch.cuda.empty_cache()\n",
        "if torch.cuda.is_available():\n    torch.cuda.empty_cache()\n",
        "return torch.cuda.max_memory_allocated()\n",
        "return step(done=torch.cuda.reset_peak_memory_stats)\n",
        "if torch.cuda.is_available():\n    return torch.cuda.mem_get_info()\n",
    ],
)
def test_figures_of_memory_are_not_asked_for_where_torch_raises(lines: str) -> None:
    assert 'if accelerator_type() not in ("cpu", "mps")' in in_function(lines, "torch")


FALLBACKS = [
    'd = args.device if torch.cuda.is_available() else "cpu"',
    'd = "cpu" if not torch.cuda.is_available() else args.device',
    'd = torch.device(args.device) if torch.cuda.is_available() else torch.device("cpu")',
    'if not args.gpu or not torch.cuda.is_available():\n    d = "cpu"\nelif args.gpu:\n    d = args.gpu',
    'if torch.cuda.is_available():\n    d = args.device\nelse:\n    d = "cpu"',
    'if not args.gpu or not torch.cuda.is_available():\n    d = "cpu"\n'
    'elif isinstance(args.gpu, str):\n    d = args.gpu\nelse:\n    d = "cuda"',
]


@pytest.mark.parametrize("lines", FALLBACKS)
def test_a_device_that_a_user_names_still_falls_back_to_the_host(lines: str) -> None:
    text = in_function(lines.replace("args", "a") + "\n", "acclimate")
    assert "get_accelerator().is_available" not in text
    stays = "torch.cuda.is_available" in text and '"cuda"' in text
    assert stays or 'device_name() != "cpu"' in text or 'device_name() == "cpu"' in text


@EACH_TARGET
def test_a_device_with_an_index_is_told_by_its_name(target: str) -> None:
    lines = "device = str(a)\nif device.startswith('cuda:'):\n    torch.cuda.set_device(device)\n"
    text = in_function(lines, target)
    assert "() + ':')" in text
    assert "torch.cuda" not in text
