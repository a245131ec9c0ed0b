"""`bench ttft` at smoke size: rows by every route, going on with them, goals on made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import ttft
from headrace.bench.families import make_model, prefill_s, random_prompt
from headrace.bench.plots import draw
from headrace.bench.rows import RowFile
from headrace.bench.stand import RequestFailed, finished
from headrace.bench.ttft_points import (
    Point,
    Subject,
    cuts_of,
    order_of,
    points_of,
    seconds_of,
    subject_of,
    subjects,
    within,
)
from headrace.bench.ttft_table import figures, points
from headrace.cli import run_command
from headrace.engine.loading import load_config
from headrace.errors import Refused
from headrace.geometry import Full, Sliding
from headrace.ids import RequestId
from headrace.runtime.requests import Request, RequestOptions
from tests.e2e.families import directory_of


def tiny(family: str = "gemma3") -> Subject:
    return subject_of(family, directory_of(family))


# What is measured.


@pytest.mark.parametrize(("name", "window"), [("qwen3", 0), ("exaone4", 32)])
def test_a_family_has_the_real_kv_geometry_per_layer(
    name: str, window: int, tmp_path: Path
) -> None:
    directory = make_model(name, tmp_path / name, layers=4, window=32)
    again = make_model(name, tmp_path / "again", layers=4, window=32)
    subject = subject_of(name, directory)
    assert subject.family == name
    for layer in subject.layers:
        assert [(p.heads, p.head_dim, p.dtype) for p in layer.parts] == [(8, 128, "float32")] * 2
    kinds = [layer.kind for layer in subject.layers]
    assert [isinstance(kind, Sliding) for kind in kinds] == [bool(window)] * 3 + [False]
    assert isinstance(kinds[3], Full)
    assert subject.kv_nbytes(64) == 2 * 8 * 128 * 4 * (64 + 3 * ((window - 1) if window else 64))
    assert load_config(directory).num_hidden_layers == 4
    weights = [(path / "model.safetensors").read_bytes() for path in (directory, again)]
    assert weights[0] == weights[1]
    assert 0 < prefill_s(directory, 64) < prefill_s(directory, 256)


def test_a_family_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no random-weight family 'qwen9'"):
        make_model("qwen9", tmp_path)
    with pytest.raises(Refused, match="at least 4 layers"):
        make_model("exaone4", tmp_path, layers=3)


def test_a_model_that_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    names = ["no-such-model", str(directory_of("llama")), "qwen3"]
    found = subjects(names, tmp_path, layers=1, window=2, say=said.append)
    assert [subject.name for subject in found] == [directory_of("llama").name, "qwen3"]
    assert len(said) == 1
    assert "left out" in said[0]
    with pytest.raises(Refused, match="none of the models"):
        subjects(["no-such-model"], tmp_path, layers=1, window=2, say=said.append)


def test_prompts_are_the_same_for_the_same_length() -> None:
    assert random_prompt(50, 7) == random_prompt(50, 7)
    assert set(random_prompt(50, 7)) <= set(range(7))


def test_the_cuts_of_a_model() -> None:
    assert list(cuts_of(30, 512)) == ["whole", "chunked", "streamed-1", "streamed-4", "auto"]
    assert list(cuts_of(18, 64)) == ["whole", "streamed-1", "streamed-3", "streamed-4", "auto"]
    assert list(cuts_of(2, 64)) == ["whole", "streamed-1", "streamed-2", "auto"]
    assert cuts_of(30, 512)["chunked"].chunk == 256
    assert cuts_of(30, 512, 128)["chunked"].chunk == 128


def test_the_order_is_reversed_and_begins_with_each() -> None:
    assert [order_of("abc", repeat) for repeat in range(4)] == [
        list("abc"),
        list("cba"),
        list("bca"),
        list("acb"),
    ]
    assert {order_of("abc", repeat)[0] for repeat in range(6)} == set("abc")


def test_points_and_their_links() -> None:
    models = [tiny("gemma3"), tiny("llama")]
    found = points_of(
        models, prompts=(16, 300), links_mb_s=(15.0, 30.0, 60.0), link_prompt=400, prefill_chunk=0
    )
    assert [(p.subject.name, p.num_tokens, p.link_mb_s) for p in found] == [
        ("gemma3", 16, 0),
        ("gemma3", 300, 0),
        ("gemma3", 400, 15),
        ("gemma3", 400, 30),
        ("gemma3", 400, 60),
        ("llama", 16, 0),
        ("llama", 300, 0),
        ("llama", 256, 30),
    ]
    chunked = points_of(models, prompts=(16, 300), prefill_chunk=100)
    assert [(p.num_tokens, p.prefill_chunk) for p in chunked] == [(300, 100), (300, 100)]


def test_repeats_fill_the_time_that_there_is() -> None:
    wanted = points_of([tiny()], prompts=(16, 300), links_mb_s=(1.0,), link_prompt=300)
    least = within(wanted, 0)
    assert [point.repeats for point in least] == [5, 2, 2]
    more = within(wanted, seconds_of(least) + 5)
    assert sum(point.repeats for point in more) > 9
    assert seconds_of(more) <= seconds_of(least) + 5
    assert [point.repeats for point in within(wanted, 1e6)] == [10, 10, 10]
    assert [point.repeats for point in within(wanted, 0, 3)] == [3, 3, 3]
    assert wanted[2].repeat_s() > wanted[1].repeat_s()  # the link is counted


def test_a_prompt_that_is_too_long_is_refused() -> None:
    ttft.check_points([Point(tiny(), 496)])
    with pytest.raises(Refused, match="gemma3 holds 512 positions"):
        ttft.check_points([Point(tiny(), 497)])


# Rows.


@pytest.mark.usefixtures("nothing_left")
def test_rows_of_every_route_alone_and_over_a_link(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    wanted = [Point(tiny(), 40, repeats=2), Point(tiny(), 40, link_mb_s=5.0, repeats=1)]
    out = tmp_path / "ttft.jsonl"
    try:
        rows = list(ttft.run(wanted, RowFile(out, ttft.CLAIM, ttft.KEY)))
    finally:
        torch.set_num_threads(threads)
    labels = list(wanted[0].cuts)
    assert [row["label"] for row in rows] == [*labels, *labels[::-1], *labels]
    assert [row["order"] for row in rows] == [0, 1, 2, 3] * 3
    for row in rows:
        assert 0 < row["tail_ns"] < row["ttft_ns"]
        assert 0 < row["prefill_ns"] < row["ttft_ns"]
        assert row["nbytes_before_final"] <= row["kv_nbytes"]
        assert row["import_ns"] > 0
        assert row["source_cpu_ns"] > 0
        assert row["family"] == "gemma3_text"
        assert (row["pairing"]["threads"], row["pairing"]["dtype"]) == (1, "float32")
        assert (row["choice"] is not None) == (row["label"] == "auto")
        if row["label"] == "whole":
            assert (row["groups"], row["nbytes_before_final"]) == (1, 0)
    auto = next(row for row in rows if row["label"] == "auto")
    assert set(auto["choice"]) == {"route", "group_layers", "chunk", "reason"}
    assert auto["choice"]["reason"]
    over_link = [row for row in rows if row["link_mb_s"] and row["label"] == "whole"]
    assert over_link[0]["tail_ns"] >= over_link[0]["kv_nbytes"] / 5e6 * 1e9

    again = RowFile(out, ttft.CLAIM, ttft.KEY, resume=True)
    assert list(ttft.run(wanted, again)) == []  # nothing is missing, and nothing was started
    assert again.rows == json.loads(json.dumps(rows))


def test_a_run_that_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "ttft.jsonl"
    file = RowFile(out, ttft.CLAIM, ttft.KEY)
    point = Point(tiny(), 40)
    done = {"model": "gemma3", "prompt_tokens": 40, "link_mb_s": 0.0, "prefill_chunk": 0}
    for label in ("whole", "auto"):
        file.append({**done, "label": label, "repeat": 0})
    left = list(ttft._missing(point, file))
    assert [(repeat, label) for repeat, _, label in left] == [
        (0, "streamed-1"),
        (0, "streamed-4"),
        (1, "auto"),
        (1, "streamed-4"),
        (1, "streamed-1"),
        (1, "whole"),
    ]


def test_a_request_that_did_not_finish_is_no_row() -> None:
    request = Request(RequestId(1, 1), 4, RequestOptions())
    with pytest.raises(RequestFailed, match="is not done"):
        finished(request)
    request.outcome, request.reason = "failed", "its source died"
    with pytest.raises(RequestFailed, match="failed: its source died"):
        finished(request)
    with pytest.raises(RequestFailed, match="its source died"):
        ttft.measured_of(request)


# Goals, on invented rows.


def row(label: str, repeat: int, **facts: Any) -> dict[str, Any]:
    """A row of a transfer of 100 ms and 10 layers behind a prefill of a second."""
    tail_ms = facts.pop("tail_ms", 100)
    prefill_ms = facts.pop("prefill_ms", 1000)
    return {
        "model": "m",
        "prompt_tokens": 64,
        "link_mb_s": 0.0,
        "prefill_chunk": 0,
        "label": label,
        "repeat": repeat,
        "groups": 1 if label == "whole" else 10,
        "prefill_ns": prefill_ms * 10**6,
        "tail_ns": int(tail_ms * 10**6),
        "ttft_ns": int((prefill_ms + tail_ms) * 10**6),
        "source_cpu_ns": 10**9,
        "kv_nbytes": 1000,
        "nbytes_before_final": 0 if label == "whole" else 950,
        "last_group_nbytes": 1000 if label == "whole" else 100,
        "choice": None,
    } | facts


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {figure.name: figure.met for figure in figures(rows)}


def test_hidden_share_met_and_missed() -> None:
    name = "hidden share, m, 64 tokens, streamed-1"
    good = [row("whole", 0), row("streamed-1", 0, tail_ms=14)]  # 0.86, and 0.95 x 0.9 is wanted
    bad = [row("whole", 0), row("streamed-1", 0, tail_ms=15)]
    assert verdicts(good)[name] is True
    assert verdicts(bad)[name] is False
    few = [row("whole", 0), row("streamed-4", 0, groups=3, tail_ms=50)]
    assert not any("hidden" in figure for figure in verdicts(few))


def test_a_share_is_told_only_where_something_can_be_hidden() -> None:
    longer = [row("whole", 0, prefill_ms=90), row("streamed-1", 0, prefill_ms=90, tail_ms=10)]
    (point,) = points(longer)
    assert point.hidden("streamed-1") is None
    (point,) = points([row("whole", 0, tail_ms=0.4), row("streamed-1", 0, tail_ms=0.1)])
    assert point.hidden("streamed-1") is None
    (point,) = points([row("streamed-1", 0)])
    assert point.hidden("streamed-1") is None
    (point,) = points([row("whole", 0), row("streamed-1", 0, tail_ms=20)])
    assert point.hidden("streamed-1") == pytest.approx(0.8)


def test_auto_is_held_against_whole_and_the_best_fixed_route() -> None:
    fixed = [row("whole", 0), row("streamed-1", 0, tail_ms=10)]
    choice = {"route": "streamed", "group_layers": 1, "chunk": 0, "reason": "so"}
    met = verdicts([*fixed, row("auto", 0, tail_ms=20, choice=choice)])
    assert met["TTFT, m, 64 tokens, auto to whole"] is True
    assert met["TTFT, m, 64 tokens, auto to streamed-1, the best fixed"] is True
    missed = verdicts([*fixed, row("auto", 0, tail_ms=40)])
    assert missed["TTFT, m, 64 tokens, auto to whole"] is True
    assert missed["TTFT, m, 64 tokens, auto to streamed-1, the best fixed"] is False
    worse = verdicts([row("whole", 0), row("auto", 0, tail_ms=130)])
    assert worse == {"TTFT, m, 64 tokens, auto to whole, the best fixed": False}
    (point,) = points([*fixed, row("auto", 0, choice=choice)])
    assert [line.note for line in point.lines()] == ["", "", "1 x streamed-1"]
    assert [line.early for line in point.lines()] == [0, 0.95, 0.95]


def test_the_prefill_slow_down_is_paired_and_pooled() -> None:
    def pooled(*slower: float) -> bool | None:
        rows = []
        for repeat, factor in enumerate(slower):
            rows += [
                row("whole", repeat, prompt_tokens=64 << repeat),
                row(
                    "streamed-1",
                    repeat,
                    prompt_tokens=64 << repeat,
                    prefill_ms=round(1000 * factor),
                ),
            ]
        return verdicts(rows)["prefill, m, streamed-1 to whole, no link"]

    assert pooled(1.009, 1.2, 0.9) is True
    assert pooled(1.011, 1.2, 0.9) is False


def test_what_is_stated_has_no_goal() -> None:
    rows = [row("whole", 0), row("streamed-1", 0), row("whole", 1, tail_ms=155)]
    stated = {figure.name: figure.result for figure in figures(rows) if figure.met is None}
    assert stated["CPU time of the source, m, streamed-1 to whole, no link"].startswith("1.0000")
    assert stated["TTFT, m, whole to itself a repeat later, difference"].startswith("0.0500")
    assert list(figures([])) == []


# The command.

TINY = ["--models", str(directory_of("llama"))]


def test_the_command_measures_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ttft.jsonl"
    small = [*TINY, "--prompts", "24", "--empty-links-mb-s", "--out", str(out)]
    threads = torch.get_num_threads()
    try:
        assert run_command(["bench", "ttft", *small, "--repeats", "1"]) == 0
        assert run_command(["bench", "ttft", *small, "--repeats", "1", "--resume"]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "1 points, about" in said
    assert "goals met" in said
    assert len(out.read_text().splitlines()) == 1 + 4


def test_the_rows_are_drawn(tmp_path: Path) -> None:
    out = tmp_path / "ttft.jsonl"
    file = RowFile(out, ttft.CLAIM, ttft.KEY)
    for prompt_tokens, link in ((64, 0.0), (128, 0.0), (64, 15.0)):
        for label in ("whole", "streamed-1", "auto"):
            file.append(row(label, 0, prompt_tokens=prompt_tokens, link_mb_s=link))
    draw(out, tmp_path / "ttft.svg")
    drawn = (tmp_path / "ttft.svg").read_text()
    for text in ("m, emulated links: transfer tail, ms", "streamed-1", "TTFT, to whole"):
        assert text in drawn


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--empty-prompts", "--empty-links-mb-s"], "are both empty"),
        (["--prompts", "0"], "--prompts is 0"),
        (["--links-mb-s", "0"], "--links-mb-s is 0"),
        (["--links-mb-s", "nan"], "--links-mb-s is nan"),
        (["--link-prompt", "0"], "--link-prompt is 0"),
        (["--prefill-chunk", "-1"], "--prefill-chunk is -1"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--window", "1"], "--window is 1"),
        (["--layers", "0"], "--layers is 0"),
        (["--out", "/tmp"], "/tmp is a directory"),
        (["--models", "no-such-model"], "none of the models"),
        (
            [*TINY, "--prompts", "24", "--empty-links-mb-s", "--prefill-chunk", "24"],
            "no prompt is longer",
        ),
        ([*TINY, "--prompts", "600"], "holds 512 positions"),
        (
            [*TINY, "--prompts", "8", "--empty-links-mb-s", "--resume"],
            "--resume goes on with the rows of --out",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ttft, "run", None)
    assert run_command(["bench", "ttft", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
