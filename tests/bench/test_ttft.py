"""`bench ttft` at smoke size: what is measured, rows by every route, going on with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import ttft
from headrace.bench.families import make_model, prefill_s, random_prompt
from headrace.bench.plots import draw
from headrace.bench.rows import RowFile
from headrace.bench.stand import RequestFailed, Stand, finished
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
from headrace.bench.ttft_table import points
from headrace.cli import run_command
from headrace.engine.loading import load_config
from headrace.errors import Refused
from headrace.geometry import Full, Sliding
from headrace.ids import RequestId
from headrace.runtime.requests import Request, RequestOptions
from tests.bench.test_ttft_table import row as invented
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
@pytest.mark.full_matrix
def test_rows_of_every_route_alone_and_over_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: dict[Stand, list[tuple[str, int]]] = {}
    serve = Stand.serve

    def noted(stand: Stand, tokens: Sequence[int], options: RequestOptions) -> Request:
        served.setdefault(stand, []).append((options.route, len(tokens)))
        return serve(stand, tokens, options)

    monkeypatch.setattr(Stand, "serve", noted)
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
    assert "no prefill measured yet" in auto["choice"]["reason"]
    few = ("whole", ttft.AUTO_WARM_UP_TOKENS)
    assert [few, ("auto", 40), ("auto", 40)] in served.values()  # and nothing else by its owner
    assert [row["nth"] for row in rows if row["label"] == "auto"] == [1, 2, 1]
    assert {row["nth"] for row in rows if row["label"] != "auto"} == {0}
    over_link = [row for row in rows if row["link_mb_s"] and row["label"] == "whole"]
    assert over_link[0]["tail_ns"] >= over_link[0]["kv_nbytes"] / 5e6 * 1e9

    again = RowFile(out, ttft.CLAIM, ttft.KEY, resume=True)
    assert list(ttft.run(wanted, again)) == []  # nothing is missing, and nothing was started
    assert again.rows == json.loads(json.dumps(rows))


class FakeStand:
    """Serves nothing; what it was asked for is kept."""

    def __init__(self) -> None:
        self.served: list[str] = []

    def __enter__(self) -> FakeStand:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def serve(self, _: Sequence[int], options: RequestOptions) -> None:
        self.served.append(options.route)


def test_auto_is_left_out_where_its_own_source_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands = [FakeStand()]

    def opened(*_: object) -> FakeStand:
        if not stands:
            raise Refused("no memory for another")
        return stands.pop()

    def measured(_stand: FakeStand, point: Point, label: str) -> dict[str, Any]:
        return invented(label, 0, model=point.subject.name, prompt_tokens=point.num_tokens)

    monkeypatch.setattr(ttft, "_open", opened)
    monkeypatch.setattr(ttft, "_one", measured)
    file = RowFile(None, ttft.CLAIM, ttft.KEY)
    rows = list(ttft.run([Point(tiny(), 24, repeats=1)], file))
    assert [row["label"] for row in rows] == ["whole", "streamed-1", "streamed-4"]
    (skipped,) = (each for each in file.rows if "skipped" in each)
    assert (skipped["label"], skipped["skipped"]) == ("auto", "no memory for another")
    (point,) = points(file.rows)
    assert "auto" not in point.labels
    with pytest.raises(Refused, match="no memory for another"):
        list(ttft.run([Point(tiny(), 24, repeats=1)], RowFile(None, ttft.CLAIM, ttft.KEY)))


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
    other = ["bench", "ttft", *small, "--repeats", "1", "--resume", "--window", "8"]
    assert run_command(other) == 2
    assert "was measured with window 512 and this run has 8" in capsys.readouterr().err


def test_the_rows_are_drawn(tmp_path: Path) -> None:
    out = tmp_path / "ttft.jsonl"
    file = RowFile(out, ttft.CLAIM, ttft.KEY)
    for prompt_tokens, link in ((64, 0.0), (128, 0.0), (64, 15.0)):
        for label in ("whole", "streamed-1", "auto"):
            file.append(invented(label, 0, prompt_tokens=prompt_tokens, link_mb_s=link))
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
