"""What `headrace run` asks of an owner and what it reports, with a stand-in for the owner."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run_command
from headrace.errors import HeadraceError, PeerDied, WouldBlock
from headrace.messages import Ended
from headrace.runtime.config import OwnerConfig
from headrace.runtime.owner_link import OwnerFailed
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import RouteResult
from headrace.runtime.supervisor import RestartPolicy
from headrace.telemetry.recording import read

RUN = ["run", "--source", "replay", "--decoder", "module:own", "--prompt", "abc"]
ANSWER = b"one ## two"


class StandIn:
    """Answers every request with ANSWER's bytes, and goes on for a while after a withdrawal."""

    asked: list[RequestOptions]
    config: OwnerConfig
    interpreter: str | None
    failure: Exception | None = None
    ended: Ended | None = None

    def __init__(self, config: OwnerConfig, *, interpreter: str | None = None) -> None:
        StandIn.asked = []
        StandIn.config = config
        StandIn.interpreter = interpreter

    def start(self) -> None:
        if self.failure is not None:
            raise self.failure

    def submit(self, tokens: list[int], options: RequestOptions) -> int:
        self.asked.append(options)
        return len(self.asked) - 1

    def result(self, label: int, on_token: Callable[[int], bool] | None = None) -> RouteResult:
        if self.ended is not None:
            return RouteResult([], self.ended)
        told, withdrawn = [], False
        for token in ANSWER[: self.asked[label].max_tokens]:
            told.append(token)
            if on_token is not None and on_token(token):
                withdrawn = True
                break
        outcome = "cancelled" if withdrawn else "finished"
        rows = "rows" if self.asked[label].audit and told else ""
        return RouteResult(told, Ended(label, outcome, "", "", None, rows, ("kv",), "", (), None))  # type: ignore[arg-type]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # By import_module: the name `headrace.cli.run` is the command, which hides the module.
    monkeypatch.setattr(import_module("headrace.cli.run"), "OwnerClient", StandIn)
    monkeypatch.setattr(StandIn, "failure", None)
    monkeypatch.setattr(StandIn, "ended", None)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command([*RUN, "--json", *arguments]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_one_drawn_seed_serves_all_routes(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys, "--route", "compare", "--temperature", "0.9")
    assert len(StandIn.asked) == 4  # the warm-up too
    assert {options.sampling.seed for options in StandIn.asked} == {told["seed"]}
    assert told["seed"] >= 0


@pytest.mark.parametrize(
    ("given", "seed"), [(["--temperature", "1", "--seed", "7"], 7), ([], None)]
)
def test_a_seed_is_drawn_only_where_it_is_missed(
    given: list[str], seed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, *given)["seed"] == seed


def test_compare_decodes_past_a_stop_string_and_shows_nothing_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = report(capsys, "--route", "compare", "--stop", "##")
    assert told["identical"] is True
    assert (told["text"], told["finish_reason"], told["outcome"]) == ("one ", "stop", "finished")
    assert told["tokens"] == list(b"one ##")
    assert {route["text"] for route in told["routes"].values()} == {"one "}


def test_an_end_at_a_stop_string_is_a_finish(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys, "--stop", "##")
    assert (told["text"], told["finish_reason"], told["outcome"]) == ("one ", "stop", "finished")
    assert report(capsys)["finish_reason"] == "length"


def test_no_tokens_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys, "--max-tokens", "0", "--route", "compare")
    assert (told["tokens"], told["text"], told["identical"]) == ([], "", True)
    assert run_command([*RUN, "--max-tokens", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_text_alone_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*RUN, "--stop", "##"]) == 0
    assert capsys.readouterr().out == "one \n"


