"""Copies that bypass the cache: used only where the probe shows that they win."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from headrace.errors import DeviceError
from headrace.runtime import tuning
from headrace.runtime.tuning import NON_TEMPORAL, VARIABLE, Tuning, copy_speed, probe_tuning


@pytest.mark.parametrize(("ratio", "used"), [(0.7, False), (1.0, False), (1.1, True), (1.7, True)])
def test_it_is_used_where_it_is_clearly_faster(ratio: float, used: bool) -> None:
    found = Tuning(ratio)
    assert bool(found.environment) == used
    assert str(found).endswith(": used" if used else ": not used")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Tuning(2.0).environment == {VARIABLE: NON_TEMPORAL}
    monkeypatch.setenv(VARIABLE, "glibc.malloc.check=1")
    assert Tuning(2.0).environment == {VARIABLE: f"glibc.malloc.check=1:{NON_TEMPORAL}"}


def test_the_probe_compares_plain_and_tuned_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def run(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        tuned = NON_TEMPORAL in env.get(VARIABLE, "")
        asked.append(tuned)
        return subprocess.CompletedProcess([], 0, "8e9" if tuned else "5e9")

    monkeypatch.setattr(subprocess, "run", run)
    assert probe_tuning().ratio == pytest.approx(1.6)
    assert asked == [False, True, True, False]


@pytest.mark.parametrize(
    "broken", [OSError("no such file"), subprocess.TimeoutExpired("x", 1.0), "no number"]
)
def test_a_probe_that_fails_says_so(
    broken: Exception | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(broken, Exception):
            raise broken
        return subprocess.CompletedProcess([], 0, broken)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DeviceError, match="could not be measured"):
        probe_tuning()


def test_a_process_of_the_probe_prints_a_speed() -> None:
    assert tuning._measured({}) > 1e6
    assert copy_speed(1 << 20) > 1e6
