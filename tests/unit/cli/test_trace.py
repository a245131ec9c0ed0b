"""`headrace trace`: a file that `headrace run --trace` wrote is told as text, object and page."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import run_command
from headrace.cli.report import print_comparison, run_of
from headrace.cli.shown import Shown
from headrace.messages import Ended, RouteChoice
from headrace.runtime.router import RouteResult
from headrace.telemetry.chrome import encode
from headrace.telemetry.recording import Recording, Run, prompt_digest, read
from tests.unit.telemetry.scenes import at, cancelled, on, streamed, whole


def write(path: Path, *runs: Run) -> Path:
    path.write_bytes(encode(Recording(runs=runs, stamp={"cpus": 2})))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json", whole(), streamed(), cancelled())


def out_of(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0, width: int = 200
) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        assert run_command(["trace", *map(str, arguments)]) == status
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def test_each_run_is_told_and_drawn(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, file)
    assert text.startswith("whole: 8 prompt tokens, finished\n")
    _, streamed_run, cancelled_run = text.split(": 8 prompt tokens, ")[1:]
    assert (
        "33.3 % of T = 1.200 ms, the imports of the whole route on the same prompt" in streamed_run
    )
    assert "what the tail was made of" in streamed_run
    assert "decode steps of others" in streamed_run
    assert "▲ prefill ended  △ published" in streamed_run
    assert "host clock, two processes" in streamed_run
    assert streamed_run.startswith("finished\n")
    assert cancelled_run.startswith("cancelled\n")
    assert "what the tail was made of" not in cancelled_run
    assert "✕ cancelled  ■ ended" in cancelled_run


@pytest.mark.parametrize("width", [40, 60, 80])
def test_nothing_is_lost_on_a_narrow_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    text = "".join(out_of(capsys, file, width=width).split())
    for word in ("nothingisclaimedaboutkernels", "△published", "0.260ms"):
        assert word in text


def test_only_device_clocks_are_told_as_kernel_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = on("device", streamed(), "compute", "import")
    text = out_of(capsys, write(tmp_path / "device.json", run))
    assert "kernel overlap" in text
    assert "claimed" not in text
    mixed = on("device", streamed(), "compute")
    text = out_of(capsys, write(tmp_path / "mixed.json", mixed))
    assert "kernel overlap" not in text
    assert "nothing is claimed about kernels" in text


def test_markup_in_a_trace_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = streamed(name="[bold]", reason="[red]a reason[/red]")
    text = out_of(capsys, write(tmp_path / "trace.json", run))
    assert text.startswith("[bold] (streamed): ")
    assert "[red]a reason[/red]" in text


def test_json_is_one_object(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(out_of(capsys, file, "--json"))
    assert list(told) == ["stamp", "runs"]
    assert told["stamp"] == {"cpus": 2}
    assert [run["outcome"] for run in told["runs"]] == ["finished", "finished", "cancelled"]
    assert told["runs"][1]["alone_from"] == "whole-route run"


def test_a_page_is_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert f"the page is {page}\n" in out_of(capsys, file, "--html", page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>trace.json</h1>" in text
    assert json.loads(out_of(capsys, file, "--html", page, "--json"))["runs"]


def test_mistakes_get_one_sentence(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for arguments, sentence in (
        ([other], "is not a trace that headrace recorded"),
        ([tmp_path / "none.json"], "cannot be read"),
        ([tmp_path / "none.json", "--html", file], "cannot be read"),
        ([file, "--html", tmp_path], "is a directory"),
        ([file, "--html", file], "would overwrite the trace"),
        ([], "requires an argument"),
    ):
        text = out_of(capsys, *arguments, status=2)
        assert sentence in text
        assert len(text.splitlines()) == 1
    assert read(file).runs


def test_what_a_run_records_is_read_back(tmp_path: Path) -> None:
    run = streamed()
    choice = RouteChoice("streamed", 2, 0, "a long prompt")
    ended = Ended(0, "finished", "", "", run.measured, "", (), "", (), choice)
    result = RouteResult([1], ended, list(run.source), list(run.owner))
    path = tmp_path / "trace.json"
    pair = "rngd (emulated) -> cpu"
    import_module("headrace.cli.run")._write_trace(path, [5, 6], {"auto": result}, pair)
    recording = read(path)
    (kept,) = recording.runs
    assert (kept.name, kept.route, kept.choice) == ("auto", "streamed", "a long prompt")
    assert (kept.num_tokens, kept.prompt) == (2, prompt_digest([5, 6]))
    assert (kept.source, kept.owner, kept.measured) == (run.source, run.owner, run.measured)
    assert recording.stamp["clock"] == "host CLOCK_MONOTONIC"
    assert recording.stamp["pair"] == pair


def test_a_route_that_was_asked_for_needs_no_choice() -> None:
    ended = Ended(0, "cancelled", "by the caller", "", None, "", (), "cancelled", (), None)
    kept = run_of("chunked", [1], RouteResult([], ended, [], [at("cancel", 5)]))
    assert (kept.route, kept.choice, kept.reason) == ("chunked", "", "by the caller")
    assert kept.measured is None


def test_a_comparison_ends_with_the_timeline_of_the_streamed_route(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def result(run: Run, **more: Any) -> RouteResult:
        facts = {"measured": run.measured} | more
        ended = Ended(0, "finished", "", "", facts["measured"], "", ("kv",), "", (), None)
        return RouteResult([], ended, list(run.source), list(run.owner))

    shown = {"streamed": Shown([], "text", "length")}
    console = Console(width=160, highlight=False)
    results = {"whole": result(whole()), "streamed": result(streamed())}
    assert print_comparison(console, [1], shown, results)
    text = capsys.readouterr().out
    assert "▲ prefill ended  △ published" in text
    assert text.rstrip().endswith(
        "host overlap: 0.400 ms of importing while the source worked (host intervals: nothing is "
        "claimed about kernels)"
    )
    results["streamed"] = result(streamed(), measured=None)
    assert print_comparison(console, [1], shown, results)
    assert "▲" not in capsys.readouterr().out
