"""The page draws every interval, holds together as XML, and asks nothing of a network."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from headrace.telemetry.clocks import align
from headrace.telemetry.drawing import (
    MARKS,
    WIDTH,
)
from headrace.telemetry.page import frames, page
from headrace.telemetry.recording import Recording, Run
from headrace.telemetry.report import report_of
from headrace.telemetry.style import STYLE
from headrace.telemetry.words import figures, parts
from tests.unit.telemetry.scenes import (
    US,
    at,
    cancelled,
    measured,
    moved,
    on,
    on_devices,
    parked,
    several,
    streamed,
    whole,
)

RUNS = (streamed(), whole(), cancelled(), several(), on_devices(), parked())
UNPAIRED = ("announced", "validated")


def shown(*runs: Run, name: str = "trace.json") -> str:
    return page(Recording(runs=runs, stamp={"kernel": "6.1"}), name)


def tree(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def drawings(text: str) -> list[ElementTree.Element]:
    return tree(text).findall(".//figure")


def shapes(figure: ElementTree.Element) -> list[ElementTree.Element]:
    return figure.findall(".//svg/*")


def classes(figure: ElementTree.Element) -> list[list[str]]:
    return [shape.attrib["class"].split() for shape in shapes(figure)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.outcome + run.name)
def test_every_interval_is_drawn_in_the_first_drawing(run: Run) -> None:
    first = drawings(shown(run))[0]
    drawn: Counter[str] = Counter()
    for names in classes(first):
        if names[0] not in ("tail", "part", "message"):
            drawn[names[1] if names[0] == "mark" else names[0]] += 1
    assert drawn == Counter(each.kind for each in (*run.source, *run.owner))


def test_every_shape_says_what_it_is() -> None:
    for figure in drawings(shown(*RUNS)):
        for shape in shapes(figure):
            says = shape.findtext("title")
            assert says
    titles = [title.text for title in tree(shown(streamed())).iterfind(".//svg//title")]
    assert (
        "import layers [0, 1) x positions [0, 8): at 1.050 ms, 0.200 ms, 1000 bytes (host clock)"
        in titles
    )
    assert "published at 4.000 ms: entry" in titles
    assert "decode steps of others: 0.300 ms" in titles
    assert "message of layers [2, 3) x positions [0, 8): under way for 0.030 ms" in titles


def test_the_tail_is_drawn_again_alone() -> None:
    captions = [figure.findtext("figcaption") for figure in drawings(shown(*RUNS))]
    assert captions == [
        "the whole request, ms",
        "the tail, magnified, ms",
        "the whole request, ms",
        "the tail, magnified, ms",
        "the whole request, ms",
        "the whole request, ms",
        "the tail, magnified, ms",
        "the whole request, ms",
        "the tail, magnified, ms",
        "the whole request, ms",
        "the tail, magnified, ms",
    ]
    magnified = drawings(shown(streamed()))[1]
    assert ["import"] in classes(magnified)
    assert ["compute"] not in classes(magnified)
    assert len([names for names in classes(magnified) if names[0] == "part"]) == 7


def test_a_long_decoding_is_cut_off_in_a_drawing_of_its_own() -> None:
    run = streamed()
    late = replace(run, owner=(*run.owner[:-2], at("ended", 9_000), at("drain", 9_000, 9_100)))
    (_, all_of_it), (caption, frame), _ = frames(align(late))
    assert caption == "to the first decode step, ms"
    assert frame.ended_ns - all_of_it.begun_ns == 4_500 * US
    assert all_of_it.ended_ns - all_of_it.begun_ns == 9_100 * US
    middle = drawings(shown(late))[1]
    assert ["mark", "first_token"] in classes(middle)
    assert ["mark", "ended"] not in classes(middle)
    assert ["drain"] not in classes(middle)


def test_figures_and_parts_are_in_tables() -> None:
    run = align(streamed())
    report = report_of(run, [run])
    cells = ["".join(cell.itertext()) for cell in tree(shown(streamed())).iterfind(".//td")]
    for _, value in figures(report):
        assert value in cells
    for _, time, share in parts(report):
        assert {time, share} <= set(cells)
    captions = [each.text for each in tree(shown(cancelled())).iterfind(".//caption")]
    assert captions == ["figures"]


def test_the_legend_names_what_is_there() -> None:
    words = ["".join(item.itertext()) for item in tree(shown(streamed())).iterfind(".//li")]
    assert "the owner decodes a step of others" in words
    assert "the rest: the owner wakes, checks, publishes" in words
    assert "published at 4.000 ms" in words
    words = ["".join(item.itertext()) for item in tree(shown(cancelled())).iterfind(".//li")]
    assert "cancel at 1.500 ms" in words
    assert not any("tail" in word or "others" in word for word in words)
    words = ["".join(item.itertext()) for item in tree(shown(several())).iterfind(".//li")]
    assert "it computes and writes a group of several layers, in turn" in words
    assert "it writes the group into the slot" not in words
    words = ["".join(item.itertext()) for item in tree(shown(on_devices())).iterfind(".//li")]
    assert words[:3] == [
        "the source's device computes a layer group, by its own events, within 5.0 us",
        "it copies the group into the slot, by its own events, within 5.0 us",
        "the owner's device imports a piece, by its own events, within 5.0 us",
    ]
    fakes = on("fake", on_devices(), "compute", "write", "import", error_us=2)
    words = ["".join(item.itertext()) for item in tree(shown(fakes)).iterfind(".//li")]
    assert words[2] == (
        "the owner's device imports a piece, by the events of a fake device, within 2.0 us"
    )
    run = cancelled()
    ungranted = replace(run, owner=run.owner[1:])
    words = ["".join(item.itertext()) for item in tree(shown(ungranted)).iterfind(".//li")]
    assert "cancel" in words


def test_each_class_that_is_drawn_has_a_style() -> None:
    names = {
        name for figure in drawings(shown(*RUNS)) for names in classes(figure) for name in names
    }
    assert set(MARKS) <= names
    for name in names - {"mark", "part"}:
        assert re.search(rf"\.{name}\b", STYLE), name


class Elements(HTMLParser):
    """Every element's attributes, as a browser reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_nothing_is_fetched_and_nothing_runs() -> None:
    text = shown(*RUNS)
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    elements = Elements()
    elements.feed(text)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "a", "form"}
    names = {name for _, attributes in elements.found for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"src", "href", "xlink:href", "action", "data"}


