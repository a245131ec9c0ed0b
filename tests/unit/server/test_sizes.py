"""What lanes, slots and weights take, read off a model's config by a child."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, Refused
from headrace.server import sizes
from headrace.server.config import DecoderTable, SourceTable
from headrace.server.sizes import Sizes, measure, measured
from tests.unit.server.model_directory import (
    ELEMENTS,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    model_directory,
)

CONTEXT = 128


def test_the_sizes_of_a_model_are_those_of_its_geometry(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    source = SourceTable(slots=3)
    table = DecoderTable(model="m", context=CONTEXT, sources=(source, source))
    wide = DecoderTable(model="m", context=CONTEXT, dtype="bfloat16", decoder="cuda")
    null = DecoderTable(model="m", decoder="null")
    given = [(table, directory), (null, directory), (wide, directory)]
    first, none, second = measured(given, [4, 1, 2])
    part = CONTEXT * KV_HEADS * HEAD_DIM * 4
    assert none is None
    assert first is not None
    assert first.lane == LAYERS * 2 * part  # each part is a whole number of pages
    assert 0 <= first.slot - (LAYERS * 2 * part + 4 * CONTEXT + 4 * VOCABULARY) < 3 * 4096
    assert first.lanes == 4 * first.lane
    assert first.slots == 6 * first.slot
    assert first.weights == 3 * 4 * ELEMENTS  # of the decoder and two sources, as float32
    assert first.reserved == first.lanes + first.slots
    assert second is not None
    assert second.lane == max(4096, LAYERS * 2 * 4096)
    assert (second.lanes, second.slots) == (0, 2 * second.slot)  # its lanes are in its device
    assert second.weights == 2 * ELEMENTS


def test_a_model_without_a_geometry_is_refused_by_its_place(tmp_path: Path) -> None:
    directory = str(model_directory(tmp_path / "model"))
    good = {"place": "decoders[0]", "model": directory, "dtype": "float32", "context": CONTEXT}
    for wrong, said in (
        ({"dtype": "int4"}, "dtype 'int4' is unknown; use one of bfloat16"),
        ({"model": str(tmp_path)}, f"{tmp_path} has no usable config.json"),
    ):
        asked = {"decoders": [good, {**good, "place": "decoders[1]", **wrong}]}
        with pytest.raises(Refused, match=rf"^decoders\[1\]: {said}"):
            measure(asked, lambda told: None)


def test_where_nothing_reads_a_config_no_sizes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "find_spec", lambda name: None)
    assert measured([(DecoderTable(model="m"), tmp_path)], [1]) == [None]


def test_processes_that_hold_no_weights_here_count_for_none() -> None:
    def weights(decoder: str, *sources: SourceTable) -> int:
        table = DecoderTable(model="m", decoder=decoder, sources=sources)
        return sizes._sizes(table, 1, 10, 10, 1).weights

    rngd, emulated = SourceTable(source="rngd"), SourceTable(source="rngd", emulate=True)
    assert weights("cuda", SourceTable(source="cuda"), rngd) == 0
    assert weights("cpu", emulated, SourceTable(source="rngd", options={"emulate": True})) == 3
    assert sizes._sizes(DecoderTable(model="m", decoder="atom"), 1, 10, 7, 0) == Sizes(
        10, 7, 10, 14, 0
    )


def test_what_cannot_be_loaded_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "headrace.engine.lanes", None)
    asked = {"place": "", "model": str(tmp_path), "dtype": "float32", "context": CONTEXT}
    with pytest.raises(HeadraceError, match=r"^a model's config cannot be read: import of head"):
        measure({"decoders": [asked]}, lambda told: None)
