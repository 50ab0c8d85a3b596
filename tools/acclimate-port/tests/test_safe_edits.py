"""Programs whose safe edits do the same on CUDA and on a host, and on another accelerator what CUDA did.

Each program runs before and after on the three machines of ``machines.py``. With edits that are left, another
accelerator may also do what it did before.
"""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.source.survey import survey
from porting import EACH_TARGET, check, differing, program, reasons

# -- mixed precision -------------------------------------------------------------------------------------

OFF_WITHOUT_CUDA = [
    "with torch.cuda.amp.autocast():\n    pass",
    "with torch.cuda.amp.autocast(True):\n    pass",
    "with torch.cuda.amp.autocast(flag, torch.float16):\n    pass",
    "with torch.cuda.amp.autocast(enabled=flag or other):\n    pass",
    "with torch.cuda.amp.autocast(enabled=flag if other else True):\n    pass",
    "with torch.cuda.amp.autocast(enabled=not flag, dtype=torch.bfloat16):\n    pass",
    "with torch.cuda.amp.autocast(enabled=torch.cuda.is_available()):\n    pass",
    "with torch.cuda.amp.autocast(enabled=torch.cuda.is_available() and flag):\n    pass",
    "with torch.cuda.amp.autocast(enabled=torch.cuda.is_available() or flag):\n    pass",
    "with torch.cuda.amp.autocast(enabled=False):\n    pass",
    'with torch.autocast("cuda"):\n    pass',
    'with torch.autocast("cuda", torch.bfloat16, flag):\n    pass',
    'with torch.autocast(device_type="cuda", dtype=torch.float16):\n    pass',
    'with torch.amp.autocast("cuda", enabled=flag):\n    pass',
    'with torch.amp.autocast(enabled=flag, device_type="cuda"):\n    pass',
    "dtype = torch.bfloat16 if flag else torch.float16\nwith torch.cuda.amp.autocast(dtype=dtype):\n    pass",
    "if torch.cuda.is_available():\n    with torch.cuda.amp.autocast():\n        return 1",
    "on = torch.cuda.is_available() and flag\nwith torch.cuda.amp.autocast(enabled=on):\n    pass",
    "@torch.cuda.amp.autocast()\ndef g(a):\n    return a\nreturn g(x)",
    "with torch.cuda.amp.autocast() if flag else torch.cuda.amp.autocast(enabled=False):\n    pass",
    "return torch.cuda.amp.GradScaler()",
    "return torch.cuda.amp.GradScaler(2.0, 2.0, 0.5, 100, flag)",
    "return torch.cuda.amp.GradScaler(enabled=flag and other)",
    'return torch.amp.GradScaler("cuda")',
    'return torch.amp.GradScaler(device="cuda", enabled=flag)',
    'torch.cuda.is_available()\nreturn torch.amp.GradScaler()',
    "make = lambda: torch.cuda.amp.GradScaler(enabled=flag)\nreturn make()",
]  # fmt: skip


@EACH_TARGET
@pytest.mark.parametrize("body", OFF_WITHOUT_CUDA)
def test_mixed_precision_is_off_on_a_host_as_before(body: str, target: str) -> None:
    unsafe = check(program(body), target, changed=True)
    assert "cuda" not in unsafe.text
    assert not differing(program(body), unsafe.text)


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "scaler_class = torch.cuda.amp.GradScaler\nreturn scaler_class()",
        "context = torch.cuda.amp.autocast\nwith context():\n    pass",
        "options = {'enabled': flag}\nwith torch.cuda.amp.autocast(**options):\n    pass",
        'kind = "cuda"\nwith torch.autocast(kind):\n    pass',
        'return torch.amp.GradScaler("cuda" if flag else device.type) if other else None',
        'with torch.autocast(device.type if device.type == "meta" else "cuda", enabled=flag):\n    pass',
        'device_type = "cuda"\nwith torch.autocast(device_type=device_type):\n    pass',
        'where = torch.device("cuda")\nwith torch.autocast(where.type):\n    pass',
        "with torch.cuda.amp.autocast(dtype=torch.float32):\n    pass",
        'with torch.autocast("cuda", torch.float32):\n    pass',
        'with torch.autocast("cuda", dtype=other):\n    pass',
        "with torch.cuda.amp.autocast():\n    with torch.cuda.amp.autocast(dtype=torch.float32):\n        pass",
    ],
)
def test_mixed_precision_that_a_host_would_turn_on_or_off_is_unsafe(body: str, target: str) -> None:
    unsafe = check(program(body), target)
    assert reasons(unsafe)


