"""One string identifies the kernels; it changes with everything that chooses among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from acclimate.llm.kernels.builder import CPUInferenceBuilder, kernels_chosen
from acclimate.ops import simd


def use_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(simd.VARIABLE, "plain")


def use_processor_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = {**simd._cpuinfo(), "vendor_id": "Another"}
    monkeypatch.setattr(simd, "_cpuinfo", lambda: cpuinfo)


def use_processor_with_another_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = {**simd._cpuinfo(), "flags": f"{simd._cpuinfo().get('flags', '')} another_vnni"}
    monkeypatch.setattr(simd, "_cpuinfo", lambda: cpuinfo)


def use_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUInferenceBuilder, "loaded_key", lambda self: "the key of another build")


@pytest.mark.parametrize(
    "change",
    [
        use_setting,
        use_processor_of_another_maker,
        use_processor_with_another_feature,
        use_another_compiler,
    ],
)
def test_the_string_changes_with(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernels_chosen()
    assert kernels_chosen() == before
    change(monkeypatch)
    assert kernels_chosen() != before


def test_the_key_of_a_loaded_op_is_that_of_its_library() -> None:
    builder = CPUInferenceBuilder()
    builder.load()
    library = builder.built_library()
    assert library is None or builder.loaded_key() == library.parent.name
