"""A load's timeline is one file, which `headrace trace` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.ids import RequestId
from headrace.messages import RouteChoice
from headrace.runtime.requests import Request, RequestOptions
from headrace.telemetry.recording import prompt_digest, read
from headrace.vllm.scheduling import Load
from headrace.vllm.traces import Traces
from tests.unit.vllm.test_stats import measured


def load(request_id: str = "chatcmpl-1", **more: Any) -> Load:
    given: dict[str, Any] = {"tokens": (1, 2, 3, 4), "start": 0, "block_ids": ((1,),)}
    return Load(request_id, **{**given, "route": "auto", **more})


def ended(outcome: str = "finished", **more: Any) -> Request:
    request = Request(RequestId(1, 1), 4, RequestOptions(max_tokens=0))
    request.outcome, request.measured = outcome, measured()
    for name, value in more.items():
        setattr(request, name, value)
    return request


def test_none_are_written_unless_asked(tmp_path: Path) -> None:
    Traces(None).write(load(), ended())
    assert not list(tmp_path.iterdir())


def test_a_file_tells_what_the_request_came_to(tmp_path: Path) -> None:
    Traces(str(tmp_path)).write(load(), ended())
    recording = read(tmp_path / "chatcmpl-1.json")
    (run,) = recording.runs
    assert (run.name, run.route, run.outcome, run.num_tokens) == (
        "chatcmpl-1",
        "auto",
        "finished",
        4,
    )
    assert run.prompt == prompt_digest((1, 2, 3, 4))
    assert run.measured == measured()
    assert recording.stamp["pair"] == "vllm connector"
    assert "headrace" in recording.stamp


def test_what_was_chosen_is_what_it_ran_as(tmp_path: Path) -> None:
    choice = RouteChoice("streamed", 2, 64, "it is the fastest")
    Traces(str(tmp_path)).write(load(), ended(choice=choice))
    (run,) = read(tmp_path / "chatcmpl-1.json").runs
    assert (run.route, run.choice) == ("streamed", "it is the fastest")


def test_a_failure_is_kept_with_its_reason(tmp_path: Path) -> None:
    failed = ended("failed", reason="source replay died", measured=None)
    Traces(str(tmp_path)).write(load(), failed)
    (run,) = read(tmp_path / "chatcmpl-1.json").runs
    assert (run.outcome, run.reason, run.measured) == ("failed", "source replay died", None)


def test_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    inside = tmp_path / "traces"
    inside.mkdir()
    Traces(str(inside)).write(load("../../a b/" + "x" * 300), ended())
    (file,) = inside.iterdir()
    assert file.name.startswith(".._.._a_b_xxx")
    assert len(file.name) == 205
    assert list(tmp_path.iterdir()) == [inside]


def test_what_hinders_it_is_told_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Traces(str(tmp_path / "gone")).write(load(), ended())
    assert "the timeline of chatcmpl-1 is not kept" in caplog.text
    assert os.listdir(tmp_path) == []
