"""The device check at smoke size on the fake device: its steps, its runner, and its verdicts.

Nothing here says anything about a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.device import __main__ as entry
from headrace.bench.device.goals import judge
from headrace.bench.device.models import MODELS, random_model
from headrace.bench.device.place import Place
from headrace.bench.device.plan import FAKE, GRACE_S, REAL, STEPS, TOTAL_S, Step, step_of
from headrace.bench.device.runner import Done, check_folder, command_for, run_step, run_steps
from headrace.bench.device.steps import checks, exactness, plots
from headrace.bench.device.summary import as_text, holds_of, read_summary
from headrace.bench.device.verdict import Verdict
from headrace.bench.rows import read_rows
from headrace.errors import Refused
from headrace.messages import Interval
from headrace.runtime.requests import Request
from headrace.telemetry.recording import read as read_trace
from headrace.testing.pair.runner import case_names

ROOT = Path(__file__).parents[2]
MUST = ("check-cuda", "check-torch", "exactness")

Rows = list[dict[str, Any]]


def nothing(text: str) -> None:
    """Said by a step, to nobody."""


def done_of(rows: Rows, measure: str) -> Rows:
    return [row for row in rows if row["measure"] == measure]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder with the small models in it."""
    made = Place("fake", tmp_path_factory.mktemp("device"))
    run(made, "models")
    return made


def run(place: Place, step: str) -> Rows:
    module = importlib.import_module(f"headrace.bench.device.steps.{step_of(step).module}")
    module.run(place, step, nothing)
    path = place.folder / f"{step}.jsonl"
    rows = read_rows(path) if path.exists() else []
    assert all(row["device"] == "fake" for row in rows)
    return rows


# The plan.


def test_all_limits_fit_into_the_total_and_every_step_has_its_module() -> None:
    assert sum(step.limit_s + GRACE_S for step in STEPS) < TOTAL_S == 600
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        module = importlib.import_module(f"headrace.bench.device.steps.{step.module}")
        assert callable(module.run)
    assert set(MUST) <= {step.name for step in STEPS}


@pytest.mark.parametrize("sizes", [REAL, FAKE])
def test_the_sizes_name_what_there_is(sizes: Any) -> None:
    assert {*sizes.cases_cuda, *sizes.cases_torch} <= set(case_names())
    assert set(sizes.exact_models) <= set(MODELS)
    assert set(sizes.cpu_models) <= {*MODELS, *sizes.small_models}
    assert sizes.judged_gb in sizes.curve_gb
    assert "whole" in sizes.curve_routes


# Steps.


def test_models_have_the_layers_that_they_are_named_after(place: Place) -> None:
    for name, wanted in MODELS.items():
        config = json.loads((place.model(name) / "config.json").read_text())
        assert config["num_hidden_layers"] == len(wanted.kinds)
        assert config["dtype"] == "bfloat16"
        if wanted.window:
            assert config["layer_types"] == list(wanted.kinds)
            assert {"sliding_attention", "full_attention"} == set(wanted.kinds)


def test_models_of_full_size_are_those_of_the_published_configurations() -> None:
    from headrace.bench.geometries import GEOMETRIES

    for name, wanted in MODELS.items():
        geometry = GEOMETRIES[name]
        assert wanted.window == geometry.window
        assert wanted.shape.get("head_dim", 128) == geometry.head_dim


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_full_size_has_the_shapes_of_its_name(name: str) -> None:
    """Made without memory."""
    from headrace.bench.geometries import GEOMETRIES

    model = random_model(name, full_size=True, torch_device="meta")
    shapes = {each: tuple(weights.shape) for each, weights in model.named_parameters()}
    wanted, geometry = MODELS[name], GEOMETRIES[name]
    hidden, inner = wanted.shape["hidden_size"], wanted.shape["intermediate_size"]
    for layer in range(len(wanted.kinds)):
        prefix = f"model.layers.{layer}"
        kv = geometry.heads * geometry.head_dim, hidden
        assert shapes[f"{prefix}.self_attn.k_proj.weight"] == kv
        assert shapes[f"{prefix}.self_attn.v_proj.weight"] == kv
        assert shapes[f"{prefix}.mlp.up_proj.weight"] == (inner, hidden)
    assert f"model.layers.{len(wanted.kinds)}.self_attn.k_proj.weight" not in shapes


