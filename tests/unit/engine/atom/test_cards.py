"""What tells one ATOM card from another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.atom import smi
from headrace.engine.atom.cards import describe, which
from headrace.engine.atom.sdk import Sdk
from headrace.errors import BackendUnavailable
from tests.unit.engine.atom.fake_site import write_fake_smi

REBEL = SimpleNamespace(get_npu_name={0: "RBLN-CA25", 1: "RBLN-CA25"}.get)
REAL = Sdk("rebellions", REBEL, lambda *given: None, lambda numel: None, {}, "")
FAKE = replace(REAL, name="fake rebellions")


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in smi.CHOOSERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(smi, "_DEVICES", tmp_path / "dev")


def test_a_card_is_told_by_where_it_is_plugged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write_fake_smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    assert describe(REAL, 1) == {"index": 1, "name": "RBLN-CA25", "bus_id": "0000:52:00.0"}
    assert which(describe(REAL, 0)) != which(describe(REAL, 1))
    assert describe(FAKE, 1) == {"index": 1, "name": "RBLN-CA25"}


def test_without_the_drivers_tool_a_card_goes_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert describe(REAL, 1) == {"index": 1, "name": "RBLN-CA25"}
    assert which(describe(REAL, 0)) != which(describe(REAL, 1))


def broken(device: int) -> Any:
    raise RuntimeError("the driver is gone")


@pytest.mark.parametrize(
    ("name", "said"), [({}.get, "it is None"), (broken, "RuntimeError: the driver is gone")]
)
def test_a_card_that_is_not_there_is_told(name: Any, said: str) -> None:
    sdk = replace(REAL, rebel=SimpleNamespace(get_npu_name=name))
    with pytest.raises(BackendUnavailable, match=said) as told:
        describe(sdk, 5)
    assert (told.value.stage, told.value.probe) == ("no_device", "rebel.get_npu_name(5)")
