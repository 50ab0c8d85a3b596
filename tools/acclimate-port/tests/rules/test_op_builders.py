"""DeepSpeed's op builders become the accelerator's only where each accelerator has one for the program."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from acclimate_port.rules.acc601_op_builder import ON_EVERY_ACCELERATOR
from porting import BOTH, reasons

HEAD = "import torch\nfrom deepspeed.ops.op_builder import {0}\n\n\ndef f():\n    return {0}().load()\n"
PREBUILT = {
    "a part of DeepSpeed": "def f(path):\n    import deepspeed\n\n    deepspeed.DeepSpeedConfig(path)\n"
    "    return deepspeed.ops.op_builder.CPUAdamBuilder().load()\n",
    "its engine": "import deepspeed\nfrom deepspeed.ops.op_builder import CPUAdamBuilder\n\n\ndef f(model):\n"
    "    CPUAdamBuilder().load()\n    return deepspeed.initialize(model=model)\n",
    "an op that is only built": "from deepspeed.ops import op_builder\n\nop_builder.CPUAdamBuilder().load()\n",
}


@BOTH
@pytest.mark.parametrize(
    "name", ["GDSBuilder", "EvoformerAttnBuilder", "QuantizerBuilder", "InferenceBuilder"]
)
def test_a_builder_that_acclimate_lacks_is_left_with_the_reason(name: str, target: str) -> None:
    source = HEAD.format(name)
    ported = port_text(source, Settings(target, unsafe=True))
    assert ported.text == source
    assert [site.status for site in ported.sites] == [Status.LEFT]
    assert "op builder" in reasons(ported)


@pytest.mark.parametrize("name", sorted(ON_EVERY_ACCELERATOR))
def test_a_builder_of_every_accelerator_is_converted(name: str) -> None:
    ported = port_text(HEAD.format(name), Settings())
    assert f'get_accelerator().create_op_builder("{name}").load()' in ported.text


def test_the_names_are_those_that_every_accelerator_of_acclimate_has() -> None:
    accelerator = pytest.importorskip("acclimate.accelerator")
    # What `InferenceBuilder` loads has other functions than DeepSpeed's.
    assert set(accelerator.Accelerator.op_builders) - {"InferenceBuilder"} == ON_EVERY_ACCELERATOR


@pytest.mark.parametrize("kind", PREBUILT)
def test_an_op_that_deepspeed_itself_needs_stays(kind: str) -> None:
    source = f"import torch\n{PREBUILT[kind]}"
    ported = port_text(source, Settings(unsafe=True))
    assert ported.text == source
    assert "needs its own op" in reasons(ported)


def test_the_builders_of_deepspeeds_own_accelerator_are_all_converted() -> None:
    source = f"from deepspeed.accelerator import get_accelerator\n{HEAD.format('GDSBuilder')}"
    assert 'get_accelerator().create_op_builder("GDSBuilder")' in port_text(source, Settings()).text