@pytest.mark.full_matrix
def test_exactness_compares_every_route_with_whole(place: Place) -> None:
    rows = run(place, "exactness")
    assert all(row["identical"] for row in rows)
    assert {row["model"] for row in rows} == set(FAKE.exact_models)
    assert {row["source"] for row in rows} == {"cuda", "torch"}
    assert {row["route"] for row in rows} == {"chunked", "streamed"}
    assert all(len(row["tokens"]) == exactness.TOKENS for row in rows)


def test_a_request_that_tells_nothing_is_not_exact() -> None:
    def request(**more: Any) -> Request:
        told: dict[str, Any] = {"tokens": [1], "logits_digest": "a", "kv_digests": ("b",)}
        options = exactness._options(exactness.WHOLE, 0)
        return Request(request=None, num_tokens=1, options=options, **(told | more))  # type: ignore[arg-type]

    assert exactness.compare(request(), request())["identical"]
    for other in ({"tokens": [2]}, {"logits_digest": "x"}, {"kv_digests": ("c",)}):
        assert not exactness.compare(request(), request(**other))["identical"]
    lacking: list[dict[str, Any]] = [{"tokens": []}, {"logits_digest": ""}, {"kv_digests": ()}]
    for missing in lacking:
        assert not exactness.compare(request(**missing), request(**missing))["identical"]


def test_the_link_is_measured_by_size_and_by_chunk(place: Place) -> None:
    rows = run(place, "link")
    for slab, registered in (("pinned", True), ("pageable", False)):
        mine = [row for row in rows if row["slab"] == slab]
        assert {row["registered"] for row in mine} == {registered}
        assert len(done_of(mine, "link")) == FAKE.link_repeats * len(FAKE.curve_gb)
        swept = {(row["chunk_mib"], row["in_flight"]) for row in done_of(mine, "sweep")}
        assert swept == {(mib, depth) for mib in FAKE.chunks_mib for depth in FAKE.depths}


def test_the_curve_goes_into_device_memory_with_pinned_and_pageable_slabs(place: Place) -> None:
    rows = run(place, "curve")
    for slab, registered, routes in (
        ("pinned", True, FAKE.curve_routes),
        ("pageable", False, FAKE.pageable_routes),
    ):
        mine = [row for row in rows if row["slab"] == slab]
        assert {row["registered"] for row in mine} == {registered}
        assert {row["route"] for row in done_of(mine, "hand-off")} == set(routes)
        assert done_of(mine, "fixed")
    assert {row["setting"] for row in rows} == {"paced at 0.01 GB/s of KV"}


def test_a_size_without_room_is_told_and_the_others_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Refused("no room")

    there = Place("fake", place.folder / "full")
    there.folder.mkdir()
    monkeypatch.setattr(Place, "open_memory", refuse)
    rows = run(there, "curve")
    assert {row["skipped"] for row in rows} == {"no room"}
    assert judged("import rate", there, {"curve": rows}).word == "not run"


def test_neighbours_decode_on_the_device(place: Place) -> None:
    rows = run(place, "neighbours")
    assert {row["arm"] for row in rows} == {"real", "discarded", "none"}
    assert all(row["gaps_ns"] for row in rows)
    assert any(row["imported_nbytes"] for row in rows if row["arm"] == "real")


def test_the_trace_is_kept_and_claims_no_kernel_overlap(place: Place) -> None:
    rows = run(place, "trace")
    assert [row["route"] for row in rows] == ["whole", "streamed"]
    assert {row["kernel_overlap_ns"] for row in rows} == {None}
    recording = read_trace(place.folder / "trace.json")
    assert recording.stamp["device"] == "fake"
    intervals: list[Interval] = [each for made in recording.runs for each in made.owner]
    assert any(each.kind == "import" for each in intervals)


