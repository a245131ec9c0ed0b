"""What doctor says of the ATOM decoder. The vendor's packages and its `rbln-smi` are fakes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.atom_findings import find_card, find_environment
from headrace.engine.atom import environment, smi
from headrace.engine.atom.environment import SETUP, VARIABLE
from tests.unit.engine.atom.fake_site import SMI, printing, write_fake_site, write_fake_smi

Tool = Callable[[str], None]


@pytest.fixture(autouse=True)
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment is named, this one has no vendor packages, and there is no tool."""
    for name in (VARIABLE, *smi.CHOOSERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    monkeypatch.setattr(smi, "_DEVICES", tmp_path / "dev")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tool:
    """Puts a fake `rbln-smi` on PATH, which prints this."""

    def put(said: str) -> None:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}")
        write_fake_smi(tmp_path / "bin", printing(said))

    return put


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names this very interpreter, whose children find the fake packages."""
    site = write_fake_site(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))
    monkeypatch.setenv(VARIABLE, sys.executable)


def test_nothing_is_there() -> None:
    finding = find_environment()
    assert (finding.status, finding.advice) == ("note", SETUP)
    assert finding.found.startswith("sdk_missing: environment: optimum-rbln not installed in ")
    finding = find_card()
    assert (finding.name, finding.status) == ("atom card", "note")
    assert finding.found == "driver_missing: rbln-smi -j: rbln-smi is not on PATH"


def test_a_card_is_told_of_without_an_environment(tool: Tool) -> None:
    tool(SMI)
    finding = find_card()
    assert finding.status == "note"
    assert finding.found.startswith("rbln0, RBLN-CA25, 0000:51:00.0, ")
    assert finding.found.endswith(
        "driver 3.5.1; not opened: there is no environment for decoder atom"
    )


def test_all_is_there(packages: None, tool: Tool) -> None:
    tool(SMI)
    finding = find_environment()
    assert (finding.name, finding.status) == ("decoder atom", "ok")
    assert finding.found.startswith(f"available in {sys.executable}: optimum-rbln 0.12.0, ")
    assert finding.facts == {"interpreter": sys.executable}
    finding = find_card()
    assert finding.status == "ok"
    assert "rebel.get_npu_name(0): RBLN-CA25" in finding.found


def test_an_environment_without_a_card(packages: None) -> None:
    assert find_environment().status == "ok"
    finding = find_card()
    assert (finding.status, finding.facts["stage"]) == ("note", "driver_missing")


def test_an_environment_that_is_broken(packages: None, tool: Tool, tmp_path: Path) -> None:
    tool(SMI)
    (tmp_path / "site" / "rebel" / "__init__.py").write_text("import os; os.abort()")
    finding = find_environment()
    assert (finding.status, finding.facts["interpreter"]) == ("note", sys.executable)
    assert finding.found == "sdk_missing: import rebel: the process was ended by SIGABRT"
    assert find_card().status == "note"
