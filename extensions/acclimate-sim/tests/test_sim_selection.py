from __future__ import annotations

from pathlib import Path

from sim_process import run_program, run_python


def test_importing_torch_and_acclimate_loads_only_the_question_whether_it_is_asked_for() -> None:
    program = "import sys, torch, acclimate; print([m for m in sys.modules if m.startswith('acclimate_sim')])"
    assert run_program(program, accelerator=None) == "['acclimate_sim', 'acclimate_sim.autoload']"


def test_installed_is_not_chosen() -> None:
    program = """
import torch; from acclimate import get_accelerator
print(get_accelerator().name, torch._C._get_privateuse1_backend_name())
"""
    name, device_type = run_program(program, accelerator=None).split()
    assert name != "sim"
    assert device_type == "privateuseone"


def test_finding_it_imports_no_torch() -> None:
    program = "import sys, acclimate_sim.record as r; print(r.BACKEND.device_count(), 'torch' in sys.modules)"
    assert run_program(program, accelerator=None) == "2 False"


def test_naming_it_chooses_it() -> None:
    program = "from acclimate import get_accelerator as g; print(g().name, g().current_device_name())"
    assert run_program(program) == "sim sim:0"


def test_no_compiler_and_nothing_built_says_so(tmp_path: Path) -> None:
    program = f"""
import os; os.environ.update(PATH="", CXX="", ACCLIMATE_CACHE={str(tmp_path)!r})
import acclimate; acclimate.get_accelerator()
"""
    result = run_python("-c", program)
    assert result.returncode != 0
    assert "there is no C++ compiler" in result.stderr


def test_a_second_package_in_torchs_slot_is_named() -> None:
    program = """
import torch; from acclimate import AcclimateError, set_accelerator
torch.utils.rename_privateuse1_backend("acme")
try: set_accelerator("sim")
except AcclimateError as error: print(error)
"""
    assert '"acme"' in run_program(program, accelerator=None)


def test_the_accelerator_class_has_at_most_40_lines() -> None:
    import acclimate_sim.record

    source = (Path(acclimate_sim.record.__file__).parent / "accelerator.py").read_text().splitlines()
    assert len(source) - source.index("class SimAccelerator(Accelerator):") <= 40