def test_ttft_is_measured_by_both_routes(place: Place) -> None:
    rows = run(place, "ttft")
    assert len(rows) == 2 * FAKE.repeats * len(FAKE.ttft_prompts)
    assert {row["route"] for row in rows} == {"whole", "streamed"}


@pytest.mark.parametrize("step", ["neighbours", "trace", "ttft"])
def test_without_its_model_a_step_is_refused(tmp_path: Path, step: str) -> None:
    with pytest.raises(Refused, match="was not made"):
        run(Place("fake", tmp_path), step)


DRAWN_ROWS: dict[str, Rows] = {
    "link": [
        {"measure": "link", "slab": "pinned", "size_gb": 1.0, "nbytes": 9, "ns": 3},
        {
            "measure": "sweep",
            "slab": "pinned",
            "in_flight": 2,
            "chunk_mib": 4,
            "nbytes_per_s": 1e9,
        },
    ],
    "curve": [
        {
            "measure": "hand-off",
            "route": "whole",
            "slab": "pinned",
            "size_gb": 1.0,
            "setting": "paced at 1 GB/s of KV",
            "tail_ns": 5,
        },
        {"measure": "skipped", "skipped": "no room"},
    ],
    "neighbours": [
        {"measure": "token", "arm": arm, "route": route, "gaps_ns": [1, 2]}
        for arm, route in (("real", "streamed"), ("discarded", "streamed"), ("none", None))
    ],
    "ttft": [{"measure": "ttft", "model": "m", "route": "whole", "prompt_tokens": 8, "ttft_ns": 1}],
}


@pytest.mark.parametrize(("kind", "title"), [("fake", "fake device: "), ("real", "on a real")])
def test_pictures_say_what_the_device_was(tmp_path: Path, kind: Any, title: str) -> None:
    pytest.importorskip("matplotlib")
    there = Place(kind, tmp_path)
    for name, rows in DRAWN_ROWS.items():
        file = there.rows(name)
        for row in rows:
            file.append(row)
    there.rows("exactness").append({"measure": "exactness", "identical": True})
    plots.run(there, "plots", nothing)
    drawn = {path.stem: path.read_text() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == set(DRAWN_ROWS)
    for text in drawn.values():
        assert title in text
    if kind == "fake":
        assert not any("real" in text for text in drawn.values())


def test_a_check_without_a_report_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "make_model", lambda *_, **__: tmp_path)
    for status, kind in ((2, Refused), (9, Exception)):
        monkeypatch.setattr(checks, "_run", lambda _, status=status: status)
        with pytest.raises(kind, match=r"could not open|left no report"):
            run(Place("fake", tmp_path), "check-torch")


