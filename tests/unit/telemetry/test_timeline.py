"""The drawing shows where each side was at work, whatever the readings are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.messages import Interval
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.timeline import draw
from tests.unit.telemetry.scenes import (
    at,
    cancelled,
    local,
    on,
    parked,
    streamed,
    whole,
)


def lanes(run: Run, width: int = 39) -> list[str]:
    return [line.split("│")[1] for line in draw(align(run), width=width)[:3]]


def test_both_lanes_and_both_marks() -> None:
    """39 columns of 100 us, from the first computing at 100 us to publishing at 4000 us."""
    lines = draw(align(streamed()), width=39)
    source, owner, marks = lanes(streamed())
    assert source == "█" * 9 + "▓" * 10 + "█" * 13 + " " * 7
    assert owner == " " * 9 + "▄" * 3 + " " * 8 + "▄▄▄" + " " * 9 + "···▄▄▄ "
    assert (marks.index("▲"), marks.index("△")) == (31, 38)
    assert marks.split() == ["▲", "△"]
    assert lines[0].endswith("│ layer groups computed and written")
    assert lines[1].endswith("│ · others decode  ▄ imports")
    assert lines[2].endswith("│ ▲ prefill ended  △ published")
    assert lines[3].split() == ["0", "ms", "4", "ms", "host", "clock,", "two", "processes"]


def test_the_scale_names_the_clock() -> None:
    run = on("device", streamed(), "compute", "import")
    assert draw(align(run))[3].endswith("device clock, two processes")
    fake = on("fake", run, "import")
    assert draw(align(fake))[3].endswith("fake clock, two processes")


def test_the_scale_says_who_was_at_work() -> None:
    assert draw(align(local()))[3].endswith("host clock, one process, one thread")


def test_a_run_that_was_not_published_is_drawn_to_its_end() -> None:
    lines = draw(align(cancelled()), width=47)  # of 30 us, from 100 us to 1510 us
    source, owner, marks = lanes(cancelled(), 47)
    assert source == "█" * 31 + " " * 16
    assert owner.strip() == "▄" * 8 + " " * 7 + "-"
    assert (marks.index("✕"), marks.index("■")) == (45, 46)
    assert lines[2].endswith("│ ✕ cancelled  ■ ended")


def test_marks_of_one_time_have_columns_of_their_own() -> None:
    one_time = streamed(
        source=(at("compute", 0, 50), at("final", 100)),
        owner=(at("cancel", 100), at("ended", 100)),
    )
    assert lanes(one_time, 20)[2].endswith("  ✕■▲")
    early = streamed(source=(at("compute", 5, 50), at("final", 5)), owner=(at("published", 5),))
    assert lanes(early, 20)[2] == "▲△" + " " * 18


@pytest.mark.parametrize(
    "run",
    [
        streamed(source=(at("compute", -9e4, 9e12), at("final", 9e12))),
        streamed(source=(at("compute", 900, 90),)),
        streamed(owner=()),
        whole(source=(), owner=()),
        cancelled(owner=(at("drain", 5, 9),)),
    ],
)
def test_any_readings_stay_inside(run: Run) -> None:
    lines = draw(align(run), width=20)
    assert len(lines) == 4
    for line in lines[:3]:
        assert len(line.split("│")[1]) == 20


def test_nothing() -> None:
    assert lanes(whole(source=(), owner=()), 72) == [" " * 72] * 3


def test_imports_outside_of_the_window_are_not_at_its_edge() -> None:
    run = streamed()
    late: tuple[Interval, ...] = (*run.owner, at("import", 9_000, 9_100))
    assert lanes(replace(run, owner=late)) == lanes(run)


def test_parking_is_drawn_under_what_else_the_owner_did() -> None:
    """67 columns of 100 us, from the first computing at 100 us to publishing at 6800 us."""
    _, owner, _ = lanes(parked(), 67)
    assert owner == "░" * 32 + "·" * 27 + "▄" * 7 + " "
    assert draw(align(parked()))[1].endswith("│ ░ parked  · others decode  ▄ imports")
