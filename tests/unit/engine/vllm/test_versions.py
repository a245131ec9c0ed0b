"""Which vLLM is taken, and that others are refused by name."""

from __future__ import annotations

import pytest

from headrace.engine.vllm.versions import SUPPORTED, check_version
from headrace.errors import Refused
from tests.unit.vllm.stand_in import VERSIONS


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu", "0.33.0rc2"])
def test_what_it_was_made_for(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    "version",
    [
        "0.31.0",
        "0.34.0",
        "0.3.2",
        "1.32.0",
        "0.320.0",
        "dev",
        "",
        "0",
        "0.33rc1",
        "v0.33.0",
        "0..33",
    ],
)
def test_others_are_refused_by_name(version: str) -> None:
    with pytest.raises(Refused) as told:
        check_version(version)
    assert str(told.value).startswith(f"this is vLLM {version}, ")
    assert "0.32 and 0.33; install one of these" in str(told.value)
    assert told.value.field == "vllm"


def test_the_signatures_of_each_are_recorded() -> None:
    recorded = {tuple(int(number) for number in version.split(".")[:2]) for version in VERSIONS}
    assert recorded == set(SUPPORTED)
