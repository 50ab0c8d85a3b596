"""Op builders are found by name, and are not imported before that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import Command

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Accelerator]]:
    """An accelerator whose op builders lie in a package of its own."""
    (tmp_path / "their_ops.py").write_text("class Fast:\n    def load(self):\n        return 'native'\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Theirs(CPUAccelerator):
        op_builder_package = "their_ops"
        op_builders = {"FastBuilder": "their_ops:Fast", "GoneBuilder": "their_ops:Gone"}  # noqa: RUF012

    yield Theirs
    sys.modules.pop("their_ops", None)


def test_an_op_that_there_is_not_is_none(acc: Accelerator) -> None:
    assert acc.create_op_builder("NoSuchBuilder") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adam", 'Did you mean "CPUAdamBuilder"?'),
        ("cpu_adam", 'Did you mean "CPUAdamBuilder"?'),
        ("FusedAdaamBuilder", 'Did you mean "FusedAdamBuilder"?'),
        ("NoSuchBuilder", "It has AsyncIOBuilder, "),
    ],
)
def test_a_name_of_no_op_builder_is_logged_with_the_nearest(
    acc: Accelerator, name: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert acc.create_op_builder(name) is None
    assert f'has no op builder "{name}"' in caplog.text
    assert said in caplog.text
    assert acc.get_op_builder("NoSuchBuilder") is None


def test_every_op_builder_of_the_accelerator_is_there(acc: Accelerator) -> None:
    for name in acc.op_builders:
        builder = acc.get_op_builder(name)
        assert isinstance(builder, type), name


def test_an_op_is_found_by_name_and_made(extension: type[Accelerator]) -> None:
    builder = extension().get_op_builder("FastBuilder")
    assert isinstance(builder, type)
    made = extension().create_op_builder("FastBuilder")
    assert type(made) is builder
    assert made.load() == "native"


def test_an_ops_module_is_imported_when_asked_for_and_not_before(extension: type[Accelerator]) -> None:
    accelerator = extension()
    accelerator.get_op_builder("NoSuchBuilder")
    assert "their_ops" not in sys.modules
    accelerator.get_op_builder("FastBuilder")
    assert "their_ops" in sys.modules


def test_an_extensions_ops_do_not_appear_in_others(extension: type[Accelerator], acc: Accelerator) -> None:
    assert acc.get_op_builder("FastBuilder") is None


def test_an_op_whose_class_is_missing_is_an_error_and_not_none(extension: type[Accelerator]) -> None:
    with pytest.raises(AttributeError, match="Gone"):
        extension().get_op_builder("GoneBuilder")


def test_the_folder_of_op_builders_is_a_package(acc: Accelerator, extension: type[Accelerator]) -> None:
    assert type(acc.op_builder_dir()) is str
    assert importlib.import_module(acc.op_builder_dir()).__name__ == acc.op_builder_package
    assert extension().op_builder_dir() == "their_ops"


def test_the_extension_command_is_setuptools(acc: Accelerator) -> None:
    command = acc.build_extension()
    assert isinstance(command, type)
    assert issubclass(command, Command)