# -- random numbers --------------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "torch.manual_seed(0)\ntorch.cuda.manual_seed(5)",
        "torch.manual_seed(0)\ntorch.cuda.manual_seed_all(5)",
        "torch.cuda.seed()",
        "torch.cuda.seed_all()",
        "torch.cuda.random.manual_seed(3)",
        "torch.cuda.set_rng_state(x)",
        "torch.cuda.set_rng_state_all([x])",
        "torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())",
        "return torch.cuda.get_rng_state_all()",
        "if flag: torch.cuda.manual_seed(1)",
        "if flag and torch.cuda.is_available():\n    torch.cuda.manual_seed(1)",
        "for seed in (torch.manual_seed, torch.cuda.manual_seed_all):\n    seed(3)",
        "seed = lambda n: torch.cuda.manual_seed(n)\nseed(4)",
        "a = 1; torch.cuda.manual_seed(a)",
        "list(map(torch.cuda.manual_seed, [1, 2]))",
    ],
)
def test_random_numbers_of_a_host_stay_as_they_were(body: str, target: str) -> None:
    unsafe = check(program(body), target)
    assert "torch.cuda" not in unsafe.text
    assert not differing(program(body), unsafe.text)


@EACH_TARGET
@pytest.mark.parametrize(
    "head", ["from torch.cuda import manual_seed", "from torch.cuda.random import manual_seed"]
)
def test_an_imported_function_of_random_numbers_does_nothing_on_a_host(head: str, target: str) -> None:
    source = program("manual_seed(5)", f"import torch\n{head}")
    assert not differing(source, check(source, target, changed=True).text)


# -- memory ----------------------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "return torch.cuda.max_memory_allocated()",
        "return torch.cuda.max_memory_allocated() / 2**30",
        "return torch.cuda.max_memory_allocated(device=0) == 0",
        "print(torch.cuda.max_memory_allocated(0))",
        "return [torch.cuda.max_memory_allocated(i) for i in range(2)]",
        'return torch.cuda.max_memory_allocated("cuda:1")',
        "used = torch.cuda.max_memory_allocated(torch.device('cuda'))\nreturn used",
        'where = torch.device("cuda" if torch.cuda.is_available() else "cpu")\nreturn torch.cuda.max_memory_allocated(where)',
        "if torch.cuda.is_available():\n    return torch.cuda.max_memory_allocated()",
    ],
)
def test_memory_figures_of_a_host_are_0_as_before(body: str, target: str) -> None:
    unsafe = check(program(body), target, changed=True)
    assert not differing(program(body), unsafe.text)


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "return torch.cuda.max_memory_allocated(device)",
        "return torch.cuda.max_memory_allocated(device=x.device)",
        'where = torch.device("cuda:0" if flag else "cpu")\nreturn torch.cuda.max_memory_allocated(where)',
        'where = torch.device("cuda:0") if flag else torch.device("cpu")\nreturn torch.cuda.max_memory_allocated(where) / 1024',
        "if torch.cuda.is_available():\n    return torch.cuda.max_memory_allocated(device)",
    ],
)
def test_memory_figures_of_a_device_that_may_be_the_cpu_are_unsafe(body: str, target: str) -> None:
    assert "nothing shows that its device is not a CPU" in reasons(check(program(body), target))


