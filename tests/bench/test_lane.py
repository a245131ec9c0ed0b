"""Two requests back to back at one lane, at smoke size, and what their rows come to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.bench import lane, paced_lane
from headrace.bench.geometries import GEOMETRIES
from headrace.bench.lane import MODES, Alone, Setting, times_of
from headrace.bench.lane_table import figures, lines
from headrace.bench.rows import RowFile, read_rows
from headrace.cli import run_command
from headrace.cli.bench.lane import LaneOptions, _setting, _settings_of
from headrace.errors import Refused
from headrace.ids import RequestId
from headrace.messages import Interval, Measured
from headrace.plan import compile_plan
from headrace.runtime.lanes import Lanes
from headrace.runtime.pairs import ENVIRONMENTS, TAKE_A_MODEL, WITH_A_MODEL
from headrace.runtime.requests import Request, RequestOptions

MS = 10**6
NAME = "paced llama-3.1-8b"
QUICK = ["--prompt", "8", "--prefill-mb-s", "40", "--import-mb-s", "200", "--step-ms", "2"]


def command(out: Path, *more: str) -> list[str]:
    return ["bench", "lane", *QUICK, "--repeats", "1", "--out", str(out), *more]


def test_every_mode_at_every_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lane.jsonl"
    shares = ["--shares", "0.5", "--shares", "2"]
    assert run_command(command(out, *shares)) == 0
    assert "of 2 goals met" in capsys.readouterr().out
    rows = read_rows(out)
    for share in (0.5, 2.0):
        mine = [row["mode"] for row in rows if row["share"] == share]
        assert mine == ["off", "whole", "streamed", "streamed", "whole", "off"]
    for row in rows:
        assert row["setting"] == NAME
        parks = row["mode"] != "off"
        assert bool(row["parked_ns"]) == parks
        assert row["gap_ns"] > 0
        assert row["groups"] == (1 if row["mode"] == "whole" else 32)
        assert row["alone"]["import_ns"] >= row["kv_nbytes"] / 200e6 * 1e9
        if row["share"] == 2.0 and parks:
            assert row["parked_nbytes"] == row["kv_nbytes"]
            assert row["rest_ns"] == 0
            assert row["parked_import_ns"] == row["alone"]["import_ns"]
        if row["share"] == 0.5 and row["mode"] == "streamed":
            assert 0 < row["parked_nbytes"] < row["kv_nbytes"]
            assert row["rest_ns"] > 0
    by_mode = {line.mode: line for line in lines(rows) if line.share == 2.0}
    off, whole, streamed = (by_mode[mode.name].ratio for mode in MODES)
    assert off is not None
    assert whole is not None
    assert streamed is not None
    assert off.median == 1 > max(whole.median, streamed.median)
    before = out.read_text()
    assert run_command(command(out, *shares, "--resume")) == 0
    assert out.read_text() == before, "nothing was missing"


@pytest.mark.usefixtures("nothing_left")
def test_it_is_measured_in_the_decoders_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows are written there, and what stands in their way is told from there in one sentence."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    there = ["--shares", "0.5", "--decoder-python", str(python)]
    assert run_command(command(tmp_path / "rows", *there)) == 0
    assert len(read_rows(tmp_path / "rows")) == 6
    assert "A ends at 0.5, 0.1 off" in capfd.readouterr().out
    nowhere = Path("/proc/nowhere/rows")
    assert run_command(command(nowhere, *there)) in (1, 2)  # 2: one who may not write there at all
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("headrace: ")


def test_a_that_needs_more_tokens_than_its_lane_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(tmp_path / "rows", "--shares", "90", "--most-tokens", "8")) == 2
    assert "raise --most-tokens or ask for less" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--shares", "0", "it must be above 0"),
        ("--shares", "101", "at most 100"),
        ("--import-mb-s", "nan", "--import-mb-s is nan"),
        ("--step-ms", "-1", "it must be above 0"),
        ("--prompt", "0", "must be at least 1"),
        ("--geometry", "x", "unknown geometry 'x'; known are llama-3.1-8b"),
        ("--decoder-options", "[]", "is not a JSON object"),
        ("--source-options", "{", "is not a JSON object"),
        ("--decoder-options", '{"steps": 1}', "unknown field `steps`"),
        ("--decoder", "x", "unknown decoder 'x'"),
        ("--source", "x", "unknown source 'x'"),
        ("--compiled", "x", "--compiled is for --decoder atom"),
        ("--source-python", "/no/python", "give --source-python the path"),
        ("--emulate", "", "--emulate is for --source rngd, and it is paced"),
    ],
)
def test_misuse_is_refused(
    flag: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "lane", *filter(None, (flag, value))]) == 2
    assert sentence in capsys.readouterr().err


def open_two_lanes(options: Mapping[str, Any]) -> NullDecoder:
    """A decoder that the bench cannot use; `factory` names it."""
    manifest = decoder_like(open_replay({}).manifest())
    return NullDecoder(manifest, context=64, lanes=options["lanes"])


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_decoder_without_one_lane_that_decodes_is_refused(num_lanes: int) -> None:
    setting = Setting(
        "x", f"{__name__}:open_two_lanes", "paced", 8, decoder_options={"lanes": num_lanes}
    )
    with pytest.raises(Refused, match=f"has {num_lanes} lanes and decodes: False"):
        next(lane.run(setting, RowFile(None, lane.CLAIM, lane.KEY)))


def test_a_factory_and_its_options_pass_through() -> None:
    made = _setting(LaneOptions(decoder="vendor.decoder:open", source="replay"))
    assert (made.decoder, made.source) == ("vendor.decoder:open", "replay")
    assert made.decoder_options == made.source_options == {}
    assert made.name == "replay -> vendor.decoder:open"
    own = _setting(LaneOptions(prompt=60, most_tokens=4, import_mb_s=500.0, step_ms=1.0))
    assert (own.decoder, own.source, own.name) == (paced_lane.FACTORY, "paced", NAME)
    pace = {"mb_per_s": 500.0, "step_ms": 1.0}
    assert own.decoder_options == {"geometry": "llama-3.1-8b", "context": 64, **pace}


PLACE = "/a/place/of/this/machine"


@pytest.fixture
def _resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is in one place, and the environments of rngd and vllm are this one."""
    monkeypatch.setattr("headrace.engine.models.resolve", lambda name: Path(f"{PLACE}/found"))
    for recipe in ENVIRONMENTS.values():
        monkeypatch.setenv(recipe.variable, sys.executable)


