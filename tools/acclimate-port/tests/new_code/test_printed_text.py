"""An f-string that prints the text of its code, ``f"{code=}"``, prints the same text after the port."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, check, program

PRINTED = {
    "a figure": "f'used: {torch.cuda.max_memory_allocated()=:,}'",
    "a number with spaces": "f'{torch.cuda.device_count() = }'",
    "a conversion": "f'{torch.cuda.device_count()=!s:>4} {torch.cuda.is_available()=}'",
    "spaces before it": "f'{ torch.cuda.device_count()=}'",
    "a comparison": "f'{torch.cuda.device_count() == 2=}'",
    "quotes of another kind": "f\"{torch.ones(1, device='cuda') is None = }\"",
    "several lines": "f'''{\n        torch.cuda.device_count()\n        = }'''",
    "a choice": "f\"{'cuda' if torch.cuda.is_available() else 'cpu'=}\"",
}


@BOTH
@pytest.mark.parametrize("kind", PRINTED)
def test_the_printed_text_of_code_is_the_same_after_the_port(kind: str, target: str) -> None:
    ported = check(program(f"info({PRINTED[kind]})"), target, changed=True)
    assert {one.status for one in ported.sites} == {Status.CONVERTED}


@BOTH
def test_a_text_that_no_plain_string_can_hold_is_unsafe(target: str) -> None:
    source = program("return f'{f\"{torch.cuda.device_count()=}\"}'")
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert "prints the text" in ported.sites[0].reason


@BOTH
def test_a_string_with_an_equals_sign_after_the_code_stays_short(target: str) -> None:
    ported = check(program("info(f'{torch.cuda.device_count()}=')"), target, changed=True)
    assert ported.text.count("device_count()") == 1
