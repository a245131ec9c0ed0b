from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.engine.atom import environment
from headrace.engine.atom.environment import SETUP, VARIABLE, find
from headrace.errors import BackendUnavailable
from tests.unit.engine.atom.fake_site import write_facts


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def unavailable() -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        find()
    assert (caught.value.vendor, caught.value.stage) == ("rebellions", "sdk_missing")
    return caught.value


def test_the_variable_names_an_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert find() == sys.executable
    monkeypatch.setenv(VARIABLE, "sh")  # as a shell finds it
    assert find() == "sh"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    exc = unavailable()
    assert exc.probe == VARIABLE
    assert exc.detail == f"{tmp_path / 'python'} is no program that can be run"


def test_this_interpreter_is_taken_if_it_has_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_facts(tmp_path, "optimum-rbln", "0.12.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert find() == sys.executable


def test_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no setup that would make one."""
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    exc = unavailable()
    assert exc.probe == "environment"
    assert exc.detail == f"optimum-rbln not installed in {sys.prefix}, and {VARIABLE} is not set"
    assert exc.hint == SETUP
    for word in ("pip install headrace", VARIABLE, "--decoder-python", "account"):
        assert word in SETUP