@pytest.mark.usefixtures("_resolved")
@pytest.mark.parametrize("decoder", ["paced", "module:open", *WITH_A_MODEL])
@pytest.mark.parametrize("source", [None, "replay", "module:open", *TAKE_A_MODEL])
def test_each_side_that_takes_a_model_gets_it(decoder: str, source: str | None) -> None:
    """In the dtype in which the source computes."""
    made = _setting(LaneOptions(decoder=decoder, source=source))
    dtype = "bfloat16" if source == "rngd" else "float32"
    model = {"model": f"{PLACE}/found", "dtype": dtype, "threads": 1}
    takes = made.source in TAKE_A_MODEL
    assert made.source_options == (model if takes else {})
    if decoder != "paced":
        assert made.decoder_options == (model if decoder in WITH_A_MODEL else {})
        assert ("smollm2-135m" in made.name) == (takes or decoder in WITH_A_MODEL)
    assert made.source_python == (sys.executable if source in ENVIRONMENTS else None)


@pytest.mark.usefixtures("_resolved")
def test_what_stands_in_for_a_device_is_in_the_name() -> None:
    fake = {"sdk": "headrace.testing.fake_rebellions:open"}
    options = LaneOptions(
        decoder="atom",
        source="rngd",
        model=f"{PLACE}/gemma3/",
        emulate=True,
        decoder_options=json.dumps(fake),
    )
    made = _setting(options)
    assert made.name == "rngd (emulated) -> atom (fake) gemma3"
    assert made.source_options["emulate"] is True
    assert made.decoder_options["sdk"] == fake["sdk"]
    assert _setting(LaneOptions(decoder="cpu", dtype="float16")).decoder_options["dtype"] == (
        "float16"
    )


@pytest.mark.usefixtures("_resolved")
def test_no_place_of_this_machine_is_in_a_row() -> None:
    """Of whichever option, however deep; what is no place stays."""
    more = {"cache": f"{PLACE}/cache", "sdk": "module:open", "deep": [{"at": f"{PLACE}/deep"}, 1]}
    options = LaneOptions(
        decoder="atom",
        source="rngd",
        model=f"{PLACE}/gemma3",
        compiled=Path(f"{PLACE}/compiled"),
        decoder_options=json.dumps(more),
        source_options=json.dumps({"kernels": f"{PLACE}/kernels"}),
    )
    made = _setting(options)
    kept = _settings_of(made)
    assert "/" not in json.dumps([made.name, kept])
    model = {"model": "found", "dtype": "bfloat16", "threads": 1}
    stripped = {"cache": "cache", "sdk": "module:open", "deep": [{"at": "deep"}, 1]}
    assert kept["decoder_options"] == model | {"compiled": "compiled"} | stripped
    assert kept["source_options"] == model | {"kernels": "kernels"}
    assert made.decoder_options["cache"] == f"{PLACE}/cache"


def test_a_paced_lane_takes_its_time_and_computes_nothing() -> None:
    decoder = paced_lane.open(
        {"geometry": "llama-3.1-8b", "context": 8, "mb_per_s": 50.0, "step_ms": 1.0}
    )
    manifest = GEOMETRIES["llama-3.1-8b"].decoder()
    assert decoder.manifest() == manifest
    assert decoder.caps.max_lanes == 1
    assert decoder.facts == {"pace": {"mb_per_s": 50.0, "step_ms": 1.0}}
    plan = compile_plan(manifest, "head_major", 4, 8)
    assert plan.nbytes == 32 * 4 * 4096
    with pytest.raises(Refused, match="unknown geometry"):
        paced_lane.open({"geometry": "x", "context": 8, "mb_per_s": 1.0, "step_ms": 0})


