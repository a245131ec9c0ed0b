"""What a card's own prefill should give: keys and values of a checkpoint, by torch in float32.

It runs in headrace's own environment, as `headrace atom probe` has it, and leaves a file for the
probe, which runs in the vendor's: `python -m headrace.engine.atom.reference`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.engine.atom import prompts
from headrace.engine.atom.artifact import read_geometry
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.prompts import Reference
from headrace.engine.checkpoint import fingerprint
from headrace.engine.layers import geometry
from headrace.engine.loading import load_model
from headrace.engine.prefill import TakenCache, run_prefill
from headrace.errors import HeadraceError, Refused
from headrace.geometry import Layer

CHUNK = 512
"""Positions that are computed at once."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 the file was written, 2 it was not."""
    parser = argparse.ArgumentParser(prog="headrace.engine.atom.reference")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--compiled", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args(arguments)
    try:
        prompts.write(compute(asked.model, asked.compiled, threads=asked.threads), asked.out)
    except HeadraceError as exc:
        print(f"headrace: {exc}", file=sys.stderr)
        return 2
    return 0


def compute(directory: Path, compiled: Path, *, threads: int = 1) -> Reference:
    """Compute the longest prompt of the model that `compiled` was made of, and each one's logits.

    Raises:
        Refused: a directory holds no model, or the two are not of one model.
    """
    caches, positions = read_geometry(compiled)
    model = load_model(directory, threads=threads)
    layers = geometry(model.config, "source", "float32", positions)
    for cache in caches:
        _check(cache, layers, directory, compiled)
    lengths = prompts.lengths(caches, positions)
    tokens, chosen = prompts.tokens_of(max(lengths)), prompts.compared(caches)
    short = prompts.short_prompt(caches, positions)
    taken = _Taken({each: len(tokens) if each.layer in chosen else short for each in caches})
    last: dict[int, np.ndarray] = {}

    def forward(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = model.forward(ids, cache)
        if taken.stop in lengths:
            last[taken.stop] = logits.reshape(-1).to(torch.float32).cpu().numpy().copy()
        return logits

    run_prefill(model, layers, tokens, CHUNK, taken, cuts=lengths[:-1], forward=forward)
    return Reference(fingerprint(directory), tokens, taken.states, last)


def _check(cache: Cache, layers: Sequence[Layer], directory: Path, compiled: Path) -> None:
    has = "no such layer"
    if cache.layer < len(layers):
        parts = layers[cache.layer].parts
        has = f"{[(part.heads, part.head_dim) for part in parts]}"
        if parts and (parts[cache.part].heads, parts[cache.part].head_dim) == (
            cache.heads,
            cache.head_dim,
        ):
            return
    raise Refused(
        f"{compiled} was not compiled from {directory}: layer {cache.layer} has "
        f"{cache.heads} heads of {cache.head_dim} there and {has} here; name the checkpoint that "
        "it was compiled from",
        field="model",
    )


class _Taken:
    """Keeps the states of the first positions, so many of each cache; a `Taker`.

    stop: where the piece that is computed ends.
    """

    keep_full = False

    def __init__(self, positions: Mapping[Cache, int]) -> None:
        self.states = {
            (each.layer, each.part): np.zeros((each.heads, count, each.head_dim), np.float32)
            for each, count in positions.items()
        }
        self._start = self.stop = 0

    def begin(self, start: int, stop: int) -> None:
        self._start, self.stop = start, stop

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for part, states in enumerate((keys, values)):
            if (layer, part) in self.states:
                kept = self.states[layer, part][:, self._start : self.stop]
                kept[:] = states[:, : kept.shape[1]].to(torch.float32).numpy()

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        pass


if __name__ == "__main__":
    sys.exit(main())
