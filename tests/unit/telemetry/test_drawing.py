"""The lanes are to scale, in rows that do not overlap, and tell a browser nothing but shapes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from headrace.telemetry.clocks import align
from headrace.telemetry.drawing import (
    WIDTH,
    Frame,
    _axis,
    _step_ns,
    draw_lanes,
    escape,
    rows_of,
)
from headrace.telemetry.recording import Run
from tests.unit.telemetry.scenes import (
    START_US,
    US,
    at,
    landed,
    on,
    on_devices,
    parked,
    several,
    streamed,
    whole,
)


def drawn(run: Run, begun_us: int, ended_us: int) -> ElementTree.Element:
    """The SVG of a frame; times as the scenes have them."""
    begun_ns, ended_ns = (START_US + begun_us) * US, (START_US + ended_us) * US
    text = draw_lanes(align(run), Frame(begun_ns, ended_ns, START_US * US))
    svg = tree(f"<div>{text}</div>").find(".//svg")
    assert svg is not None
    return svg


def tree(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_what_lies_outside_of_a_frame_is_not_drawn() -> None:
    lost = at("announced", 50, name="lost")
    run = streamed(source=(*streamed().source, lost))
    svg = drawn(run, 1_030, 1_260)  # the first message and the first import, and no more
    found = [shape.attrib["class"] for shape in svg]
    assert found == ["compute odd", "message", "validated", "import"]
    (message,) = svg.findall("line[@class='message']")
    assert (float(message.attrib["x1"]), float(message.attrib["x2"])) == (0, 43.478)


def test_shapes_are_to_scale() -> None:
    svg = drawn(streamed(), 0, 5_000)
    computing, *_ = svg.findall("rect[@class='compute']")
    assert (float(computing.attrib["x"]), float(computing.attrib["width"])) == (20, 160)
    (band,) = svg.findall("rect[@class='tail']")
    assert (float(band.attrib["x"]), float(band.attrib["width"])) == (640, 160)
    pieces = [shape for shape in svg if shape.attrib["class"].startswith("part ")]
    assert sum(float(piece.attrib["width"]) for piece in pieces) == pytest.approx(160)
    (published,) = svg.findall("line[@class='mark published']")
    assert published.attrib["x1"] == published.attrib["x2"] == "800"
    height = float(svg.attrib["viewBox"].split()[3])
    assert float(published.attrib["y2"]) == height
    for shape in svg.findall("rect"):
        assert float(shape.attrib["y"]) + float(shape.attrib["height"]) <= height
        assert float(shape.attrib["x"]) + float(shape.attrib["width"]) <= WIDTH


def test_computing_that_is_told_as_writing_has_a_row_of_its_own() -> None:
    labels = [row.label for row in rows_of(align(several()))]
    assert labels[:3] == ["source computes", "computes + writes", "messages"]
    svg = drawn(several(), 0, 5_000)
    (both,) = svg.findall("rect[@class='write both']")
    says = both.findtext("title")
    assert says is not None
    assert says.startswith("compute and write layers [0, 3) x positions [0, 8): at 0.300 ms")
    run = several()
    name = "layers [3, 4) x positions [0, 8)"
    last = (at("compute", 2_900, 3_000, name=name), at("write", 3_000, 3_100, name=name))
    labels = [row.label for row in rows_of(align(replace(run, source=(*run.source, *last))))]
    assert labels[:3] == ["source computes", "computes + writes", "source writes"]


def test_what_devices_tell_has_rows_and_a_look_of_its_own() -> None:
    rows = rows_of(align(on_devices()))
    assert [row.label for row in rows] == [
        "device computes",
        "device copies out",
        "messages",
        "device imports",
        "others decode",
        "own step, drain",
        "the tail",
    ]
    svg = drawn(on_devices(), 0, 5_000)
    bars = [shape for shape in svg if " device" in shape.attrib["class"]]
    assert len(bars) == 9
    first = bars[0].findtext("title")
    assert first is not None
    assert first.endswith("at 0.100 ms, 0.800 ms (device clock, within 5.0 us)")
    fakes = on("fake", on_devices(), "compute", "write", "import")
    assert [row.label for row in rows_of(align(fakes))] == [row.label for row in rows]
    titles = [shape.findtext("title") or "" for shape in drawn(fakes, 0, 5_000)]
    assert sum("(fake clock, within 0.0 us)" in each for each in titles) == 9
    mixed = rows_of(align(on("device", streamed(), "import")))
    assert [row.label for row in mixed][:4] == [
        "source computes",
        "source writes",
        "messages",
        "device imports",
    ]
    run = streamed()
    both = replace(run, owner=(*run.owner, *on_devices().owner[2:3]))
    labels = [row.label for row in rows_of(align(both))]
    assert labels[3:5] == ["owner imports", "device imports"]


def test_imports_in_flight_at_once_have_rows_of_their_own() -> None:
    busy = (*streamed().owner, *landed(2, 3_240, 3_700, 3_900))
    rows = rows_of(align(streamed(owner=busy)))
    assert [row.label for row in rows] == [
        "source computes",
        "source writes",
        "messages",
        "owner imports",
        "",
        "others decode",
        "own step, drain",
        "the tail",
    ]
    tops = [row.top_px for row in rows]
    assert tops == sorted(set(tops))
    assert [row.label for row in rows_of(align(whole(source=(), owner=())))] == [
        "source computes",
        "source writes",
        "messages",
        "owner imports",
    ]


@pytest.mark.parametrize(
    ("least", "step"), [(0, 1), (1, 1), (2, 2), (3, 5), (6, 10), (10, 10), (11, 20), (999, 1_000)]
)
def test_ticks_are_at_round_steps(least: int, step: int) -> None:
    assert _step_ns(least) == step


@pytest.mark.parametrize(
    ("begun_us", "ended_us", "ticks"),
    [
        (0, 5_000, ["0", "1", "2", "3", "4", "5"]),
        (-500, 3_000, ["0", "1", "2", "3"]),
        (3_000, 4_000, ["3.0", "3.2", "3.4", "3.6", "3.8", "4.0"]),
        (3_010, 3_990, ["3.2", "3.4", "3.6", "3.8"]),
        (10, 10.001, ["0.010000", "0.010001"]),
    ],
)
def test_ticks_count_from_the_grant(begun_us: float, ended_us: float, ticks: list[str]) -> None:
    frame = Frame(int(begun_us * US), int(ended_us * US), 0)
    spans = tree(_axis(frame)).findall("span")
    if len(ticks) > 2:
        assert [span.text for span in spans] == ticks
    else:
        assert {span.text for span in spans} >= set(ticks)
    for span in spans:
        assert 0 <= float(span.attrib["style"].removeprefix("left:").removesuffix("%")) <= 100


def test_escape_leaves_other_text_alone() -> None:
    assert escape("été \n\t ☃ 𝄞") == "été \n\t ☃ 𝄞"
    assert escape('"<&>') == "&quot;&lt;&amp;&gt;"


def test_parking_has_a_row_of_its_own_where_there_is_any() -> None:
    rows = [row.label for row in rows_of(align(parked()))]
    assert rows.index("messages") + 1 == rows.index("parked") == rows.index("owner imports") - 1
    assert "parked" not in [row.label for row in rows_of(align(streamed()))]
    (waited,) = drawn(parked(), 0, 10_000).findall("rect[@class='parked']")
    (tail,) = drawn(parked(), 0, 10_000).findall("rect[@class='tail']")
    assert (float(waited.attrib["x"]), float(waited.attrib["width"])) == (0, 600)
    assert (float(tail.attrib["x"]), float(tail.attrib["width"])) == (600, 80)
