"""What the doctor says of vLLM's environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.cli import vllm_findings
from headrace.cli.vllm_findings import find_environment
from headrace.engine.environments import VLLM


def _interpreter(place: Path, script: str) -> str:
    path = place / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("echo 0.32.0+cpu", "ok", "vLLM 0.32.0+cpu in "),
        ("echo 0.31.0", "note", "this is vLLM 0.31.0"),
        ("exit 1", "note", "has no vLLM"),
        ("exit 0", "note", "has no vLLM"),
    ],
)
def test_its_version_is_told(
    script: str, status: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VLLM.variable, _interpreter(tmp_path, script))

    finding = find_environment()

    assert (finding.name, finding.status) == ("source vllm", status)
    assert found in finding.found
    assert finding.advice or status == "ok"


def test_one_that_hangs_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM.variable, _interpreter(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(vllm_findings, "_TIMEOUT_S", 0.05)

    assert find_environment().status == "note"


def test_none_is_a_note_that_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VLLM.variable, raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))

    finding = find_environment()

    assert finding.status == "note"
    assert "vllm-env" in finding.advice


def test_this_python_is_asked_for_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM.variable, sys.executable)

    assert find_environment().facts["interpreter"] == sys.executable
