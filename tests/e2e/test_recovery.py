"""`headrace run` when its source fails: what follows, and what it says in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run_command
from tests.e2e.failing_source import VARIABLE
from tests.e2e.test_cli import PROMPT, REPLAY, headrace, model_in

FAILING = ["--source", "tests.e2e.failing_source:open"]
ASKED = ["--prompt", PROMPT, "--max-tokens", "6", "--ignore-eos", "--json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokens(model: Path) -> Any:
    """What a run without faults gives, on every route."""
    return run(model)[1]["tokens"]


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one letter for each prefill that goes wrong: r raises, k is killed."""
    path = tmp_path / "faults"
    path.touch()
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def run(model: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    done = headrace("run", "--model", str(model), *ASKED, *arguments)
    report = json.loads(done.stdout) if done.stdout else {}
    return done.returncode, report, done.stderr


@pytest.mark.parametrize(
    ("told", "policy", "route"),
    [("kr", "retry", "streamed"), ("r", "local", "whole"), ("k", "local", "streamed")],
)
def test_tokens_are_those_of_a_run_without_faults(
    model: Path, tokens: list[int], faults: Path, told: str, policy: str, route: str
) -> None:
    faults.write_text(told)
    asked = ("--on-failure", policy, "--route", route, "--digest", "--poison")
    status, report, complaint = run(model, *FAILING, *asked)
    assert status == 0, complaint
    assert report["tokens"] == tokens
    assert len(report["failed_attempts"]) == len(told)
    assert report["cause"] == ""


def test_a_failure_is_one_sentence_with_all_that_was_tried(
    model: Path,
    faults: Path,
) -> None:
    faults.write_text("rkr")
    status, report, complaint = run(model, *FAILING, "--on-failure", "retry")
    assert (status, report) == (1, {})
    last = complaint.splitlines()[-1]
    assert last.startswith(
        "headrace: the whole route failed (source-failed): RuntimeError: the card overheated; "
        "attempt 1: RuntimeError: the card overheated; attempt 2: source "
    )
    assert last.endswith("died: signal 9")


def test_attempts_are_bounded(model: Path, faults: Path) -> None:
    faults.write_text("rrr")
    status, _, complaint = run(model, *FAILING, "--on-failure", "retry", "--max-attempts", "2")
    assert status == 1
    assert "attempt 1" in complaint
    assert "attempt 2" not in complaint


def test_a_deadline_is_told_as_such(capfd: pytest.CaptureFixture[str]) -> None:
    slow = ["--source-options", '{"layer_ms": 60000}']
    given = [*REPLAY, "--prompt", "abc", "--max-tokens", "1", "--deadline", "0.3"]
    assert run_command([*given, *slow]) == 1
    complaint = capfd.readouterr().err
    assert complaint == "headrace: the whole route failed (deadline): its deadline passed\n"


def test_a_decoder_that_cannot_prefill_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    given = [*REPLAY, "--prompt", "abc", "--max-tokens", "1", "--on-failure", "local"]
    assert run_command(given) == 2
    complaint = capfd.readouterr().err
    assert "decoder null has no prefill engine of its own" in complaint
    assert complaint.count("\n") == 1
