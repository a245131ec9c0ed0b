"""The fault benchmark at smoke size: a row for each cycle, and figures that follow from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import faults
from headrace.bench.faults import cancels, costs, deaths
from headrace.bench.faults.pair import Pair, Setting
from headrace.bench.faults.table import figures
from headrace.cli import run_command
from headrace.errors import Refused


@pytest.fixture(autouse=True)
def _level_as_before() -> Iterator[None]:
    log = logging.getLogger("headrace.owner")
    level = log.level
    yield
    log.setLevel(level)


def of(rows: list[dict[str, Any]], measure: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["measure"] == measure]


@pytest.mark.usefixtures("nothing_left")
def test_deaths_alternate_with_plain_exits() -> None:
    rows = list(deaths.run(Setting(), (8,), cycles=3))
    forms = [row["form"] for row in of(rows, "death")]
    assert forms == ["owner", "plain", "plain", "owner", "owner", "plain"]
    under_owner = [row for row in of(rows, "death") if row["form"] == "owner"]
    assert [row["decoding"] for row in under_owner] == [False, False, True]
    for row in of(rows, "death"):
        assert row["ns"] > 0
        if row["form"] == "owner":
            assert row["outcome"] == "failed"
            assert row["ns"] <= row["turned_ns"]
            assert (row["neighbours"], row["neighbours_changed"]) == (1 + row["decoding"], 0)
            assert bool(row["steps_ns"]) == row["decoding"]
    (leaks,) = of(rows, "leaks")
    assert leaks["before"] == leaks["after"]
    assert any(name.startswith("kill -9") for name, *_ in figures(rows))


@pytest.mark.usefixtures("nothing_left")
def test_cancels_of_all_kinds() -> None:
    rows = list(cancels.run(Setting(), cycles=2))
    mine = of(rows, "cancel")
    assert [row["decoding"] for row in mine] == [False, True, True, False]
    for row in mine:
        assert row["outcome"] == "cancelled"
        assert row["neighbours_changed"] == 0
        assert row["slot_held_when_lane_was_free"]  # the source computes, and is not waited for
        assert 0 < row["terminal_ns"] <= row["lane_ns"] <= row["slot_ns"]
        assert row["slot_after_sink_call_ns"] < row["slot_ns"]
    for measure in ("cancel legacy", "cancel stuck", "cancel over router"):
        assert len(of(rows, measure)) == 2
    assert all(row["slot_after_prefill_ns"] > 0 for row in of(rows, "cancel legacy"))
    assert all(row["slot_after_deadline_ns"] > 0 for row in of(rows, "cancel stuck"))
    assert {row["outcome"] for row in of(rows, "cancel over router")} == {"cancelled"}


@pytest.mark.usefixtures("nothing_left")
def test_digest_mode_finds_what_is_announced_wrongly() -> None:
    rows = list(costs.detection(1))
    assert {row["fault"] for row in rows} == {"torn", "stale", "early", "sound"}
    for row in rows:
        if row["digest"]:
            assert row["found"] == (row["fault"] != "sound"), row
            assert row["layer_named"] == row["found"], row
        else:
            assert not row["found"]


@pytest.mark.usefixtures("nothing_left")
def test_what_digests_and_books_cost() -> None:
    rows = [*costs.digests((8,), repeats=2), *costs.books(5)]
    variants = [row["variant"] for row in of(rows, "digest")]
    assert variants == [*costs.VARIANTS, *reversed(costs.VARIANTS)]
    assert all(0 < row["import_ns"] < row["ttft_ns"] for row in of(rows, "digest"))
    assert {row["call"]: len(row["ns"]) for row in of(rows, "books")} == {
        "check_integrity": 5,
        "snapshot": 5,
    }
    (held, _) = (row["held"] for row in of(rows, "books"))
    assert sum(held["handoffs"].values()) == costs.BOOK_REQUESTS
    assert sum(held["slots"].values()) == costs.BOOK_SOURCES * costs.BOOK_SLOTS


def test_a_figure_is_met_or_missed() -> None:
    def death(form: str, ms: int, changed: int = 0) -> dict[str, Any]:
        rest = {
            "turned_ns": (ms + 1) * 10**6,
            "decoding": False,
            "steps_ns": [],
            "neighbours": 1,
            "neighbours_changed": changed,
        }
        facts = {"measure": "death", "form": form, "size_mb": 1, "ns": ms * 10**6}
        return facts | (rest if form == "owner" else {})

    quick = [death("plain", 10), death("owner", 59)]
    slow = [death("plain", 10), death("owner", 61, changed=1)]
    assert [figure.met for figure in figures(quick)] == [True, True, None, True]
    assert [figure.met for figure in figures(slow)] == [False, False, None, False]
    assert list(figures([])) == []


def test_too_small_a_slab_is_refused() -> None:
    with pytest.raises(Refused, match="give a larger size"):
        Pair(Setting(), 1 << 20, pace=deaths.PACE)


def test_the_command_prints_a_table_and_writes_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"measure": "books", "call": "snapshot", "ns": [1000, 3000]}]
    monkeypatch.setattr(faults, "run", lambda *_, **__: iter(rows))
    out = tmp_path / "faults.jsonl"
    assert run_command(["bench", "faults", "--out", str(out)]) == 0
    assert "snapshot, us" in capsys.readouterr().out
    assert json.loads(out.read_text().splitlines()[1]) == rows[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cycles", "0"], "--cycles is 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--sizes-mb", "0"], "--sizes-mb is 0"),
        (["--empty-digest-sizes-mb"], "--digest-sizes-mb is empty"),
        (["--source", "abacus"], "unknown source 'abacus'"),
        (["--source-options", "[]"], "--source-options is not a JSON object"),
        (["--out", "/tmp"], "/tmp is a directory"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "faults", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
