"""Slots: who may write or read one cell of a slab, and when it may be used again.

A slot is leased to one attempt at a time. The lease has two kinds of token. The **write token** is
out from the grant until the source gives it back with its last message, or is proven dead. A **read
token** is out while an import reads the slot, one per import. A hand-off that is done with its slot
ends the lease; from then on nothing begins, and the slot is FREE again only when every token is
back. A deadline leads to QUARANTINED, which is not FREE: the same proof is needed to leave it.

Each return to FREE raises the generation, so that whoever holds an old lease holds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from headrace.errors import LocalProtocolError, RemoteProtocolError, WouldBlock
from headrace.ids import AttemptId, Generation, ImportId, SlotIndex
from headrace.protocol.machine import Machine


class SlotState(Enum):
    FREE = auto()
    LEASED = auto()
    READY = auto()
    READING = auto()
    DRAINING = auto()
    QUARANTINED = auto()


class SlotEvent(Enum):
    LEASE = auto()
    READ_BEGIN = auto()
    READ_END = auto()
    READERS_GONE = auto()
    READERS_LEFT = auto()
    WRITER_BACK = auto()
    END = auto()
    DEADLINE = auto()
    QUIET = auto()


_S, _E = SlotState, SlotEvent


class Lease(NamedTuple):
    """The identity of a lease: valid while the slot has this generation and this holder."""

    slot: SlotIndex
    generation: Generation
    attempt: AttemptId


class Slot(Machine[SlotState, SlotEvent]):
    """One slot of one slab."""

    TABLE: ClassVar = {
        _S.FREE: {_E.LEASE: _S.LEASED},
        _S.LEASED: {
            _E.READ_BEGIN: _S.LEASED,
            _E.READ_END: _S.LEASED,
            _E.WRITER_BACK: _S.READY,
            _E.END: _S.DRAINING,
        },
        _S.READY: {
            _E.READ_BEGIN: _S.READING,
            _E.READERS_LEFT: _S.READING,
            _E.END: _S.DRAINING,
        },
        _S.READING: {
            _E.READ_BEGIN: _S.READING,
            _E.READ_END: _S.READING,
            _E.READERS_GONE: _S.READY,
            _E.END: _S.DRAINING,
        },
        _S.DRAINING: {
            _E.READ_END: _S.DRAINING,
            _E.WRITER_BACK: _S.DRAINING,
            _E.DEADLINE: _S.QUARANTINED,
            _E.QUIET: _S.FREE,
        },
        _S.QUARANTINED: {
            _E.READ_END: _S.QUARANTINED,
            _E.WRITER_BACK: _S.QUARANTINED,
            _E.QUIET: _S.FREE,
        },
    }

    def __init__(self, index: SlotIndex) -> None:
        super().__init__(SlotState.FREE, f"slot {index}")
        self.index = index
        self.generation = Generation(0)
        self.holder: AttemptId | None = None
        self.writer_out = False
        self.readers: set[ImportId] = set()
        self.draining_since_ns = 0

    def lease(self, attempt: AttemptId) -> Lease:
        """Grant the slot to `attempt`; the write token is out from here on."""
        self._check(SlotEvent.LEASE)
        self.holder = attempt
        self.writer_out = True
        self._step(SlotEvent.LEASE)
        return Lease(self.index, self.generation, attempt)

    def begin_read(self, token: ImportId) -> None:
        """Hand out a read token."""
        self._check(SlotEvent.READ_BEGIN)
        if token in self.readers:
            raise LocalProtocolError(f"{self._name}: read token {token} is out already")
        self.readers.add(token)
        self._step(SlotEvent.READ_BEGIN)

    def end_read(self, token: ImportId) -> None:
        """Take a read token back, once."""
        self._check(SlotEvent.READ_END)
        if token not in self.readers:
            raise LocalProtocolError(f"{self._name}: read token {token} is not out")
        self.readers.remove(token)
        self._step(SlotEvent.READ_END)
        self._settle()

    def writer_back(self) -> None:
        """The write token is back, by the source's message or by proof of its death.

        Raises:
            RemoteProtocolError: the token is not out.
        """
        if not self.writer_out:
            raise RemoteProtocolError(f"{self._name}: the write token is not out")
        self._check(SlotEvent.WRITER_BACK)
        self.writer_out = False
        self._step(SlotEvent.WRITER_BACK)
        self._settle()

    def end(self, now_ns: int) -> None:
        """The hand-off is done with the slot: begin nothing, wait for the tokens."""
        self._check(SlotEvent.END)
        self.draining_since_ns = now_ns
        self._step(SlotEvent.END)
        self._settle()

    def deadline(self) -> None:
        """Draining took too long; set the slot apart until its tokens are back."""
        self._check(SlotEvent.DEADLINE)
        self._step(SlotEvent.DEADLINE)

    def tokens_out(self) -> Iterator[str]:
        """Names of the tokens that are out."""
        if self.writer_out:
            yield "write"
        for token in sorted(self.readers):
            yield f"read {token}"

    def _settle(self) -> None:
        if self.state is SlotState.READY and self.readers:
            self._step(SlotEvent.READERS_LEFT)
        if self.state is SlotState.READING and not self.readers:
            self._step(SlotEvent.READERS_GONE)
        if self.allows(SlotEvent.QUIET) and not self.writer_out and not self.readers:
            self.holder = None
            self.generation = Generation(self.generation + 1)
            self._step(SlotEvent.QUIET)


class SlotTable:
    """All slots of one slab."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot(SlotIndex(index)) for index in range(num_slots)]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: SlotIndex) -> Slot:
        return self._slots[index]

    @property
    def num_free(self) -> int:
        return sum(slot.state is SlotState.FREE for slot in self._slots)

    def lease(self, attempt: AttemptId) -> Lease:
        """Lease the lowest free slot.

        Raises:
            WouldBlock: none is free.
        """
        for slot in self._slots:
            if slot.state is SlotState.FREE:
                return slot.lease(attempt)
        raise WouldBlock(f"no slot free of {len(self._slots)}")

    def statistics(self) -> dict[str, int]:
        """How many slots are in each state, by the state's name in lower case."""
        counts = Counter(slot.state for slot in self._slots)
        return {state.name.lower(): counts[state] for state in SlotState}
