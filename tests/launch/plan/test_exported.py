"""The launcher's variables that are sent to the hosts."""

from __future__ import annotations

import pytest

from acclimate.launch.plan.environment import exported_environment


def test_carried_are_listed_variables_listed_prefixes_and_the_accelerators() -> None:
    environ = {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "OMP_PROC_BIND": "true",
        "ACME_VISIBLE": "0",
        "HOME": "/nowhere",
        "LS_COLORS": "",
        "HF_HOME": "/models",
    }
    assert exported_environment(environ, ["ACME_"]) == {
        name: environ[name] for name in ("PATH", "PYTHONPATH", "OMP_PROC_BIND", "ACME_VISIBLE", "HF_HOME")
    }


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ACME_API_KEY", "TORCH_PASSWORD", "ACME_CREDENTIALS", "UCX_KEY"],
)
def test_what_is_called_like_a_secret_is_not_carried_by_a_prefix(name: str) -> None:
    assert exported_environment({name: "x"}, ["ACME_", "AWS_"]) == {}


def test_a_name_that_only_contains_the_letters_of_a_secrets_is_carried() -> None:
    assert exported_environment({"OMP_MONKEY": "1", "TORCH_KEYBOARD": "1"})