# -- the first use of CUDA -------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "call", ["manual_seed_all(3)", "manual_seed(3)", "empty_cache()", "memory_allocated()"]
)
@pytest.mark.parametrize(
    ("text", "counts_early"),
    [
        ("torch.cuda.{}\ndef main():\n    os.environ['CUDA_VISIBLE_DEVICES'] = sys.argv[1]\n", True),
        ("def f(flag):\n    torch.cuda.{}\n    if flag:\n        os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n", True),
        ("def f():\n    torch.cuda.{}\n    os.environ.setdefault('HIP_VISIBLE_DEVICES', '0')\n", True),
        ("torch.cuda.{}\nos.fork()\n", True),
        ("import multiprocessing as mp\ntorch.cuda.{}\nmp.get_context('fork').Process(target=work).start()\n", True),
        ("from torch.multiprocessing import Process\ndef f():\n    torch.cuda.{}\n    Process(target=work).start()\n", True),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'\ndef f():\n    torch.cuda.{}\n", False),
        ("def f(n):\n    os.environ['CUDA_VISIBLE_DEVICES'] = n\n    torch.cuda.{}\n", False),
        ("def f(n):\n    torch.cuda.set_device(n)\n    torch.cuda.{}\n    os.fork()\n", False),
        ("import multiprocessing as mp\nmp.set_start_method('spawn')\ntorch.cuda.{}\nmp.Process(target=work)\n", False),
        ("def f():\n    subprocess.run(x, env={{'CUDA_VISIBLE_DEVICES': '0'}})\n    torch.cuda.{}\n", False),
    ],
)  # fmt: skip
def test_devices_are_not_counted_before_the_program_chooses_them_or_forks(
    text: str, counts_early: bool, call: str, target: str
) -> None:
    source = "import os\nimport sys\nimport torch\n" + text.format(call)
    safe = port_text(source, Settings(target)).text
    assert (f"torch.cuda.{call}" in safe) == counts_early, safe
    assert f"torch.cuda.{call}" not in port_text(source, Settings(target, unsafe=True)).text


@EACH_TARGET
@pytest.mark.parametrize("other", ["def f():\n    os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n", "os.fork()\n"])
def test_another_file_may_choose_the_devices_or_fork_later(other: str, target: str) -> None:
    source = "import torch\n\n\ndef seed():\n    torch.cuda.manual_seed(0)\n"
    assert "torch.cuda" in port_text(source, Settings(target, survey=survey(other.encode()))).text
    calm = survey(b"import os\n\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\n")
    assert "torch.cuda" not in port_text(source, Settings(target, survey=calm)).text


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "try:\n    torch.cuda.synchronize()\nexcept Exception:\n    return 'no CUDA'",
        "try:\n    torch.cuda.synchronize()\n    return 1\nexcept:\n    return 0",
        "try:\n    where = torch.cuda.current_device()\nexcept (RuntimeError, AssertionError):\n    where = None\nreturn where",
        "try:\n    y = y.cuda()\nexcept RuntimeError:\n    pass\nreturn y",
        "try:\n    x = torch.ones(1, device='cuda')\nexcept Exception as error:\n    print(error)\nreturn x",
    ],
)
def test_a_call_whose_error_is_caught_is_a_test_of_cuda(body: str, target: str) -> None:
    assert "catches the error" in reasons(check(program(body), target, changed=False))


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "try:\n    torch.cuda.synchronize()\nexcept RuntimeError as error:\n    if 'memory' not in str(error):\n        raise",
        "try:\n    torch.cuda.synchronize()\nexcept KeyboardInterrupt:\n    pass",
        "try:\n    torch.cuda.synchronize()\nfinally:\n    print(1)",
        "if torch.cuda.is_available():\n    try:\n        torch.cuda.synchronize()\n    except Exception:\n        pass",
    ],
)
def test_a_call_whose_error_ends_the_program_is_ported(body: str, target: str) -> None:
    check(program(body), target, changed=True)


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "torch.cuda.set_device(flag % torch.cuda.device_count())",
        "if other:\n    torch.cuda.set_device(int(flag) // torch.cuda.device_count())",
    ],
)
def test_what_an_edit_makes_safe_is_ported_in_the_same_run(body: str, target: str) -> None:
    once = port_text(program(body), Settings(target))
    again = port_text(once.text, Settings(target))
    assert again.text == once.text
    left = [site.text for site in once.sites if site.status is not Status.CONVERTED]
    assert left == [site.text for site in again.sites if site.status is not Status.CONVERTED]


