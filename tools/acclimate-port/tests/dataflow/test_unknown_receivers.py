"""A device is safe only where each function that gets it is known to give it to torch, the program or a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import AVAILABLE, EACH_TARGET, ported_project, site

CHOICE = f"'cuda' if {AVAILABLE} else 'cpu'"
PROGRAM = "import torch\nimport {module}\n\n\ndef run(x, args):\n    device = {choice}\n    {line}\n    return x.to(device)\n\n\nrun(torch.ones(2), None)\n"
TAKEN = {
    "a message": ("logging", "logging.info('on %s', device)"),
    "a text for the terminal": ("sys", "sys.stderr.write(f'on {device}')"),
    "a function of the program": ("functools", "functools.partial(run, device)"),
    "another process of the program": ("multiprocessing", "multiprocessing.Queue().put(device)"),
    "a variable's default": ("os", "print(os.getenv('DEVICE', device))"),
}
GIVEN_AWAY = {
    "a file": ("json", "json.dump({'device': device}, open('a', 'w'))"),
    "a text for a file": ("json", "open('a', 'w').write(json.dumps({'device': device}))"),
    "a line of a file": ("os", "open('a', 'w').write(f'device: {device}')"),
    "a file of settings": ("json", "args.device = device\n    json.dump(vars(args), open('a', 'w'))"),
    "a database": ("sqlite3", "a = sqlite3.connect('a')\n    a.execute('insert ?', (device,))"),
    "a server": ("redis", "a = redis.Redis()\n    a.set('device', device)"),
    "the environment": ("os", "os.environ.update({'DEVICE': device})"),
    "the environment of a process": ("subprocess", "subprocess.run(['a'], env={'DEVICE': device})"),
    "a process": ("subprocess", "command = ['python', 'a.py', device]\n    subprocess.run(command)"),
    "a template": ("string", "string.Template('run $on').substitute(on=device)"),
    "an object of another library": ("sqlite3", "args.a = sqlite3.connect('a').to(device)"),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", [*TAKEN, *GIVEN_AWAY])
def test_a_device_is_safe_only_where_all_that_get_it_are_known(
    kind: str, target: str, tmp_path: Path
) -> None:
    module, line = TAKEN.get(kind) or GIVEN_AWAY[kind]
    text = PROGRAM.format(module=module, line=line, choice=CHOICE)
    found = site(ported_project(tmp_path, {"main.py": text}, target)["main.py"], CHOICE)
    assert found.status is (Status.CONVERTED if kind in TAKEN else Status.UNSAFE), found


@EACH_TARGET
@pytest.mark.parametrize(("start", "status"), [("", Status.UNSAFE), ("'spawn'", Status.CONVERTED)])
def test_a_seed_is_unsafe_where_another_file_forks_for_code_on_the_device(
    start: str, status: Status, target: str, tmp_path: Path
) -> None:
    chosen = f"mp.set_start_method({start})\n" if start else ""
    files = {
        "seeds.py": "import torch\n\n\ndef seed(n):\n    torch.cuda.manual_seed(n)\n",
        "main.py": "import torch.multiprocessing as mp\nfrom seeds import seed\nfrom work import work\n\n"
        f"{chosen}seed(1)\nmp.Process(target=work, args=('cuda',)).start()\n",
        "work.py": "def work(device):\n    print(device)\n",
    }
    found = site(ported_project(tmp_path, files, target)["seeds.py"], "torch.cuda.manual_seed(n)")
    assert found.status is status


@EACH_TARGET
@pytest.mark.parametrize(("first", "status"), [("seed(1)\n", Status.UNSAFE), ("", Status.CONVERTED)])
def test_a_seed_of_another_file_is_unsafe_before_a_module_chooses_the_visible_devices(
    first: str, status: Status, target: str, tmp_path: Path
) -> None:
    files = {
        "seeds.py": "import torch\n\n\ndef seed(n):\n    torch.cuda.manual_seed(n)\n",
        "main.py": f"import os\n\nfrom seeds import seed\n\n{first}os.environ['CUDA_VISIBLE_DEVICES'] = '1'\nseed(2)\n",
    }
    found = site(ported_project(tmp_path, files, target)["seeds.py"], "torch.cuda.manual_seed(n)")
    assert found.status is status
