"""When a prompt's cells are read out of the RNGD engine's caches and announced, by route.

The caches stay until the next prompt, so the routes differ only in when rows are read. A read may
be in flight: its cells are announced when its ticket says that they lie in the slot, in the order
in which they were asked for, and only by the one thread that drives the runtime.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

import torch

from headrace.backends.base import PrefillSink, SpanWriter
from headrace.backends.groups import Group, LayerGroups, cut
from headrace.engine.rngd.executor import Ticket
from headrace.engine.tensors import over_region
from headrace.errors import Unquiet
from headrace.ids import Span

LONGEST_WAIT_S: Final = 300.0
"""For one copy, with all that was queued before it: a card that is silent for longer is broken."""

Read = Callable[[int, int, int, int, torch.Tensor], Ticket]
"""Layer, part, first and last position, and where the rows go: `LayerProgram.read`."""


@dataclass
class _Announced:
    """A writer that was filled, and what tells that it was."""

    writer: SpanWriter
    tickets: list[Ticket] = field(default_factory=list)

    def done(self) -> bool:
        while self.tickets:
            if not self.tickets[-1].done():
                return False
            self.tickets.pop()
        return True


class Emitter:
    """Reads and announces the cells of one attempt. Any call may raise `Cancelled`."""

    def __init__(self, sink: PrefillSink, start: int, read: Read) -> None:
        self._sink = sink
        self._start = start
        self._read = read
        self._groups = LayerGroups(sink, start)
        self._group_of: dict[int, Group] = {}
        self._filling: dict[int, _Announced] = {}
        self._waiting: deque[_Announced] = deque()

    def begin(self, start: int, stop: int) -> None:
        """Positions [start, stop) are about to be computed."""
        if self._sink.options.route == "streamed":
            self._group_of = self._groups.of(start, stop)

    def final(self, layer: int) -> None:
        """A layer's K and V of the positions being computed are in its caches, or queued to be."""
        self._sink.check()
        group = self._group_of.get(layer)
        for batch in group.batches if group is not None else ():
            if batch.writer is None:
                batch.writer = self._sink.write(*batch.spans)
                self._filling[id(batch)] = _Announced(batch.writer)
            filling = self._filling[id(batch)]
            self._fill(filling, layer)
            if group is not None and layer == group.last:
                self._announce(self._filling.pop(id(batch)))
        self.poll()

    def end(self, start: int, stop: int) -> None:
        """Positions [start, stop) are computed in all layers."""
        match self._sink.options.route:
            case "streamed":
                self._group_of = {}
            case "chunked":
                for first, last in cut(self._sink, max(start, self._start), stop):
                    self._emit(first, last)
            case "whole":
                pass
            case unknown:
                assert_never(unknown)

    def finish(self) -> None:
        """All is computed: emit the rest and wait until all of it is announced."""
        if self._sink.options.route == "whole":
            self._emit(self._start, self._sink.plan.num_tokens)
        while self._waiting:
            self.wait_for(self._waiting[0])
            self.poll()

    def wait_for(self, ticket: Ticket) -> None:
        """Until it is done, hear a cancel and announce what lies in the slot.

        Raises:
            Unquiet: a card did not get there in LONGEST_WAIT_S.
        """
        until = time.monotonic() + LONGEST_WAIT_S
        while not ticket.done():
            self._sink.check()
            self.poll()
            if time.monotonic() > until:
                raise Unquiet(f"a copy from the card did not end in {LONGEST_WAIT_S:.0f} s")

    def poll(self) -> None:
        """Announce what lies in the slot by now."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().writer.commit()

    def _emit(self, first: int, last: int) -> None:
        """All layers of positions [first, last), as one span."""
        span = Span(0, len(self._sink.plan.layers), first, last)
        if first >= last or not self._sink.plan.span_nbytes(span):
            return
        filling = _Announced(self._sink.write(span))
        for layer in range(len(self._sink.plan.layers)):
            self._fill(filling, layer)
        self._announce(filling)
        self.poll()

    def _fill(self, filling: _Announced, layer: int) -> None:
        plan = self._sink.plan
        for cells in filling.writer.cells(layer):
            part = plan.layers[layer].parts[cells.part]
            count = cells.stop - cells.start
            rows = over_region(cells.buffer, cells.region, part, count, plan.layout)
            target = rows.permute(1, 0, 2)  # a slot's rows lie as the cache's do, token by token
            filling.tickets.append(self._read(layer, cells.part, cells.start, cells.stop, target))

    def _announce(self, filled: _Announced) -> None:
        self._waiting.append(filled)
