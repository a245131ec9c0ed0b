"""When imports are begun, and what they are cut into: the owner's turns and its decode steps first.

Nearest to publishing first is the machine's rule. Here it is decided how much of a turn they may
have: until a budget is used, until too much is in flight on a device that copies by itself, until
something comes in that may concern them, and where entries decode, by their share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from headrace.backends.base import CopyTuning
from headrace.ids import ImportId
from headrace.protocol.owner import Owner
from headrace.runtime.share import ImportShare

BUDGET_NBYTES: Final = 64 << 20  # imported in one turn
IDLE_CHUNK_NBYTES: Final = 32 << 20  # of one import: fewer of them add less to a tail,
SHARED_CHUNK_NBYTES: Final = 8 << 20  # but where entries decode, each delays a token
MAX_FLIGHTS: Final = 64  # imports begun and not fenced, on a device that copies by itself,
MAX_FLIGHT_NBYTES: Final = 16 << 20  # and their bytes, beyond which no piece is begun, if unknown
LOOK_AGAIN_S: Final = 0.001  # at a link that has work for longer than this


class InFlight(Protocol):
    """An import that is begun and not fenced."""

    @property
    def nbytes(self) -> int: ...


class Importing:
    """Begins the imports of one owner."""

    def __init__(
        self,
        machine: Owner,
        flights: Mapping[ImportId, InFlight],
        *,
        share: float,
        chunk_nbytes: int | None,
        budget_nbytes: int | None,
        copies: CopyTuning | None = None,
    ) -> None:
        """`chunk_nbytes` and `budget_nbytes`: None for what is best by itself.

        `copies`: how to feed a device that copies by itself; a given `chunk_nbytes` goes before its
        own.
        """
        self._machine = machine
        self._flights = flights
        self._share = ImportShare(share)
        self._budget_nbytes = budget_nbytes or BUDGET_NBYTES
        self._copies = copies
        idle, shared = IDLE_CHUNK_NBYTES, SHARED_CHUNK_NBYTES
        if copies is not None:
            idle, shared = copies.chunk_nbytes, copies.shared_chunk_nbytes
        self._idle_chunk_nbytes = chunk_nbytes or min(idle, self._budget_nbytes)
        self._shared_chunk_nbytes = chunk_nbytes or min(shared, self._budget_nbytes)

    def begin(
        self, carry_out: Callable[[], None], is_interrupted: Callable[[], bool], *, decoding: bool
    ) -> None:
        """Begin imports piece by piece, as far as a turn may; `decoding`: a step waits for them."""
        shared, idle = self._shared_chunk_nbytes, self._idle_chunk_nbytes
        self._machine.chunk_nbytes = shared if decoding else idle
        budget = self._budget_nbytes
        room = self._room(decoding=decoding)
        while budget > 0 and self._has_room(room) and (not decoding or self._share.may_begin):
            begun_ns = time.monotonic_ns()
            begun = self._machine.begin_imports(1, begun_ns)
            carry_out()
            if begun and decoding:
                self._share.spent(time.monotonic_ns() - begun_ns)
            budget -= begun
            if not begun or is_interrupted():
                return

    def decode(self, step: Callable[[], None], *, decoding: bool) -> None:
        """Take one decode step, which earns imports their share; without one nothing is owed."""
        if not decoding:
            self._share.clear()
            return
        begun_ns = time.monotonic_ns()
        step()
        self._share.decoded(time.monotonic_ns() - begun_ns)

    def look_again_s(self) -> float:
        """How long the host may look away from what is in flight, with nothing else to do.

        A link that is full has work for longer than this; the end of an import is waited for with
        open eyes, since it is somebody's first token.
        """
        full = self._copies is not None and not self._has_room(self._copies.in_flight_nbytes)
        return LOOK_AGAIN_S if full else 0.0

    def _room(self, *, decoding: bool) -> int:
        """Bytes in flight at which no piece is begun."""
        if self._copies is None:
            return MAX_FLIGHT_NBYTES
        if decoding:
            return self._copies.shared_in_flight_nbytes
        return self._copies.in_flight_nbytes

    def _has_room(self, room: int) -> bool:
        nbytes = sum(flight.nbytes for flight in self._flights.values())
        return len(self._flights) < MAX_FLIGHTS and nbytes < room