# -- one decision ----------------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("net = net.cuda(rank)", "net = DDP(net, device_ids=[rank])"),
        ("net.cuda(rank)", "wrapped = DDP(net, device_ids=[rank], output_device=rank)"),
        ("net = net.to(rank)", "net = DDP(module=net, device_ids=[rank])"),
        ("self.net = self.net.cuda()", "self.net = fully_shard(self.net)"),
        ("net = make().cuda()", "net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank])"),
        ("net = net.cuda()", "batch = torch.ones(2).cuda()"),
        ("net = net.cuda()", "batch = torch.ones(2, device='cuda')"),
    ],
)
@pytest.mark.parametrize(
    "test", ["torch.cuda.is_available()", "use_cuda", "torch.cuda.is_available() and flag"]
)
def test_guards_that_move_or_wrap_one_object_are_one_decision(
    first: str, second: str, test: str, target: str
) -> None:
    flag = "    use_cuda = torch.cuda.is_available()\n" if test == "use_cuda" else ""
    source = (
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
        f"def f(self, net, rank, flag):\n{flag}"
        f"    if {test}:\n        {first}\n    step()\n    if {test}:\n        {second}\n"
    )
    asks = "torch.cuda.is_available()"
    safe, unsafe = (port_text(source, Settings(target, unsafe=both)).text for both in (False, True))
    assert first in safe
    assert safe.count(asks) == source.count(asks), safe
    assert first not in unsafe
    assert unsafe.count(asks) == 0, unsafe


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "if not torch.cuda.is_available():\n    return x\nreturn x.cuda()",
        'if not torch.cuda.is_available():\n    return x\nif device.type != "cuda":\n    return y\nreturn 3',
        'if not torch.cuda.is_available():\n    return x\nif device.type != "cuda":\n    raise ValueError\nreturn 3',
        'for one in (x, y):\n    if not torch.cuda.is_available():\n        continue\n    if device.type != "cuda":\n        raise ValueError',
        'while flag:\n    if not torch.cuda.is_available():\n        break\n    if device.type == "cuda":\n        return 1\n    return 2',
        "if torch.cuda.is_available():\n    pass\nelse:\n    return 1\nreturn x.cuda()",
        "has = torch.cuda.is_available()\nif not has:\n    return x\nreturn x.cuda()",
        "has = torch.cuda.is_available()\nif has:\n    x = x.cuda()\nreturn x",
        "model.has = torch.cuda.is_available()\nif model.has:\n    x = x.cuda()\nreturn x",
        'where = "cuda" if torch.cuda.is_available() else "cpu"\ny = y.to(where)\nif torch.cuda.is_available():\n    x = x.cuda()\nreturn x, y',
        "if torch.cuda.is_available():\n    x = x.cuda()\nif torch.cuda.is_available():\n    y = y.cuda()\nreturn x, y",
        "if flag:\n    if not torch.cuda.is_available():\n        return x\nreturn x.cuda()",
        "if torch.cuda.is_available() is False:\n    return x\nreturn x.cuda()",
        "if torch.cuda.is_available() == True:\n    x = x.cuda()\nreturn x",
        "n = torch.cuda.device_count()\nif n > 0:\n    x = x.cuda()\nreturn x",
        "n = torch.cuda.device_count() if torch.cuda.is_available() else 0\nif n:\n    x = x.cuda()\nreturn x",
        "if (n := torch.cuda.device_count()) > 1:\n    x = x.cuda()\nreturn x",
        "use = True if torch.cuda.is_available() else False\nif use:\n    x = x.cuda()\nreturn x",
        "if 0 < torch.cuda.device_count():\n    x = x.cuda()\nreturn x",
        "for a in [x]:\n    if flag:\n        if not torch.cuda.is_available():\n            continue\n    a.cuda()",
        "to = lambda a: a.cuda() if torch.cuda.is_available() else a\nif torch.cuda.is_available(): y = y.cuda()\nreturn to(x), y",
        "def to(a):\n    return a.cuda() if torch.cuda.is_available() else a\nif torch.cuda.is_available(): y = y.cuda()\nreturn to(x), y",
        "if torch.cuda.device_count() > 0:\n    x = x.cuda()\nreturn x",
        "if torch.cuda.device_count():\n    x = x.cuda()\nreturn x",
        "if torch.cuda.device_count() == 0:\n    return x\nreturn x.cuda()",
        "if not torch.cuda.device_count():\n    return x\nreturn x.cuda()",
        "return x.cuda() if torch.cuda.device_count() >= 1 else x",
        "n = torch.cuda.device_count() > 1\nif n:\n    x = x.cuda()\nreturn x",
        "if torch.cuda.is_available():\n    x = x.cuda()\nif torch.cuda.device_count() > 1:\n    x = wrap(x)\nreturn x",
        "if torch.cuda.is_available():\n    x = x.cuda()\nwhile x.is_cuda:\n    return x",
        "if not torch.cuda.is_available():\n    raise ValueError\nif device.type != 'cuda':\n    return 4\nreturn 5",
    ],
)
def test_a_safe_edit_of_a_test_leaves_nothing_behind_that_relies_on_it(body: str, target: str) -> None:
    check(program(body), target)


