"""The source of headrace's own rows: a fresh pattern for each request, in place or in two copies.

In the 1-copy form it writes the pattern into the slot, as a device does that has the slot mapped.
In the 2-copy form the pattern lies in private memory and is copied into the slot while the owner
imports: what a device without access to the slot does. That memory is filled by a request of its
own, so that neither its time nor its CPU time is in the row. Loaded as
`headrace.bench.peers.source:open`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.backends.base import Cells, PrefillSink
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.bench.peers.ends.memory import Pattern
from headrace.engine.host import HostMemory
from headrace.geometry import Manifest
from headrace.ids import Span

MOVE, FILL = 0, 1
_DIGITS = 6
PROMPT_TOKENS = 1 + _DIGITS
"""The least length of a prompt, which says what to do and with which seed."""

MAX_SEED = 16**_DIGITS


class PatternOptions(ReplayOptions, frozen=True, forbid_unknown_fields=True):
    """Replay's geometry. private_nbytes: private memory of the 2-copy form; 0 = in place."""

    private_nbytes: int = 0


def prompt_of(word: int, seed: int, num_tokens: int) -> list[int]:
    """A prompt of at least `PROMPT_TOKENS` that tells the source what to do."""
    digits = [seed // 16**place % 16 for place in range(_DIGITS)]
    return [word, *digits, *[0] * (num_tokens - PROMPT_TOKENS)]


def open(options: Mapping[str, Any]) -> PatternEngine:
    """The factory; options as in `PatternOptions`."""
    return PatternEngine(read_options(options, PatternOptions, "pattern"))


class PatternEngine:
    """Emits the pattern, laid out as the slot's KV area: byte i of the area is byte i of it."""

    def __init__(self, options: PatternOptions) -> None:
        self._manifest = ReplayEngine(options).manifest()
        nbytes = options.private_nbytes
        self._private = HostMemory(nbytes) if nbytes else None

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        word, *digits = tokens[:PROMPT_TOKENS]
        seed = sum(digit * 16**place for place, digit in enumerate(digits))
        if self._private is None:
            pattern: Pattern | None = Pattern(seed)
        else:
            pattern = None
            if word == FILL:
                Pattern(seed).write(self._private.address, 0, self._private.nbytes)
        options, stop = sink.options, len(tokens)
        streamed = options.route == "streamed"
        everything = [[range(len(sink.plan.layers))]]
        groups = sink.plan.layer_groups(options.group_layers, options.emission)
        step = options.chunk or stop
        for group in groups if streamed else everything:
            for begun in range(start, stop, step):
                spans = [Span(run.start, run.stop, begun, min(begun + step, stop)) for run in group]
                with sink.write(*spans) as writer:
                    for layer in (layer for run in group for layer in run):
                        for cells in writer.cells(layer):
                            self._put(cells, sink.plan.slot.kv_offset, pattern)
        sink.final(bytes(sink.plan.slot.logits_nbytes))

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _put(self, cells: Cells, kv_offset: int, pattern: Pattern | None) -> None:
        for number, row in enumerate(cells.rows()):
            offset = cells.region.offset + number * cells.region.stride - kv_offset
            target = ctypes.addressof(ctypes.c_char.from_buffer(row))
            if pattern is not None:
                pattern.write(target, offset, len(row))
            elif self._private is not None:
                ctypes.memmove(target, self._private.address + offset, len(row))
