"""A decoder for tests of the serving benchmark: no model, and a text that depends on the prompt.

It takes what the replay source of a served model emits. After token t comes (31 t + 7) mod 251, so
that a text tells its prompt's first token apart and is the same at every attempt.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace.backends.base import Caps, Entry
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay

FACTORY: Final = "tests.bench.cheap_decoder:open"
VOCABULARY: Final = 256
GEOMETRY: Final = {"layers": 2, "heads": 1, "head_dim": 8}


def open(options: Mapping[str, Any]) -> CheapDecoder:
    """The factory; it takes no note of the model."""
    manifest = decoder_like(open_replay({**GEOMETRY, "vocab_size": VOCABULARY}).manifest())
    decoder = CheapDecoder(manifest, context=options["context"], lanes=options["lanes"])
    decoder.caps = Caps(max_lanes=options["lanes"])
    return decoder


class CheapDecoder(NullDecoder):
    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        rows = []
        for entry, token in active:
            self._check(entry)
            row = array("f", bytes(4 * VOCABULARY))
            row[(31 * token + 7) % 251] = 1.0
            rows.append(memoryview(row))
        return rows
