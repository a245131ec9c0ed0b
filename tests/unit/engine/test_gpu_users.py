"""Who uses a GPU, by what nvidia-smi answers."""

from __future__ import annotations

import importlib
import os
import subprocess
from typing import Any

import pytest

from headrace.engine.gpu_users import of_smi, smi
from headrace.errors import Refused
from headrace.testing.pair.occupants import Role, device_use, occupants

HERE = "GPU-1"


@pytest.mark.parametrize(
    ("processes", "memory", "told"),
    [
        ([], [], []),
        ([], [[HERE, "600"]], []),
        ([[HERE, str(os.getpid()), "me", "500"]], [[HERE, "600"]], []),
        ([["GPU-2", "99999999", "x", "9000"]], [["GPU-2", "9000"], [HERE, "3"]], []),
        (
            [[HERE, "99999999", "x", "9000"]],
            [[HERE, "9000"]],
            ["process 99999999 (x) uses 9000 MiB of it"],
        ),
        ([], [[HERE, "9000"]], ["9000 MiB of it are in use, by whom nvidia-smi does not tell"]),
        ([["not supported"]], [[HERE, "[N/A]"]], []),
    ],
)
def test_who_uses_a_device(processes: Any, memory: Any, told: list[str]) -> None:
    assert of_smi(processes, memory, HERE) == told


def test_an_owner_and_its_sources_are_no_others_to_each_other() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        ours = [[HERE, str(pid), "us", "9000"] for pid in (os.getpid(), os.getppid(), child.pid)]
        assert of_smi(ours, [[HERE, "30000"]], HERE) == []
        assert len(of_smi([*ours, [HERE, "99999999", "x", "5"]], [], HERE)) == 1
    finally:
        child.kill()
        child.wait()


def test_without_nvidia_smi_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert smi("--query-gpu=uuid") == []


@pytest.mark.parametrize("module", ["cuda", "cuda_source"])
def test_both_backends_tell_who_uses_the_gpu_that_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    backend = importlib.import_module(f"headrace.backends.{module}")
    monkeypatch.setattr(backend, "users", lambda index: [f"somebody uses {index}"])
    options = {"model": "somewhere", "device": 1}
    role: Role = "decoder" if module == "cuda" else "source"
    assert occupants(role, "cuda", options) == ["somebody uses 1"]
    with pytest.raises(Refused, match="somebody uses 1"):
        device_use(role, "cuda", options, share=False)
    assert "shared: somebody uses 1" in device_use(role, "cuda", options, share=True)
