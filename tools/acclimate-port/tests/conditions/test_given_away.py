"""A question for CUDA is not ported safely if its answer goes to code that means CUDA by it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET, ported_project, site

COUNT = "torch.cuda.device_count()"
HEAD = "import os\nimport subprocess\n\nimport torch\nimport {}\n\n\ndef f(args, parser):\n"

TO_OTHERS = {
    "a flag": ("easyocr", f"return easyocr.Reader(['en'], gpu={AVAILABLE})"),
    "a flag in a name": ("easyocr", f"gpu = {AVAILABLE}\nreturn easyocr.Reader(['en'], gpu=gpu)"),
    "a number by a test": (
        "allennlp",
        f"n = 0 if {AVAILABLE} else -1\nreturn allennlp.load('x', cuda_device=n)",
    ),
    "a number of a branch": (
        "allennlp",
        f"n = -1\nif {AVAILABLE}:\n    n = 0\nreturn allennlp.load('x', device=n)",
    ),
    "an entry of settings": (
        "lightgbm",
        f"params = {{'device': 'gpu' if {AVAILABLE} else 'cpu'}}\nreturn lightgbm.train(params)",
    ),
    "an entry that a branch adds": (
        "catboost",
        f"kw = {{}}\nif {AVAILABLE}:\n    kw['task_type'] = 'GPU'\nreturn catboost.CatBoostClassifier(**kw)",
    ),
    "a number of devices": ("vllm", f"n = {COUNT}\nreturn vllm.LLM('x', tensor_parallel_size=n)"),
    "at least one device": ("vllm", f"return vllm.LLM('x', tensor_parallel_size=max(1, {COUNT}))"),
    "a call that a branch makes": ("spacy", f"if {AVAILABLE}:\n    spacy.require_gpu()"),
    "a name of CUDA in a branch": ("cv2", f"if {AVAILABLE}:\n    args.net.start(cv2.dnn.DNN_BACKEND_CUDA)"),
    "an option of a method": ("ray", f"return ray.PPOConfig().resources(num_gpus={COUNT})"),
    "a trainer of Lightning": ("lightning", f"return lightning.Trainer(devices={COUNT}, accelerator='auto')"),
    "a precision for Lightning": (
        "lightning",
        f"return lightning.Trainer(precision='16-mixed' if {AVAILABLE} else 32)",
    ),
}
TO_OTHERS |= {
    "a class in a name": ("easyocr", f"reader = easyocr.Reader\nreturn reader(gpu={AVAILABLE})"),
    "a class of a table": (
        "easyocr",
        f"kinds = {{'a': easyocr.Reader}}\nreader = kinds[args]\nreturn reader(gpu={AVAILABLE})",
    ),
}
TO_PROCESSES = {
    "a command": f"subprocess.run(['torchrun', f'--nproc_per_node={{{COUNT}}}', 'train.py'])",
    "a command in a name": f"command = 'torchrun --nproc_per_node=%d train.py' % {COUNT}\nos.system(command)",
    "a word of a list": f"command = ['torchrun', '--nproc_per_node', str({COUNT}), 'train.py']\nsubprocess.run(command)",
    "a script": f"n = {COUNT}\nopen('run.sh', 'w').write(f'#SBATCH --gres=gpu:{{n}}')",
    "an option by a test": f"command = ['python', 'train.py']\nif {AVAILABLE}:\n    command += ['--cuda']\nsubprocess.run(command)",
    "a codec": f"codec = 'h264_nvenc' if {AVAILABLE} else 'libx264'\nsubprocess.run(['ffmpeg', '-c:v', codec])",
    "a variable": f"os.environ['USE_CUDA'] = '1' if {AVAILABLE} else '0'",
    "the number of a visible device": f"subprocess.Popen(f'CUDA_VISIBLE_DEVICES={{args.i % {COUNT}}} python train.py')",
    "a text that is returned": f"n = {COUNT}\nreturn f'{{args.cpus}}cpu_{{n}}gpu'",
    "a name of code": f"kind = 'torch.cuda' if {AVAILABLE} else 'torch'\nreturn eval(kind + '.FloatTensor')(3)",
}
TOLD = {
    "a message": f"print(f'{{{COUNT}}} GPUs')",
    "a message in a name": f"text = 'GPUs: %d' % {COUNT}\nprint(text)",
    "an error": f"if {COUNT} < args.n:\n    raise ValueError(f'needs {{args.n}} GPUs, and there are {{{COUNT}}}')",
    "settings that are stored": f"wandb.init(config={{'gpus': {COUNT}}})",
    "the size of the world": f"os.environ['WORLD_SIZE'] = str({COUNT})",
    "processes": f"torch.multiprocessing.spawn(print, nprocs={COUNT})",
    "an optimizer": f"return torch.optim.AdamW(args.model.parameters(), fused={AVAILABLE})",
    "an option": f"if {AVAILABLE}:\n    parser.add_argument('--gpus', type=int)",
    "a reason to skip": f"if {AVAILABLE}:\n    pytest.skip('gpu')",
}


def source_of(library: str, body: str) -> str:
    return HEAD.format(library) + textwrap.indent(body, "    ") + "\n"


@EACH_TARGET
@pytest.mark.parametrize("kind", TO_OTHERS)
def test_an_answer_that_another_library_gets_is_unsafe(kind: str, target: str) -> None:
    source = source_of(*TO_OTHERS[kind])
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
@pytest.mark.parametrize("kind", TO_PROCESSES)
def test_an_answer_that_another_process_or_program_gets_is_unsafe(kind: str, target: str) -> None:
    source = source_of("wandb", TO_PROCESSES[kind])
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert {one.status for one in ported.sites} <= {Status.UNSAFE, Status.LEFT}


@EACH_TARGET
@pytest.mark.parametrize("kind", TOLD)
def test_an_answer_that_is_told_or_stays_in_torch_is_ported(kind: str, target: str) -> None:
    ported = port_text(source_of("wandb", TOLD[kind]), Settings(target))
    assert "torch.cuda" not in ported.text, ported.sites


@EACH_TARGET
def test_a_test_that_keeps_a_setting_of_lightning_is_unsafe(target: str) -> None:
    source = (
        "import hydra\nimport torch\n\n\ndef main(cfg):\n    if not torch.cuda.is_available():\n"
        "        cfg.trainer.accelerator = 'cpu'\n    return hydra.utils.instantiate(cfg.trainer)\n"
    )
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_arguments_of_a_function_that_makes_a_trainer_are_unsafe(target: str, tmp_path: Path) -> None:
    run = f"from runner import run\nimport torch\n\n\ndef f(model):\n    run(model, devices={COUNT})\n"
    for library, status in (("lightning", Status.UNSAFE), ("runner_of_ours", Status.CONVERTED)):
        files = {
            "main.py": run,
            "runner.py": f"import {library}\n\n\ndef run(model, **kw):\n    return {library}.Trainer(**kw)\n",
            "runner_of_ours.py": "class Trainer:\n    pass\n",
        }
        found = ported_project(tmp_path / library, files, target)
        assert site(found["main.py"], COUNT).status is status


ACROSS = {
    "a name": (f"USE = {AVAILABLE}\n", "USE", AVAILABLE),
    "a function": (f"def USE():\n    return {AVAILABLE}\n", "USE()", AVAILABLE),
    "a number": (f"def USE():\n    return {COUNT}\n", "USE()", COUNT),
}
GIVEN = {
    "a library": ("import easyocr", "easyocr.Reader(['en'], gpu={})"),
    "a command": ("import subprocess", "subprocess.run(['torchrun', f'--nproc={{{}}}', 'train.py'])"),
}


@EACH_TARGET
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", ACROSS)
def test_an_answer_that_another_file_gives_away_is_unsafe(
    kind: str, given: str, target: str, tmp_path: Path
) -> None:
    source, name, asked = ACROSS[kind]
    for call, status in ((GIVEN[given][1], Status.UNSAFE), ("print({})", Status.CONVERTED)):
        files = {
            "answers.py": f"import torch\n\n\n{source}",
            "use.py": f"from answers import USE\n{GIVEN[given][0] if status is Status.UNSAFE else ''}\n\n\ndef f():\n    return {call.format(name)}\n",
        }
        found = ported_project(tmp_path / status.value, files, target)["answers.py"]
        assert site(found, asked).status is status


@EACH_TARGET
@pytest.mark.parametrize("source", ["DEVICE = {}\n", "def DEVICE():\n    return {}\n"])
def test_a_device_that_another_file_gives_a_library_with_own_names_is_unsafe(
    source: str, target: str, tmp_path: Path
) -> None:
    choice = f"'cuda' if {AVAILABLE} else 'cpu'"
    name = "DEVICE()" if "def" in source else "DEVICE"
    files = {
        "answers.py": f"import torch\n\n\n{source.format(choice)}",
        "use.py": f"import ctranslate2\nfrom answers import DEVICE\n\n\ndef f():\n    return ctranslate2.Translator('x', device={name})\n",
    }
    found = ported_project(tmp_path, files, target)["answers.py"]
    assert site(found, choice).status is Status.UNSAFE


STARTED = "import os\nimport sys\nfrom multiprocessing import Pool\n\nimport torch\n\n\n"
RUN = "def run(given):\n    name, gpu = given\n    os.system('python3 {{}} --name={{}} {option}={{}}'.format(sys.argv[1], name, gpu))\n\n\n"
POOL = f"n = {COUNT}\npool = Pool(processes=n)\npool.map(run, [(at, at % n) for at in range(9)])\n"


@EACH_TARGET
def test_a_count_is_unsafe_in_a_file_whose_processes_get_gpus(target: str) -> None:
    for option, status in (("--gpus", Status.UNSAFE), ("--seed", Status.CONVERTED)):
        ported = port_text(STARTED + RUN.format(option=option) + POOL, Settings(target))
        assert [one.status for one in ported.sites] == [status], ported.sites


@EACH_TARGET
def test_a_count_that_is_only_told_is_safe_beside_a_command_with_gpus(target: str) -> None:
    ported = port_text(f"{STARTED}{RUN.format(option='--gpus')}print({COUNT})\n", Settings(target))
    assert [one.status for one in ported.sites] == [Status.CONVERTED], ported.sites
