"""One decode step of lanes, for all decoders whose lanes are a `LaneTable`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.backends.base import Entry
from headrace.backends.lane_table import LaneTable
from headrace.engine.batching import Batching, Fed
from headrace.engine.loading import LoadedModel


def decode_lanes(
    model: LoadedModel,
    table: LaneTable,
    batching: Batching | None,
    active: Sequence[tuple[Entry, int]],
) -> list[memoryview]:
    """Feed each entry its next token; returns each one's float32 row of logits.

    All entries advance by one position, or none does. Without `batching`, one sequence per forward.

    Raises:
        LocalProtocolError: an entry is stale or not published, given twice or full, or a token is
            unknown.
    """
    lanes = table.decoding([entry for entry, _ in active])
    for _, token in active:
        model.check_tokens((token,))
    before = [lane.length for lane in lanes]
    fed = [Fed(entry, lane, token) for lane, (entry, token) in zip(lanes, active, strict=True)]
    try:
        if batching is None:
            logits = [_decode_alone(model, each) for each in fed]
        else:
            logits = batching.step(fed)
        return [row.numpy().data for row in logits]
    except BaseException:
        for lane, length in zip(lanes, before, strict=True):
            lane.rewind(length)
        raise


def _decode_alone(model: LoadedModel, fed: Fed) -> torch.Tensor:
    ids = torch.tensor([[fed.token]], dtype=torch.long, device=model.device)
    return model.forward(ids, fed.lane.cache)
