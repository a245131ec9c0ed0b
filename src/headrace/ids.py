"""Names of things: requests, attempts, slots, generations, and the rectangles told as progress.

All are plain integers, so that a message stays small and none can carry an address or a client's
text. A client's own request id is a label at the edge and never appears here.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

SourceId = NewType("SourceId", int)
SlotIndex = NewType("SlotIndex", int)
Generation = NewType("Generation", int)
ImportId = NewType("ImportId", int)


class RequestId(NamedTuple):
    """One request: `epoch` differs each time an owner starts, `counter` never repeats in it."""

    epoch: int
    counter: int

    def __str__(self) -> str:
        return f"{self.epoch:x}.{self.counter}"


class AttemptId(NamedTuple):
    """One try of a request; a message of attempt 1 can never touch attempt 2."""

    epoch: int
    counter: int
    attempt: int

    @property
    def request(self) -> RequestId:
        return RequestId(self.epoch, self.counter)

    @property
    def next(self) -> AttemptId:
        """The next try of the same request."""
        return AttemptId(self.epoch, self.counter, self.attempt + 1)

    def __str__(self) -> str:
        return f"{self.epoch:x}.{self.counter}/{self.attempt}"


class Span(NamedTuple):
    """A rectangle of model layers x absolute prompt positions, both half open."""

    layer_start: int
    layer_stop: int
    start: int
    stop: int

    def __str__(self) -> str:
        layers = f"layers [{self.layer_start}, {self.layer_stop})"
        return f"{layers} x positions [{self.start}, {self.stop})"
