"""What lanes, slots and weights take, read off a model's config by a child."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headrace.errors import HeadraceError, Refused
from headrace.server import sizes
from headrace.server.config import DecoderTable, ServeConfig, SourceTable
from headrace.server.owner_configs import OwnerStart, owner_config
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


def planned(table: DecoderTable, directory: Path) -> tuple[DecoderTable, Path, OwnerStart]:
    return table, directory, owner_config(table, ServeConfig(decoders=(table,)), directory)


def asked_of(directory: Path, table: DecoderTable | None = None) -> dict[str, Any]:
    table = table or DecoderTable(model="m", context=CONTEXT)
    return sizes._asked(0, *planned(table, directory))


def test_the_sizes_of_a_model_are_those_of_its_geometry(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    source = SourceTable(slots=3)
    table = DecoderTable(model="m", context=CONTEXT, sources=(source, source))
    wide = DecoderTable(model="m", context=CONTEXT, dtype="bfloat16")
    null = DecoderTable(model="m", decoder="null", context=CONTEXT)
    given = [planned(each, directory) for each in (table, null, wide)]
    first, none, second = measured(given, [4, 1, 2])
    part = CONTEXT * KV_HEADS * HEAD_DIM * 4
    assert none is not None
    assert first is not None
    assert (none.weights, none.lane, none.slot) == (4 * ELEMENTS, first.lane, first.slot)
    assert first.lane == LAYERS * 2 * part  # each part is a whole number of pages
    assert 0 <= first.slot - (LAYERS * 2 * part + 4 * CONTEXT + 4 * VOCABULARY) < 3 * 4096
    assert first.lanes == 4 * first.lane
    assert first.slots == 6 * first.slot
    assert first.weights == 3 * 4 * ELEMENTS  # of the decoder and two sources, as float32
    assert first.reserved == first.lanes + first.slots
    assert second is not None
    assert second.lane == max(4096, LAYERS * 2 * 4096)
    assert (second.lanes, second.slots) == (2 * second.lane, 2 * second.slot)
    assert second.weights == 2 * 2 * ELEMENTS


def test_a_model_without_a_geometry_is_refused_by_its_place(tmp_path: Path) -> None:
    directory = str(model_directory(tmp_path / "model"))
    good = asked_of(Path(directory))
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
    assert measured([planned(DecoderTable(model="m"), tmp_path)], [1]) == [None]


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
    asked = asked_of(tmp_path)
    with pytest.raises(HeadraceError, match=r"^a model's config cannot be read: import of head"):
        measure({"decoders": [asked]}, lambda told: None)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"options": {"nonsense": 1}},
            "decoders[0].options: Object contains unknown field `nonsense`; its options are model",
        ),
        ({"options": {"lanes": "x"}}, "decoders[0].options: Expected `int`, got `str` - at `$.la"),
        ({"options": {"keep_nbytes": "x"}}, "decoders[0].options: Expected `int`, got `str`"),
        ({"keep_bytes": 1}, "decoders[0].keep_bytes is 1, one entry of 128 positions takes "),
        ({"options": {"keep_nbytes": 1}}, "decoders[0].options.keep_nbytes is 1, one entry of 128"),
        ({"decoder": "null", "options": {"nonsense": 1}}, "decoders[0].options: Object contains u"),
        ({"decoder": "cuda"}, "decoders[0]: cuda: "),
        ({"decoder": "no_such:thing"}, "decoders[0].decoder: decoder 'no_such:thing': cannot imp"),
        ({"decoder": "json:nothing"}, "decoders[0].decoder: decoder 'json:nothing': json has no"),
        (
            {"decoder": "tests.unit.server.broken_engine:open"},
            "decoders[0].decoder: 'tests.unit.server.broken_engine:open' cannot be imported: KeyE",
        ),
        (
            {"sources": (SourceTable(), SourceTable(options={"nonsense": 1}))},
            "decoders[0].sources[1].options: Object contains unknown field `nonsense`; its options",
        ),
        (
            {"sources": (SourceTable(source="replay", options={"layers": "x"}),)},
            "decoders[0].sources[0].options: Expected `int`, got `str` - at `$.layers`",
        ),
        (
            {"sources": (SourceTable(source="no_such:thing"),)},
            "decoders[0].sources[0].source: source 'no_such:thing': cannot import it",
        ),
        ({"sources": (SourceTable(source="cuda"),)}, "decoders[0].sources[0]: cuda: "),
    ],
)
def test_what_an_engine_would_refuse_is_refused_before(
    table: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if "cuda: " in said and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    directory = model_directory(tmp_path / "model")
    asked = asked_of(directory, DecoderTable(model="m", context=CONTEXT, **table))
    with pytest.raises(Refused) as caught:
        measure({"decoders": [asked]}, lambda told: None)
    assert str(caught.value).startswith(said)


def test_what_another_environment_has_is_not_looked_at(tmp_path: Path, other_python: str) -> None:
    directory = model_directory(tmp_path / "model")
    source = SourceTable(source="no_such:thing", python=other_python)
    table = DecoderTable(model="m", context=CONTEXT, decoder="cuda", python=other_python)
    for each in (table, replace(table, decoder="no_such:thing", sources=(source,))):
        measure({"decoders": [asked_of(directory, each)]}, lambda told: None)


def test_memory_without_a_model_is_that_of_what_is_replayed(tmp_path: Path) -> None:
    geometry = {"layers": 4, "heads": 2, "head_dim": 64, "dtype": "float16"}
    source = SourceTable(source="replay", slots=1500, options=geometry)
    table = DecoderTable(model="m", decoder="null", context=1024, sources=(source,))
    (found,) = measured([planned(table, tmp_path)], [3])
    assert found is not None
    kv = 4 * 2 * 2 * 64 * 2 * 1024
    assert found.lane == kv
    assert kv < found.slot < kv + 3 * 4096
    assert (found.lanes, found.slots, found.weights) == (3 * kv, 1500 * found.slot, 0)


@pytest.mark.parametrize("by", [{"keep_bytes": 7}, {"options": {"keep_nbytes": 7}}])
def test_kept_prompts_count_as_what_is_taken_here(by: dict[str, Any]) -> None:
    for decoder, kept in (("cpu", 7), ("cuda", 0)):
        table = DecoderTable(model="m", decoder=decoder, **by)
        found = sizes._sizes(table, 1, 10, 20, 0)
        assert found.kept == kept
        assert found.reserved == found.lanes + 40 + kept
