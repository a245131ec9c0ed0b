"""The device check on a real GPU: what must be true there, and that every step is done.

It takes minutes of the GPU, so it is asked for: HEADRACE_TEST_GPU=1. Nothing is judged by speed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.device.__main__ import main
from headrace.bench.device.plan import STEPS
from headrace.bench.device.summary import read_summary
from headrace.bench.rows import read_rows

VARIABLE = "HEADRACE_TEST_GPU"


def why_not() -> str:
    """Why these tests cannot be run here; empty if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if os.environ.get(VARIABLE) != "1":
        return f"they take minutes of a GPU; ask for them with {VARIABLE}=1"
    return ""


pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one run of all steps."""
    made = tmp_path_factory.mktemp("device") / "out"
    assert main([str(made)]) in (0, 1)
    return made


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    return read_summary(folder)


@pytest.mark.parametrize("step", [step.name for step in STEPS])
def test_every_step_is_done(summary: dict[str, Any], step: str) -> None:
    (found,) = [each for each in summary["steps"] if each["step"] == step]
    assert found["state"] == "done", found["note"]


def test_what_must_be_true_is_true(summary: dict[str, Any]) -> None:
    must = [each for each in summary["goals"] if each["must"]]
    assert len(must) == 3
    assert [each for each in must if each["word"] != "met"] == []
    assert summary["holds"]


def test_every_row_is_of_a_real_device(folder: Path) -> None:
    assert json.loads((folder / "summary.json").read_text())["device"] == "real"
    rows = [row for path in folder.glob("*.jsonl") for row in read_rows(path)]
    assert {row["device"] for row in rows} == {"real"}


def test_devices_tell_when_they_computed_and_copied(folder: Path) -> None:
    """Whether they overlapped is told by the summary; here only that both were read."""
    streamed = [row for row in read_rows(folder / "trace.jsonl") if row["route"] == "streamed"]
    assert {(row["source_clock"], row["owner_clock"]) for row in streamed} == {("device", "device")}