def test_a_check_whose_time_is_up_tells_the_cases_that_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is interrupted, as by its runner, and passes it on to the command."""
    report = tmp_path / "check-torch" / "report.json"
    case = {"case": "facts", "result": "ok", "seconds": 1.0, "note": ""}
    content = json.dumps({"cases": [case], "verdict": "interrupted"})
    code = (
        "import os, pathlib, signal, sys\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(report)!r}).write_text({content!r})\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "while True: signal.pause()\n"
    )
    report.parent.mkdir()
    monkeypatch.setattr(checks, "make_model", lambda *_, **__: tmp_path)
    monkeypatch.setattr(checks, "_command", lambda *_: python(code))
    rows = run(Place("fake", tmp_path), "check-torch")
    assert [row["case"] for row in rows] == ["facts"]
    verdict = judged("torch -> cuda", "real", {"check-torch": rows})
    assert verdict.word == "not run"
    assert verdict.why == "not run: cancel-at-every-turn"


# The runner.


def runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped by whoever adopted it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def step(name: str = "link", limit_s: float = 30.0) -> Step:
    return replace(step_of(name), limit_s=limit_s)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "state", "note"),
    [
        ("print('well')", "done", ""),
        ("print('broken'); print(); raise SystemExit(3)", "failed", "status 3"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "signal 9"),
        ("raise ValueError('no such thing')", "failed", "ValueError: no such thing"),
        ("print('there is no room'); raise SystemExit(2)", "left out", "there is no room"),
    ],
)
def test_how_a_step_ends_is_told(tmp_path: Path, code: str, state: str, note: str) -> None:
    log = tmp_path / "log"
    result = run_step(step(), python(code), log)
    assert (result.step, result.state) == ("link", state)
    assert note in result.note
    assert log.exists()


def test_a_step_that_is_stuck_is_ended_with_all_that_it_started_and_the_rest_go_on(
    tmp_path: Path,
) -> None:
    """It ignores the interrupt, and so does its child; what it wrote stays."""
    written = tmp_path / "pids"
    stuck = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(written)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "signal.pause()\n"
    )
    codes = {"link": stuck, "curve": "print('still here')"}
    steps = [step("link", 2.0), step("curve")]
    said: list[str] = []
    results = run_steps(steps, lambda each: python(codes[each.name]), tmp_path, said.append)
    assert [result.state for result in results] == ["timed out", "done"]
    assert "ended after 2 s" in results[0].note
    for pid in written.read_text().split():
        assert not runs(int(pid))
    assert any("timed out" in text for text in said)


def test_a_step_is_left_out_when_the_total_would_be_exceeded(tmp_path: Path) -> None:
    steps = [step("link", 50.0), step("curve", 1.0)]
    results = run_steps(steps, lambda _: python("pass"), tmp_path, nothing, total_s=20.0)
    assert [result.state for result in results] == ["left out", "done"]
    assert "20 s are left in all" in results[0].note


def test_an_interrupt_ends_the_step_and_leaves_out_the_rest(tmp_path: Path) -> None:
    def command(each: Step) -> list[str]:
        # It interrupts the runner, as Ctrl-C does, and would never end by itself.
        parent = f"os.kill({os.getpid()}, signal.SIGINT); signal.pause()"
        return python(f"import os, signal; {parent}")

    results = run_steps([step("link"), step("curve")], command, tmp_path, nothing)
    assert [(each.state, each.note) for each in results] == [
        ("failed", "interrupted"),
        ("left out", "interrupted"),
    ]


def test_folders_that_are_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b", "fake")
    (tmp_path / "a" / "note").touch()
    with pytest.raises(Refused, match="is not empty"):
        check_folder(tmp_path / "a", "real")
    with pytest.raises(Refused, match="cannot be used"):
        check_folder(tmp_path / "a" / "note", "real")
    with pytest.raises(Refused, match="a dry run has none"):
        check_folder(tmp_path / "benchmarks" / "results" / "x", "fake")


def test_a_step_is_started_as_what_it_is(tmp_path: Path) -> None:
    words = command_for("fake", tmp_path, share_device=True)(step_of("link"))
    assert words[-5:] == [str(tmp_path), "--step", "link", "--fake", "--share-device"]


# An occupied device.


def test_an_occupied_device_is_refused_unless_it_is_to_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "ask_users", lambda: ["process 7 (x) uses 9000 MiB of it"])
    monkeypatch.setattr(entry, "run_steps", lambda *_, **__: [])
    assert entry.main([str(tmp_path / "a")]) == 2
    assert "process 7 (x) uses 9000 MiB of it" in capsys.readouterr().out
    assert entry.main([str(tmp_path / "b"), "--share-device"]) == 0


def test_without_a_gpu_it_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert entry.main([str(tmp_path / "a"), "--only", "link"]) == 2
    assert "there is no GPU to check" in capsys.readouterr().out


# Verdicts, from rows that were made up.

ALL = [Done(each.name, "done", 1.0) for each in STEPS]


def but(name: str, state: Any, note: str = "x") -> list[Done]:
    return [Done(each.step, state, 1.0, note) if each.step == name else each for each in ALL]


def judged(name: str, where: Place | str, rows: dict[str, Rows], results: Any = ALL) -> Verdict:
    kind = where if isinstance(where, str) else where.kind
    found = [each for each in judge(kind, results, rows) if each.name.startswith(name)]  # type: ignore[arg-type]
    assert found
    return found[0]


def check_rows(**results: str) -> Rows:
    asked = ["a", "b"]
    return [
        {"measure": "check", "asked": asked, "case": case, "result": result}
        for case, result in results.items()
    ]


def exact_row(**more: Any) -> dict[str, Any]:
    row = {"model": "m", "source": "cuda", "prompt_tokens": 9, "route": "streamed"}
    return {"measure": "exactness", **row, "identical": True, **more}


def hand_off(route: str, tail_ns: int, **more: Any) -> dict[str, Any]:
    """At 0.256 GB: T is 10 ms of import after 64 ms of prefill, an eighth of it the last group."""
    return {
        "measure": "hand-off",
        "geometry": "g",
        "size_gb": 0.256,
        "pace_gb_per_s": 4.0,
        "link_gb_per_s": 0.0,
        "route": route,
        "slab": "pinned",
        "registered": True,
        "repeat": 0,
        "import_ns": 10_000_000,
        "prefill_ns": 64_000_000,
        "tail_ns": tail_ns,
        "ttft_ns": 64_000_000 + tail_ns,
        "kv_nbytes": 256_000_000,
        "last_group_nbytes": 32_000_000,
        "groups": 8,
        "prefill_chunk": 0,
        **more,
    }


def fixed(tail_ns: int) -> dict[str, Any]:
    return {**hand_off("whole", tail_ns), "measure": "fixed", "size_gb": 0.0}


def link_row(ns: int, **more: Any) -> dict[str, Any]:
    row = {"measure": "link", "slab": "pinned", "registered": True, "size_gb": 0.256}
    return {**row, "nbytes": 256_000_000, "ns": ns, **more}


def token_rows(real_ns: int, discarded_ns: int) -> Rows:
    same = {"measure": "token", "model": "m", "rate_mb_s": 1.0, "neighbours": 1, "block": 0}
    return [
        {**same, "arm": arm, "route": "streamed", "gaps_ns": [ns], "imported_nbytes": 1}
        for arm, ns in (("real", real_ns), ("discarded", discarded_ns))
    ]


def sweep_row(mib: int, depth: int, rate: float) -> dict[str, Any]:
    row = {"measure": "sweep", "slab": "pinned", "chunk_mib": mib, "in_flight": depth}
    return {**row, "nbytes_per_s": rate}


def trace_row(**more: Any) -> dict[str, Any]:
    row = {"measure": "trace", "route": "streamed", "source_clock": "device"}
    return {**row, "owner_clock": "device", "kernel_overlap_ns": None, "error_ns": 5000, **more}


ALLOWED_NS = round(1.25 * (10_000_000 / 8 + 1_000_000))
WHOLE = hand_off("whole", 11_000_000)
TAIL = "tail of streamed-4"
RATE = "import rate"
SKIPPED = {"measure": "exactness", "model": "s", "skipped": "not pulled"}

TABLE: list[tuple[str, dict[str, Rows], Any, str]] = [
    ("cuda -> cuda", {"check-cuda": check_rows(a="ok", b="skipped")}, ALL, "met"),
    ("cuda -> cuda", {"check-cuda": check_rows(a="ok", b="failed")}, ALL, "missed"),
    ("cuda -> cuda", {"check-cuda": check_rows(a="ok")}, but("check-cuda", "timed out"), "not run"),
    (
        "cuda -> cuda",
        {"check-cuda": check_rows(a="failed")},
        but("check-cuda", "timed out"),
        "missed",
    ),
    ("torch -> cuda", {}, but("check-torch", "failed"), "not run"),
    ("routes are exact", {"exactness": [exact_row(), SKIPPED]}, ALL, "met"),
    ("routes are exact", {"exactness": [exact_row(), exact_row(identical=False)]}, ALL, "missed"),
    ("routes are exact", {"exactness": [exact_row()]}, but("exactness", "timed out"), "not run"),
    (
        "routes are exact",
        {"exactness": [exact_row(identical=False)]},
        but("exactness", "failed"),
        "missed",
    ),
    ("routes are exact", {"exactness": [SKIPPED]}, ALL, "not run"),
    (RATE, {"curve": [WHOLE], "link": [link_row(9_100_000)]}, ALL, "met"),
    (RATE, {"curve": [WHOLE], "link": [link_row(8_900_000)]}, ALL, "missed"),
    (RATE, {"curve": [WHOLE], "link": [link_row(9_500_000, slab="pageable")]}, ALL, "not run"),
    (RATE, {"curve": [WHOLE], "link": [link_row(9_500_000, registered=False)]}, ALL, "not run"),
    (RATE, {"curve": [], "link": [link_row(9_500_000)]}, but("curve", "timed out"), "not run"),
    (TAIL, {"curve": [WHOLE, hand_off("streamed-4", ALLOWED_NS), fixed(1_000_000)]}, ALL, "met"),
    (
        TAIL,
        {"curve": [WHOLE, hand_off("streamed-4", ALLOWED_NS + 9000), fixed(1_000_000)]},
        ALL,
        "missed",
    ),
    (
        TAIL,
        {
            "curve": [
                hand_off("whole", 11_000_000, slab="pageable"),
                hand_off("streamed-4", ALLOWED_NS, slab="pageable"),
                fixed(1_000_000),
            ]
        },
        ALL,
        "not run",
    ),
    ("token time", {"neighbours": token_rows(1019, 1000)}, ALL, "met"),
    ("token time", {"neighbours": token_rows(1021, 1000)}, ALL, "missed"),
    ("token time", {}, but("neighbours", "left out"), "not run"),
    ("kernel overlap", {"trace": [trace_row()]}, ALL, "stated"),
    ("chunks", {"link": [sweep_row(4, 1, 9e9), sweep_row(64, 4, 10e9)]}, ALL, "stated"),
    ("chunks", {}, but("link", "failed"), "not run"),
    ("import rate by size, pinned", {"curve": [WHOLE], "link": [link_row(9)]}, ALL, "stated"),
    ("tails at 0.256 GB, pinned", {"curve": [WHOLE]}, ALL, "stated"),
    ("kernel overlap", {"trace": [trace_row(kernel_overlap_ns=7_000_000)]}, ALL, "stated"),
    ("kernel overlap", {}, but("trace", "failed"), "not run"),
]


@pytest.mark.parametrize(("name", "rows", "results", "word"), TABLE)
def test_each_goal_is_judged(name: str, rows: dict[str, Rows], results: Any, word: str) -> None:
    verdict = judged(name, "real", rows, results)
    assert verdict.word == word
    if word in ("missed", "not run") and (verdict.must or word == "not run"):
        assert verdict.why


def test_what_is_stated_has_its_figures() -> None:
    swept = [sweep_row(1, 8, 8.9e9), sweep_row(4, 1, 9e9), sweep_row(64, 4, 10e9)]
    found = judged("chunks", "real", {"link": swept}).found
    assert found == "pinned: 10.00 GB/s at best, 4 MiB x 1 come near it"
    curve = [
        WHOLE,
        hand_off("streamed-4", 2_000_000),
        hand_off("whole", 9_000_000, slab="pageable"),
    ]
    rows = {"curve": curve, "link": [link_row(8_000_000)]}
    assert judged("import rate by size, pinned", "real", rows).found == "0.256 GB 0.800"
    assert judged("import rate by size, pageable", "real", rows).found == "0.256 GB 0.800"
    assert judged("tails at 0.256 GB, pinned", "real", rows).found == "whole 11, streamed-4 2"


def test_kernel_overlap_is_claimed_only_where_the_rule_found_it() -> None:
    none = judged("kernel overlap", "real", {"trace": [trace_row(source_clock="host")]})
    assert "none can be claimed" in none.found
    assert "host clock" in none.found
    some = judged("kernel overlap", "real", {"trace": [trace_row(kernel_overlap_ns=7_000_000)]})
    assert "7.000 ms, gaps between kernels included" in some.found
    assert "5 us" in some.found


def test_a_speed_of_the_fake_device_is_never_a_goal_met_or_missed() -> None:
    for name, rows, results, _ in TABLE:
        verdict = judged(name, "fake", rows, results)
        if not verdict.must:
            assert verdict.word == "not run"
            assert verdict.why
        if verdict.found and not verdict.must:
            assert verdict.found.startswith("fake: ")


@pytest.mark.parametrize(
    ("results", "word", "must", "holds"),
    [
        (ALL, "met", True, True),
        (ALL, "missed", True, False),
        (ALL, "missed", False, True),
        (but("exactness", "left out"), "not run", True, True),
        *((but(name, state), "met", True, False) for name in MUST for state in ("failed",)),
        (but("check-cuda", "timed out"), "not run", True, False),
        (but("curve", "failed"), "met", True, True),
    ],
)
def test_what_makes_the_check_fail(results: Any, word: Any, must: bool, holds: bool) -> None:
    assert holds_of([Verdict("a", "b", word, "c", must)], results) is holds


def test_the_text_names_every_step_and_every_goal() -> None:
    rows = {"exactness": [exact_row(identical=False)]}
    results = but("curve", "timed out", "ended after 90 s")
    verdicts = judge("fake", results, rows)
    text = as_text("fake", results, verdicts, holds=False)
    assert text.startswith("device check, a dry run on the FAKE device")
    assert all(verdict.name in text for verdict in verdicts)
    assert all(f"{each.name}: {each.does}" in text for each in STEPS)
    assert "ended after 90 s" in text
    assert "NOT ALL THAT MUST BE TRUE WAS SHOWN" in text


# The script, end to end.

ASKED = ("environment", "models", "trace", "plots")


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "device_check.sh"), *arguments, "--python", sys.executable]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.full_matrix
def test_the_script_runs_dry_from_a_clone(tmp_path: Path) -> None:
    """In one command, with no step left behind and no model either."""
    folder = tmp_path / "out"
    only = [word for name in ASKED for word in ("--only", name)]
    done = script(str(folder), "--fake", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = read_summary(folder)
    assert summary["device"] == "fake"
    assert summary["holds"]
    assert [each["step"] for each in summary["steps"]] == list(ASKED)
    assert {each["state"] for each in summary["steps"]} == {"done"}, done.stdout
    words = {each["name"]: each["word"] for each in summary["goals"]}
    assert words["torch -> cuda keeps the rules"] == "not run"
    assert set(words.values()) <= {"met", "not run"}
    for name in ("environment", "trace"):
        first = json.loads((folder / f"{name}.jsonl").read_text().splitlines()[0])
        assert first["settings"] == {"step": name, "device": "fake"}
        assert "commit" in first["stamp"]
    assert (folder / "summary.txt").read_text() in done.stdout
    assert not (folder / "models").exists()
    again = script(str(folder), "--fake")
    assert again.returncode == 2
    assert "is not empty" in again.stdout


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--python"]])
def test_the_script_tells_its_usage(arguments: list[str]) -> None:
    command = [str(ROOT / "scripts" / "device_check.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "usage: scripts/device_check.sh OUT_FOLDER" in done.stderr


def test_the_script_names_an_interpreter_that_lacks_something(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    command = [str(ROOT / "scripts" / "device_check.sh"), str(tmp_path / "x"), "--python"]
    done = subprocess.run(
        [*command, str(bare)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "cannot import" in done.stderr
    assert not (tmp_path / "x").exists()


def test_the_page_tells_each_step_and_its_limit() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for each in STEPS:
        assert f"| {each.name} | {each.limit_s:g} |" in page
