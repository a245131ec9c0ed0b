"""Who uses a GPU, by what nvidia-smi answers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from headrace.engine.gpu_users import of_smi, smi

HERE = "GPU-1"


@pytest.mark.parametrize(
    ("processes", "memory", "told"),
    [
        ([], [], []),
        ([], [[HERE, "600"]], []),
        ([[HERE, str(os.getpid()), "me", "500"]], [[HERE, "600"]], []),
        ([["GPU-2", "7", "x", "9000"]], [["GPU-2", "9000"], [HERE, "3"]], []),
        ([[HERE, "7", "x", "9000"]], [[HERE, "9000"]], ["process 7 (x) uses 9000 MiB of it"]),
        ([], [[HERE, "9000"]], ["9000 MiB of it are in use, by whom nvidia-smi does not tell"]),
        ([["not supported"]], [[HERE, "[N/A]"]], []),
    ],
)
def test_who_uses_a_device(processes: Any, memory: Any, told: list[str]) -> None:
    assert of_smi(processes, memory, HERE) == told


def test_without_nvidia_smi_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert smi("--query-gpu=uuid") == []