# -- classes ---------------------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "if isinstance(x, torch.Tensor):\n    x = x.cuda()\nreturn x",
        "if not isinstance(x, torch.Tensor):\n    return x\nreturn x.cuda()",
        "assert isinstance(x, (torch.Tensor, torch.nn.Module))\nreturn x.cuda()",
        "return x.cuda() if torch.is_tensor(x) else x",
        "return [a.cuda() if isinstance(a, torch.Tensor) else a for a in (x, y)]",
        "return [a.cuda() for a in (x, y) if isinstance(a, torch.Tensor)]",
        "return {k: v.cuda() for k, v in {1: x}.items() if isinstance(v, torch.nn.Module | torch.Tensor)}",
        "is_tensor = isinstance(x, torch.Tensor)\nif is_tensor and flag:\n    return x.cuda()",
        "if type(x) is torch.Tensor:\n    return x.cuda()",
        "if isinstance(x, list):\n    pass\nelif isinstance(x, torch.Tensor):\n    return x.cuda()",
        "return isinstance(x, torch.Tensor) and x.cuda()",
        "match x:\n    case torch.Tensor():\n        return x.cuda()",
    ],
)
def test_a_test_of_its_class_shows_that_a_value_is_a_tensor(body: str, target: str) -> None:
    assert "cuda()" not in port_text(program(body), Settings(target)).text


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "if isinstance(x, Batch):\n    x = x.cuda()\nreturn x",
        "if isinstance(x, torch.Tensor):\n    x = Batch(x)\n    return x.cuda()",
        "if isinstance(x, torch.Tensor):\n    return 1\nreturn x.cuda()",
        "if isinstance(x, (torch.Tensor, Batch)):\n    return x.cuda()",
        "if isinstance(x, torch.Tensor) or flag:\n    return x.cuda()",
        "if isinstance(model, torch.Tensor):\n    return x.cuda()",
        "return x.cuda() if not isinstance(x, torch.Tensor) else x",
    ],
)
def test_a_test_of_another_class_or_value_does_not(body: str, target: str) -> None:
    assert "x.cuda()" in port_text(program(body), Settings(target)).text


# -- reasons ---------------------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "if torch.cuda.get_device_capability()[0] < 6:\n    raise ValueError",
            "only CUDA has a compute capability",
        ),
        ("return torch.cuda.get_device_capability() >= (8, 0)", "only CUDA has a compute capability"),
        (
            "return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8",
            "it tests CUDA's compute capability",
        ),
        (
            'if device.type == "cuda" and torch.cuda.get_device_capability(0) < (7, 5):\n    return 1',
            "it tests CUDA's compute capability",
        ),
        ("p = torch.cuda.get_device_properties(0)\nreturn p.major, p.name", "the property `major`"),
        ("return torch.cuda.get_device_properties(0).multi_processor_count", "`multi_processor_count`"),
        (
            "with torch.cuda.amp.autocast(dtype=torch.float32):\n    pass",
            "only CUDA autocasts to dtypes other",
        ),
        ("with torch.cuda.amp.autocast(dtype=other):\n    pass", "nothing shows the dtype"),
        (
            'with torch.autocast("cpu"):\n    with torch.cuda.amp.autocast(dtype=torch.float16):\n        pass',
            "it turns off an autocast of the CPU",
        ),
        (
            "if torch.cuda.is_available() and flash_cuda(x):\n    return 1",
            "it decides about `flash_cuda(…)`",
        ),
        (
            "if not torch.cuda.is_available():\n    return x\nif device.type != 'cuda':\n    return y",
            "it must be edited with line 7",
        ),
        (
            "if torch.cuda.is_available():\n    x = x.cuda()\nif torch.cuda.is_available():\n    x = x.half()",
            "line 6",
        ),
        ("return (x.is_cuda and flag) if not torch.cuda.is_available() else 1", "may not be a tensor"),
    ],
)
def test_the_reason_of_an_edit_names_its_cause(body: str, said: str, target: str) -> None:
    unsafe = check(program(body), target)
    found = reasons(unsafe)
    assert said in found, found
    assert "package for NVIDIA" not in found


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    ["if flag <= torch.cuda.device_count():\n    return 1", "return torch.cuda.device_count() >= flag"],
)
def test_a_count_that_is_compared_with_a_number_of_the_program_is_none_on_a_host(
    body: str, target: str
) -> None:
    unsafe = check(program(body), target, changed=True)
    assert not reasons(unsafe)
    assert not differing(program(body), unsafe.text)


