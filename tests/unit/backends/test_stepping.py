"""One step of several lanes: all advance, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.backends.base import Entry
from headrace.backends.lane_table import LaneTable
from headrace.backends.stepping import decode_lanes
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.errors import LocalProtocolError
from tests.e2e.families import directory_of


def two_entries(model: LoadedModel) -> tuple[LaneTable, list[Entry]]:
    facts = manifest(model.config, model.directory, "decoder", model.dtype, 8)
    table = LaneTable(facts.layers, 8, 2)
    return table, [table.publish(table.reserve(1)) for _ in range(2)]


def lengths(table: LaneTable, entries: list[Entry]) -> list[int]:
    return [lane.length for lane in table.decoding(entries)]


def test_all_advance() -> None:
    model = load_model(directory_of("llama"))
    table, entries = two_entries(model)
    rows = decode_lanes(model, table, None, [(entry, 1) for entry in entries])
    assert [len(row) for row in rows] == [model.vocab_size] * 2
    assert lengths(table, entries) == [2, 2]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_none_advances_where_one_fails(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(directory_of("llama"))
    table, entries = two_entries(model)
    real, calls = LoadedModel.forward, []

    def forward(self: LoadedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        calls.append(ids)
        logits = real(self, ids, cache)
        if len(calls) == fails_at:
            raise RuntimeError("lost")
        return logits

    monkeypatch.setattr(LoadedModel, "forward", forward)
    with pytest.raises(RuntimeError, match="lost"):
        decode_lanes(model, table, None, [(entry, 1) for entry in entries])
    assert lengths(table, entries) == [1, 1]


def test_a_token_is_refused_before_anything_is_computed() -> None:
    model = load_model(directory_of("llama"))
    table, entries = two_entries(model)
    with pytest.raises(LocalProtocolError, match="token ids"):
        decode_lanes(model, table, None, [(entries[0], 1), (entries[1], model.vocab_size)])
    assert lengths(table, entries) == [1, 1]
