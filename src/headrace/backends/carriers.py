"""How a prefill's states come into the cells of a slot, and when these are announced.

A taker decides which cells a layer's states go to; a carrier brings them there. Where the model
computes in host memory a copy is over when it returns. A device copies by itself, see
`headrace.backends.device_carrier`.
"""

from __future__ import annotations

from typing import Protocol

from headrace.backends.base import PrefillSink, SpanWriter
from headrace.engine.prefill import States
from headrace.engine.tensors import copy_in


class Carrier(Protocol):
    """Brings states into the cells of one attempt. Any call raises `Cancelled` as its sink does."""

    def computed(self) -> None:
        """A layer's states are computed, or queued to be: tell the sink that work goes on."""

    def carry(self, writer: SpanWriter, layer: int, states: States, start: int) -> None:
        """Copy the states of a layer, positions from `start`, into the writer's cells of it.

        What both have is copied. The states may be overwritten or let go once this returns. They
        were made before the first call of this since the last `computed`.
        """

    def commit(self, writer: SpanWriter) -> None:
        """All cells of the writer were carried: announce it once they lie there, in this order."""

    def settle(self) -> None:
        """Announce all that was committed."""


class HostCarrier:
    """Copies states of host memory at once, and announces a writer when it is committed."""

    def __init__(self, sink: PrefillSink) -> None:
        self._sink = sink

    def computed(self) -> None:
        self._sink.check()

    def carry(self, writer: SpanWriter, layer: int, states: States, start: int) -> None:
        plan = self._sink.plan
        for place in writer.cells(layer):
            copy_in(place, plan.layers[layer].parts, plan.layout, states[place.part], start)

    def commit(self, writer: SpanWriter) -> None:
        writer.commit()

    def settle(self) -> None:
        pass