# What a row says, from times that are known.


def request(measured: Measured, num_tokens: int, told: list[Interval]) -> Request:
    made = Request(RequestId(1, 1), 4, RequestOptions(trace=True))
    made.tokens += [0] * num_tokens
    made.outcome, made.measured = "finished", measured
    made.trace = Lanes()
    for each in told:
        made.trace.owner.append((each.kind, "x", each.begun_ns, each.ended_ns, each.nbytes, None))
    return made


def pair(*, a_ends_ms: int, parked: bool) -> tuple[Request, Request]:
    """B: its prefill is [100, 200) ms in 10 groups; two are told by 120 ms, the others later."""
    zeros = dict.fromkeys(Measured.__struct_fields__, 0)
    first = Measured(**zeros | {"first_token_ns": 60 * MS, "ended_ns": a_ends_ms * MS})
    second = Measured(
        **zeros
        | {
            "prefill_begun_ns": 100 * MS,
            "source_final_ns": 200 * MS,
            "published_ns": 210 * MS,
            "first_token_ns": 211 * MS,
            "storage_ns": a_ends_ms * MS,
            "parked_ns": 20 * MS,
            "kv_nbytes": 1000,
            "last_group_nbytes": 100,
            "groups": 10,
            "import_ns": 31 * MS,
        }
    )
    told = [
        Interval("validated", "x", at * MS, at * MS, 100, "host") for at in (110, 120, 150, 190)
    ]
    told += [Interval("parked", "x", 95 * MS, a_ends_ms * MS, 0, "host")] if parked else []
    return request(first, 7, []), request(second, 1, told)


def test_the_times_of_a_pair() -> None:
    alone = Alone(prefill_ns=100 * MS, import_ns=30 * MS, step_ns=10 * MS)
    row = times_of(*pair(a_ends_ms=120, parked=True), alone)
    assert (row["gap_ns"], row["rest_ns"]) == (91 * MS, 80 * MS)
    assert (row["parked_nbytes"], row["parked_import_ns"]) == (200, 6 * MS)
    assert row["goal_ns"] == (6 + 3) * MS  # what was parked, and a tenth of the import
    assert row["bound_ns"] == (80 + 10 + 3) * MS  # the rest, and a group's computing and import
    assert row["tail_ns"] == 10 * MS
    assert row["ended_at_share"] == 0.2
    assert row["token_ns_of_a"] == 10 * MS
    late = times_of(*pair(a_ends_ms=205, parked=True), alone)
    assert (late["rest_ns"], late["parked_nbytes"]) == (0, 400)
    assert late["goal_ns"] == late["bound_ns"] == (12 + 3) * MS
    assert times_of(*pair(a_ends_ms=90, parked=False), alone)["parked_nbytes"] == 0


def made_row(
    mode: str, gap_ms: float, half: int = 0, repeat: int = 0, *, over: bool = False
) -> dict[str, Any]:
    place = {"setting": NAME, "prompt_tokens": 8, "share": 0.5, "mode": mode}
    told = {
        "bound_ns": 50 * MS,
        "goal_ns": 40 * MS,
        "rest_ns": 0 if over else MS,
        "parked_ns": MS,
        "parked_nbytes": MS,
        "ended_at_share": 0.5,
    }
    return place | told | {"repeat": repeat, "half": half, "gap_ns": gap_ms * MS}


def test_ratios_are_taken_within_a_half_and_each_row_is_judged_by_its_own_bound() -> None:
    rows = [made_row("off", 100), made_row("off", 200, half=1), made_row("whole", 150, half=1)]
    rows += [made_row("streamed", 50), made_row("streamed", 51, half=1)]
    found = {line.mode: line for line in lines(rows)}
    streamed, whole = found["streamed"], found["whole"]
    assert streamed.ratio is not None
    assert whole.ratio is not None
    assert streamed.to_whole is not None
    assert streamed.ratio.median == pytest.approx((0.5 + 0.255) / 2)
    assert whole.ratio.median == 0.75
    assert streamed.to_whole.median == 51 / 150
    assert (streamed.kept, streamed.met, streamed.over, streamed.rows) == (1, 0, 0, 2)
    (figure,) = figures(rows)
    assert not figure.met
    assert "1 of 2 rows" in figure.result
    assert "x0.34 of the whole route's" in figure.result
    assert "kept by 0" in figure.goal
    (figure,) = figures(rows[:4])
    assert figure.met
    assert [line.ratio for line in lines(rows[3:])] == [None]


def test_the_goal_is_judged_where_the_prefill_was_over_in_all_rows() -> None:
    rows = [made_row("streamed", 40, over=True), made_row("streamed", 41, half=1, over=True)]
    (figure,) = figures(rows)
    assert (figure.met, "1 of 2 rows" in figure.result) == (False, True)
    assert figure.goal == "the import of what was parked + one group: 40.0 ms"
    (figure,) = figures([rows[0], made_row("streamed", 41, half=1)])
    assert figure.met
