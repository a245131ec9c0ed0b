"""Whole, chunked and streamed are equal bit by bit on the two real models, and so is one process.

Where equality ends: with another number of torch threads, another prefill chunk, another attention
implementation or another dtype the numbers differ a little on every route alike, since these change
the order of additions. They are part of the pairing and fixed here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.rows import stamp
from headrace.runtime.requests import RequestOptions
from tests.e2e.real_models import (
    NUM_LAYERS,
    WINDOWS,
    Outcome,
    hand_off,
    owner_of,
    prompt_of,
    single_process,
)

DECODED = 8
CHUNK = 128
SUBSET = {"smollm2-135m": (1, 127, 128, 129), "gemma3-270m": (1, 511, 512, 513)}
MATRIX = {
    "smollm2-135m": (1, 2, 127, 128, 129, 255, 256, 257, 700),
    "gemma3-270m": (1, 2, 127, 128, 129, 511, 512, 513, 639, 640, 641, 1100),
}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def routes(name: str, groups: tuple[int, ...], prefill_chunk: int = 0) -> Iterator[RequestOptions]:
    """Whole, chunked, and streamed by each group size and by cache group."""
    fixed = {"max_tokens": DECODED, "audit": True, "prefill_chunk": prefill_chunk}
    yield RequestOptions(route="whole", **fixed)  # type: ignore[arg-type]
    yield RequestOptions(route="chunked", chunk=CHUNK, **fixed)  # type: ignore[arg-type]
    for group_layers in groups:
        yield RequestOptions(route="streamed", group_layers=group_layers, **fixed)  # type: ignore[arg-type]
    if WINDOWS[name]:
        yield RequestOptions(
            route="streamed",
            group_layers=groups[-1],
            emission="cache_groups",
            digest=True,
            **fixed,  # type: ignore[arg-type]
        )


@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SUBSET)
def test_every_route_equals_one_process(name: str) -> None:
    lengths = SUBSET[name]
    with owner_of(name, context=max(lengths) + 64) as owner:
        for num_tokens in lengths:
            tokens = prompt_of(name, num_tokens)
            found = {hand_off(owner, tokens, o) for o in routes(name, (1, NUM_LAYERS[name]))}
            assert len(found) == 1, f"{name}, {num_tokens} tokens: routes differ"
            (outcome,) = found
            assert (outcome.tokens, outcome.logits) == single_process(name, tokens, DECODED)


@pytest.mark.full_matrix
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MATRIX)
def test_full_matrix(name: str) -> None:
    """Every length, group size and prefill chunk; the rows are kept in benchmarks/results."""
    rows = []
    with owner_of(name, context=max(MATRIX[name]) + 64) as owner:
        for num_tokens in MATRIX[name]:
            tokens = prompt_of(name, num_tokens)
            for prefill_chunk in (0, CHUNK):
                begun = time.monotonic()
                asked = list(routes(name, (1, 3, NUM_LAYERS[name]), prefill_chunk))
                found: list[Outcome] = [hand_off(owner, tokens, o) for o in asked]
                alone = single_process(name, tokens, DECODED)
                rows.append(
                    {
                        "model": name,
                        "prompt_tokens": num_tokens,
                        "prefill_chunk": prefill_chunk,
                        "routes": len(asked),
                        "routes_equal": len(set(found)) == 1,
                        "equals_one_process": (found[0].tokens, found[0].logits) == alone,
                        "tokens_equal_one_process": found[0].tokens == alone[0],
                        "decoded": DECODED,
                        "seconds": round(time.monotonic() - begun, 1),
                    }
                )
    if os.environ.get("HEADRACE_KEEP_RESULTS") == "1":
        lines = [json.dumps({"claim": "exactness", "stamp": stamp()}), *map(json.dumps, rows)]
        (RESULTS / f"exactness-{name}.jsonl").write_text("\n".join(lines) + "\n")
    assert all(row["routes_equal"] for row in rows)
    assert all(row["equals_one_process"] for row in rows if not row["prefill_chunk"])
