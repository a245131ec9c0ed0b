"""Routes on a real model: what streaming hides, what it costs the prefill, what the tail is.

The same prompt goes whole, streamed, streamed, whole (A/B/B/A) through one source and one owner.
With `busy`, another request decodes meanwhile, so that its steps stand in the way of imports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.backends.load import open_decoder
from headrace.bench.rows import busy_share
from headrace.engine.text import max_positions_of
from headrace.errors import HeadraceError, Refused
from headrace.messages import Route
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

NEIGHBOUR_PROMPT = 32
NEIGHBOUR_TOKENS = 4096  # more than it can decode while the other is prefilled


class RouteFailed(HeadraceError):
    """A benchmark's request did not finish; the text is its reason."""


def run(
    model: Path,
    tokens: list[int],
    repeats: int,
    *,
    busy: bool,
    group_layers: int = 1,
    routes: tuple[Route, Route] = ("whole", "streamed"),
) -> Iterator[dict[str, Any]]:
    """Two rows per repeat and order, each with the route's figures in ns and bytes."""
    context = min(len(tokens) + (NEIGHBOUR_TOKENS if busy else 64), max_positions_of(model))
    if busy and context < NEIGHBOUR_PROMPT + 2:
        raise Refused(
            f"the model holds {context} positions and --busy needs {NEIGHBOUR_PROMPT + 2}; "
            "leave --busy out"
        )
    options = {"model": str(model), "dtype": "float32", "threads": 1}
    handle = SourceHandle("torch", options)
    handle.start()
    try:
        decoder = open_decoder("cpu", {**options, "lanes": 2, "context": context})
        owner = DecoderOwner(decoder, context=context)
        owner.attach(handle)
        try:
            _one(owner, tokens[:64], "streamed", group_layers)
            for repeat in range(repeats):
                a, b = routes
                for order, route in enumerate((a, b, b, a)):
                    neighbour = None
                    if busy:
                        endless = RequestOptions(max_tokens=context - NEIGHBOUR_PROMPT)
                        neighbour = owner.submit(tokens[:NEIGHBOUR_PROMPT], endless)
                        while len(neighbour.tokens) < 2:
                            if neighbour.done:
                                raise RouteFailed(neighbour.reason)
                            owner.turn(1.0)
                    row = _one(owner, tokens, route, group_layers)
                    if neighbour is not None:
                        owner.cancel(neighbour)
                        owner.drain()
                    yield {"repeat": repeat, "order": order, "route": route, "busy": busy, **row}
        finally:
            owner.close()
    finally:
        handle.close()


def _one(owner: DecoderOwner, tokens: list[int], route: Route, group_layers: int) -> dict[str, Any]:
    machine_busy = busy_share(0.1)
    request = owner.submit(
        tokens, RequestOptions(route=route, group_layers=group_layers, max_tokens=1)
    )
    owner.run_until_done(request)
    measured = request.measured
    if measured is None:
        raise RouteFailed(request.reason)
    return {
        "prompt_tokens": len(tokens),
        "prefill_ns": measured.source_final_ns - measured.prefill_begun_ns,
        "ttft_ns": measured.first_token_ns - measured.submitted_ns,
        "tail_ns": measured.published_ns - measured.source_final_ns,
        "tail_from_last_group_ns": measured.published_ns - measured.last_group_ns,
        "kv_nbytes": measured.kv_nbytes,
        "nbytes_before_final": measured.nbytes_before_final,
        "last_group_nbytes": measured.last_group_nbytes,
        "groups": measured.groups,
        "decode_in_the_way_ns": measured.decode_in_the_way_ns,
        "machine_busy_before": round(machine_busy, 3),
        "load_1min": os.getloadavg()[0],
    }