def test_all_text_is_escaped() -> None:
    rude = "<script>alert('&')</script>\x00\x1b\ud800"
    run = streamed(name=rude, reason=rude, choice=rude, outcome=rude)
    lane = tuple(replace(each, name=rude) for each in run.owner)
    text = page(Recording(runs=(replace(run, owner=lane),), stamp={rude: rude}), rude)
    assert "<script" not in text
    assert "alert" in text
    text.encode("utf-8")
    root = tree(text)
    assert "<script>alert('&')</script>\ufffd\ufffd\ufffd" in [
        heading.text for heading in root.iterfind(".//h1")
    ]


def test_a_page_fits_a_phone_and_both_colour_schemes() -> None:
    root = tree(shown(streamed()))
    metas = {meta.attrib.get("name"): meta.attrib.get("content") for meta in root.iter("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    assert "prefers-color-scheme: dark" in STYLE
    light, dark = (
        set(re.findall(r"(--[\w-]+):", block))
        for block in (STYLE.partition("@media")[0], STYLE.partition("@media")[2])
    )
    assert light == dark
    assert set(re.findall(r"var\((--[\w-]+)\)", STYLE)) == light


@pytest.mark.parametrize(
    "run",
    [
        whole(source=(), owner=()),
        streamed(source=(at("compute", 90, 10), at("announced", 5, name="lost"))),
        streamed(source=moved(streamed().source, 9_000_000_000_000)),
        streamed(owner=(at("granted", 9_000), *streamed().owner[1:])),
        streamed(measured=measured(kv_nbytes=0)),
        streamed(source=(at("final", 5),), owner=(at("published", 5),)),
    ],
    ids=["nothing", "backwards", "another clock", "contradictory", "no bytes", "no tail"],
)
def test_any_readings_make_a_page(run: Run) -> None:
    for figure in drawings(shown(run)):
        for shape in shapes(figure):
            for name in ("x", "x1", "x2"):
                assert 0 <= float(shape.attrib.get(name, 0)) <= WIDTH
            assert float(shape.attrib.get("width", 0)) >= 0


def test_the_legend_tells_of_parking_where_there_is_any() -> None:
    word = "parked: it holds its slot and waits for the lane"
    assert word in shown(parked())
    assert word not in shown(streamed())
    assert ".parked {" in STYLE
