"""`acclimate ops` says what is built, builds ahead for any accelerator, and cleans what it built."""

from __future__ import annotations

import json
import shutil

import pytest
from building import COMPILER, Workshop, command_line

from quick_parameters import quick

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")

ACME = {"ACCLIMATE_ACCELERATOR": "acme"}


def test_an_op_is_listed_as_it_is_before_and_after_it_is_built(workshop: Workshop) -> None:
    (before,) = json.loads(workshop.run(command_line("ops", "--json"), env=ACME).stdout)["ops"]
    assert (before["builder"], before["op"], before["state"]) == (
        "ScaleBuilder",
        "acme_scale",
        "can be built",
    )
    built = workshop.run(command_line("ops", "build"), env=ACME)
    assert built.told == {"code": 0}
    assert "built in" in built.stdout
    (library,) = workshop.libraries()
    (after,) = json.loads(workshop.run(command_line("ops", "--json"), env=ACME).stdout)["ops"]
    assert (after["state"], after["library"]) == ("built", str(library))


def test_an_op_that_cannot_be_built_is_listed_with_the_reason(workshop: Workshop) -> None:
    outcome = workshop.run(command_line("ops"), env=ACME | workshop.without_compiler)
    assert "cannot be built" in outcome.stdout
    assert "there is no C++ compiler" in " ".join(outcome.stdout.split())


def test_building_an_op_that_cannot_be_built_fails_with_the_reason(workshop: Workshop) -> None:
    arguments = ("ops", "build", "acme_scale", "--json")
    outcome = workshop.run(command_line(*arguments), env=ACME | workshop.without_compiler)
    assert outcome.told == {"code": 1}
    (op,) = json.loads(outcome.stdout)["ops"]
    assert op["reason"].startswith("there is no C++ compiler")


def test_nothing_is_called_built_if_the_cache_cannot_keep_it(workshop: Workshop) -> None:
    in_the_way = workshop.folder / "file"
    in_the_way.touch()
    cache = {"ACCLIMATE_CACHE": str(in_the_way / "cache")}
    outcome = workshop.run(command_line("ops", "build", "acme_scale", "--json"), env=ACME | cache)
    assert outcome.told == {"code": 1}
    (op,) = json.loads(outcome.stdout)["ops"]
    assert op["state"] == "failed"
    assert op["library"] is None
    assert "Set ACCLIMATE_CACHE to a" in op["reason"]


def test_a_source_that_does_not_compile_fails_with_the_compilers_message(workshop: Workshop) -> None:
    (workshop.folder / "acme/acme/ops/csrc/scale.cpp").write_text("int scale( {\n")
    outcome = workshop.run(command_line("ops", "build", "--json"), env=ACME)
    assert outcome.told == {"code": 1}
    (op,) = json.loads(outcome.stdout)["ops"]
    assert op["state"] == "failed"
    assert "scale.cpp:1:" in op["reason"]


def test_an_unknown_op_is_an_error_that_names_the_closest(workshop: Workshop) -> None:
    outcome = workshop.run(command_line("ops", "build", "scalebuildr"), env=ACME)
    assert outcome.told == {"code": 2}
    expected = 'The acme accelerator has no op "scalebuildr"; did you mean "ScaleBuilder"?'
    assert outcome.stderr == f"acclimate ops: error: {expected}\n"


def test_an_unknown_accelerator_is_an_error_that_names_the_closest(workshop: Workshop) -> None:
    outcome = workshop.run(command_line("ops", "--accelerator", "acne"))
    assert outcome.told == {"code": 2}
    assert outcome.stderr.startswith("acclimate ops: error: --accelerator must be one of [")
    assert 'Value "acne" is not supported; did you mean "acme"?' in outcome.stderr


@pytest.mark.parametrize("order", quick(("before the action", "after it"), "after it"))
def test_an_op_is_built_for_an_accelerator_that_is_not_present(order: str, workshop: Workshop) -> None:
    """An image is built where no device is; the probe says so, and is not asked."""
    module = workshop.folder / "acme" / "acme" / "__init__.py"
    module.write_text(module.read_text().replace("lambda: None", 'lambda: "there is no such device."'))
    named = ("--accelerator", "acme")
    arguments = ("ops", *named, "build") if order == "before the action" else ("ops", "build", *named)
    assert workshop.run(command_line(*arguments)).told == {"code": 0}
    assert [library.name for library in workshop.libraries()] == ["acme_scale.so"]


@pytest.mark.slow
def test_clean_removes_everything_that_was_built(workshop: Workshop) -> None:
    workshop.run(command_line("ops", "build"), env=ACME)
    outcome = workshop.run(command_line("ops", "clean"), env=ACME)
    assert outcome.stdout == f"Removed 1 library from {workshop.cache / 'ops'}\n"
    assert not list((workshop.cache / "ops").iterdir())


def test_clean_removes_one_op_by_either_of_its_names(workshop: Workshop) -> None:
    workshop.run("from tiny_op.builder import TinyBuilder\nTinyBuilder().load()")
    workshop.run(command_line("ops", "build"), env=ACME)
    built = shutil.copytree(workshop.cache, workshop.folder / "built")
    for name in ("ScaleBuilder", "acme_scale"):
        shutil.copytree(built, workshop.cache, dirs_exist_ok=True)
        assert workshop.run(command_line("ops", "clean", name), env=ACME).told == {"code": 0}
        assert [library.name for library in workshop.libraries()] == ["tiny.so"]


def test_clean_leaves_what_another_process_is_building(workshop: Workshop) -> None:
    outcome = workshop.run(f"""
import os
from pathlib import Path
from acclimate.cache.lock import hold
folder = Path({str(workshop.cache)!r}) / "ops" / "tiny"
private = folder / ".0123-4567.89ab.partial"
private.mkdir(parents=True)
start, go = os.pipe()
end, cleaned = os.pipe()
if os.fork() == 0:
    os.close(cleaned)
    with hold(folder / ".0123-4567.lock", 0, "building"):
        os.write(go, b".")
        os.read(end, 1)
    os._exit(0)
os.read(start, 1)
{command_line("ops", "clean")}
tell(left=private.is_dir())
os.close(cleaned)
""")
    assert outcome.told == {"code": 0, "left": True}
    assert "Kept, since it is being built: tiny" in outcome.stdout


def test_every_op_of_the_host_has_a_state_on_every_accelerator(workshop: Workshop) -> None:
    for accelerator in ("cpu", "cuda"):
        arguments = ("ops", "--accelerator", accelerator, "--json")
        report = json.loads(workshop.run(command_line(*arguments)).stdout)
        states = {op["builder"]: op["state"] for op in report["ops"]}
        assert {"CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder", "AsyncIOBuilder"} <= states.keys()
        assert set(states.values()) <= {"built", "can be built", "cannot be built", "needs no building"}