def test_a_dash_may_be_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["run", "--source", "replay", "--decoder", "module:own", "--json"]
    assert run_command([*rest, "--prompt", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 1


@pytest.mark.parametrize("script", ["exit 0", "exit 3", "echo hello"])
def test_a_source_python_that_is_none(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(StandIn, "failure", OwnerFailed("source replay died"))
    assert run_command([*RUN, "--source-python", str(python)]) == 2
    assert "is not a Python that has headrace installed" in capsys.readouterr().err
    assert run_command([*RUN, "--source-python", str(tmp_path / "absent")]) == 2


def test_a_source_that_died_in_a_python_of_ours_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "failure", OwnerFailed("source replay died"))
    for given in (["--source-python", sys.executable], []):
        assert run_command([*RUN, *given]) == 1
        assert capsys.readouterr().err == "headrace: source replay died\n"


def test_the_owner_runs_in_the_decoders_environment(capsys: pytest.CaptureFixture[str]) -> None:
    report(capsys)
    assert StandIn.interpreter is None
    report(capsys, "--decoder-python", "/a/python", "--decoder-options", '{"speed": 3}')
    assert StandIn.interpreter == "/a/python"
    assert StandIn.config.decoder_options["speed"] == 3
    assert StandIn.config.sources[0].python is None  # it is the router's: see OwnerClient


def test_choosing_tokens_without_numpy_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(import_module("sys").modules, "headrace.engine.sampling", None)
    assert run_command(RUN) == 2
    assert "give --max-tokens 0" in capsys.readouterr().err
    assert run_command([*RUN, "--max-tokens", "0"]) == 0


def test_what_is_asked_when_a_source_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report(capsys)
    asked, config = StandIn.asked[0], StandIn.config
    assert (asked.on_failure, asked.max_attempts, asked.poison) == ("fail", 3, False)
    assert asked.deadline_s is None
    assert (config.restart, config.local, config.control) == (None, False, None)
    assert (config.progress_timeout_s, config.drain_timeout_s) == (600.0, 120.0)
    times = ["--deadline", "2.5", "--progress-timeout", "7", "--drain-timeout", "0.5"]
    given = ["--on-failure", "retry", "--max-attempts", "4", "--poison", "--digest", *times]
    report(capsys, *given, "--control", "here/control")
    asked, config = StandIn.asked[0], StandIn.config
    assert (asked.on_failure, asked.max_attempts) == ("retry", 4)
    assert (asked.poison, asked.digest, asked.deadline_s) == (True, True, 2.5)
    assert (config.restart, config.local) == (RestartPolicy(), False)
    assert (config.progress_timeout_s, config.drain_timeout_s) == (7.0, 0.5)
    assert config.control == str(Path("here/control").absolute())
    report(capsys, "--on-failure", "local")
    assert (StandIn.config.restart, StandIn.config.local) == (None, True)


def test_a_decode_batch_is_the_decoders_and_left_out_in_the_exact_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(capsys)
    assert "decode_batch" not in StandIn.config.decoder_options
    report(capsys, "--decode-batch", "1", "--route", "compare")
    assert "decode_batch" not in StandIn.config.decoder_options
    report(capsys, "--decode-batch", "4", "--route", "streamed")
    assert StandIn.config.decoder_options["decode_batch"] == 4
    given = ["run", "--source", "replay", "--decoder", "null", "--prompt", "abc", "--max-tokens=0"]
    assert run_command([*given, "--decode-batch", "2"]) == 2
    assert "null does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--decode-batch", "0"], "--decode-batch is 0"),
        (["--decode-batch", "2", "--route", "compare"], "leave --decode-batch out"),
        (["--on-failure", "hope"], "hope"),
        (["--max-attempts", "2"], "--max-attempts is for --on-failure retry, and it is fail"),
        (["--on-failure", "local", "--max-attempts", "2"], "and it is local; leave one out"),
        (["--on-failure", "retry", "--max-attempts", "0"], "--max-attempts is 0"),
        (["--on-failure", "retry", "--max-attempts", "17"], "it must be at most 16"),
        (["--deadline", "0"], "--deadline is 0; it must be above 0"),
        (["--deadline", "nan"], "--deadline is nan"),
        (["--deadline", "inf"], "--deadline is inf"),
        (["--deadline", "soon"], "soon"),
        (["--progress-timeout", "-1"], "--progress-timeout is -1"),
        (["--drain-timeout", "1e10"], "--drain-timeout is 1e+10"),
    ],
)
def test_a_wrong_value_gets_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*RUN, *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("cause", "attempts", "sentence"),
    [
        ("", (), "the whole route failed: why"),
        ("stalled", (), "the whole route failed (stalled): why"),
        (
            "no-source",
            ("it died", "it died again"),
            "the whole route failed (no-source): why; attempt 1: it died; attempt 2: it died again",
        ),
    ],
)
def test_a_failure_names_its_cause_and_all_attempts(
    cause: str,
    attempts: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = Ended(0, "failed", "why", "", None, "", (), cause, attempts, None)
    monkeypatch.setattr(StandIn, "ended", ended)
    assert run_command(RUN) == 1
    assert capsys.readouterr().err == f"headrace: {sentence}\n"


@pytest.mark.parametrize(
    ("error", "status", "kept"),
    [
        (None, 1, ["whole", "chunked"]),
        (PeerDied("the owner process died"), 1, ["whole"]),
        (KeyboardInterrupt(), 130, ["whole"]),
    ],
    ids=["failed", "owner died", "interrupted"],
)
def test_a_trace_keeps_the_routes_that_were_over_before_one_failed(
    error: BaseException | None,
    status: int,
    kept: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warm-up, the whole route, then the chunked one, which does not finish."""
    answers = StandIn.result

    def result(self: StandIn, label: int, *rest: Any, **more: Any) -> RouteResult:
        if label < 2:
            return answers(self, label, *rest)
        if error is not None:
            raise error
        ended = Ended(label, "failed", "why", "", None, "", (), "stalled", (), None)
        return RouteResult([], ended)

    def withdraw(self: StandIn, label: int) -> None:
        raise WouldBlock("full")

    monkeypatch.setattr(StandIn, "result", result)
    monkeypatch.setattr(StandIn, "withdraw", withdraw, raising=False)
    path = tmp_path / "trace.json"
    assert run_command([*RUN, "--route", "compare", "--trace", str(path)]) == status
    assert [run.name for run in read(path).runs] == kept


def test_no_trace_is_written_where_nothing_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "failure", OwnerFailed("source replay died"))
    path = tmp_path / "trace.json"
    assert run_command([*RUN, "--trace", str(path)]) == 1
    assert not path.exists()


def test_attempts_that_failed_before_it_finished_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended(0, "finished", "", "", None, "", (), "", ("[it] died",), None)
    monkeypatch.setattr(StandIn, "ended", ended)
    assert run_command(RUN) == 0
    assert "attempt 1 failed: [it] died" in capsys.readouterr().err
    told = report(capsys)
    assert (told["failed_attempts"], told["cause"]) == (["[it] died"], "")


@pytest.mark.parametrize("when", ["withdraw", "result"])
@pytest.mark.parametrize("error", [WouldBlock("full"), PeerDied("gone"), OwnerFailed("hangs")])
def test_an_interrupt_stays_one_whatever_comes_of_the_withdrawal(
    monkeypatch: pytest.MonkeyPatch, when: str, error: HeadraceError
) -> None:
    withdrawn: list[int] = []

    def result(*_: object, within_s: float | None = None) -> None:
        if within_s is None:
            raise KeyboardInterrupt
        raise error

    def withdraw(self: StandIn, label: int) -> None:
        withdrawn.append(label)
        if when == "withdraw":
            raise error

    monkeypatch.setattr(StandIn, "result", result)
    monkeypatch.setattr(StandIn, "withdraw", withdraw, raising=False)
    assert run_command(RUN) == 130
    assert withdrawn == [0]