# -- tensors and modules of other libraries --------------------------------------------------------------

WITH_LIBRARIES = "import torch\nimport torchaudio\nimport torchvision\n\n\ndef make(x):\n    return x"
MOVES_WHERE_THERE_IS_CUDA = "use = True if torch.cuda.is_available() else False\n"


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "sound, rate = torchaudio.load(device)\nif use:\n    sound = sound.cuda()\nreturn sound, rate",
        "for _ in range(2):\n    sound, rate = torchaudio.load(device)\n    if use:\n        sound = sound.cuda()\n"
        "    sound = make(sound)\nreturn sound",
        "resample = torchaudio.transforms.Resample(1, 2)\nif use:\n    resample = resample.cuda()\nreturn resample",
        "net = torchvision.models.resnet18()\nif use:\n    net = net.cuda()\nreturn net",
        "net = make(x)\nnet.load_state_dict({})\nif use:\n    net = net.cuda()\nnet.eval()\nreturn net",
    ],
)
def test_what_is_a_tensor_or_a_module_by_its_library_or_its_methods_moves(body: str, target: str) -> None:
    source = program(MOVES_WHERE_THERE_IS_CUDA + body, WITH_LIBRARIES)
    found = check(source, target, changed=True)
    assert not reasons(found)


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        "sound, rate = torchaudio.load(device)\nreturn rate.cuda()",
        "steps = torchvision.transforms.Compose([])\nreturn steps.cuda()",
        "weights = torchvision.models.ResNet18_Weights(device)\nreturn weights.cuda()",
        "state = make(x)\nstate.load_state_dict({})\nreturn state.cuda()",
        "if flag:\n    sound, rate = torchaudio.load(device)\nelse:\n    sound = make(x)\nreturn sound.cuda()",
    ],
)
def test_other_results_of_libraries_of_torch_may_be_neither(body: str, target: str) -> None:
    found = port_text(program(body, WITH_LIBRARIES), Settings(target))
    assert "neither a tensor nor a module" in reasons(found)


@pytest.mark.parametrize(
    "body",
    [
        "if torch.cuda.is_available() and torch.cuda.is_initialized():\n    torch.cuda.manual_seed(1)\n    return 1\nreturn 2",
        "if not torch.cuda.is_available() or not torch.cuda.is_initialized():\n    return 1\nreturn x",
        "used = torch.cuda.is_available() and torch.cuda.is_initialized()\nreturn x.half() if used else x",
    ],
)
def test_whether_a_device_is_in_use_is_asked_of_any_accelerator_where_there_is_one(body: str) -> None:
    assert not reasons(check(program(body), "acclimate", changed=True))


@pytest.mark.parametrize(
    "body",
    [
        "if torch.cuda.is_initialized():\n    return 1\nreturn 2",
        "return bool(torch.cuda.is_initialized())",
        "return bool(torch.cuda.is_bf16_supported())",
    ],
)
def test_a_question_of_cuda_that_a_cpu_answers_with_yes_is_asked_alone_at_a_persons_own_risk(
    body: str,
) -> None:
    found = check(program(body), "acclimate", changed=False)
    assert "on a host without accelerator it is True and was False" in reasons(found)
