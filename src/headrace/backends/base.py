"""The two contracts that a device implements, and the few facts that they exchange.

A **prefill engine** lives in a source process and writes cells into its slot through a sink. A
**decoder** lives in the owner process and copies cells from a slot into a reservation. Neither
knows the protocol. One thread drives a vendor runtime; no method here is called from two threads.

Host bytes are passed as memoryviews. A tensor over a slot must be made by `np.frombuffer(view)` and
`torch.from_numpy`, which keep the mapping alive, and never by `torch.frombuffer`, which does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

from headrace.errors import DeviceError
from headrace.geometry import Layout, Manifest
from headrace.ids import Span
from headrace.messages import DeviceTimes, Prefill
from headrace.plan import Copy, Plan, Region


class Cells(NamedTuple):
    """The writable place of positions [start, stop) of one part of one layer in a slot.

    Its bytes are [heads, stop - start, head_dim] in rows of one head each (`head_major`), or
    [stop - start, heads, head_dim] in one row (`token_major`), in the part's dtype.
    """

    buffer: memoryview
    region: Region
    layer: int
    part: int
    start: int
    stop: int

    def rows(self) -> list[memoryview]:
        """The rows of the region, each a writable contiguous view of bytes."""
        offset, rows, nbytes, stride = self.region
        return [self.buffer[offset + at * stride :][:nbytes] for at in range(rows)]


class SpanWriter(Protocol):
    """Writable cells of spans that are announced together; leaving the block announces them."""

    def cells(self, layer: int) -> list[Cells]:
        """The places of a layer's parts in this writer's spans; empty if it has no cells there."""

    def commit(self) -> None:
        """Every cell is written: announce. The views must not be written after this."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class TimedWriter(Protocol):
    """A writer that takes a device's own word for when its cells were computed and copied."""

    def ran(self, computed: DeviceTimes, copied: DeviceTimes) -> None:
        """By events of the device: call it before the commit."""


class PrefillSink(Protocol):
    """Where an engine puts one attempt. Every method raises `Cancelled` once it is withdrawn."""

    plan: Plan
    options: Prefill

    def check(self) -> None:
        """Say that the engine is at work. Call it at least once per layer, on every route.

        It is how a cancel reaches an engine that has nothing to write yet, and what holds the
        progress deadline off meanwhile.
        """

    def write(self, *spans: Span) -> SpanWriter:
        """A writer for the cells of `spans`, whose layers or positions must not overlap."""

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        """The source-final input: the last position's row of logits, or a token id.

        All cells must be committed before. `ready_ns` (CLOCK_MONOTONIC) tells when it was ready, if
        that was before the last cells were written; by default it is now.
        """


class PrefillEngine(Protocol):
    """What a prefill device implements.

    `start` > 0 asks for positions [start, n) only: the decoder has the others. Only an engine whose
    manifest says how (`prefix`) is asked. It cuts its computation at the grant's `cuts`, of which
    `start` is the last, so that the cells are those of a run from 0 that is cut there.
    """

    def manifest(self) -> Manifest: ...

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """What a device that copies by itself is fed with, in bytes.

    chunk_nbytes: of one import, from where on its link is as fast as it gets and the owner's own
    cost of a piece is small beside it. shared_chunk_nbytes: the same while entries decode, where a
    piece delays a token. in_flight_nbytes: begun and not fenced, that keep the link busy.
    shared_in_flight_nbytes: the same while entries decode, so that an import gives way.
    """

    chunk_nbytes: int
    shared_chunk_nbytes: int
    in_flight_nbytes: int
    shared_in_flight_nbytes: int


@dataclass(frozen=True, slots=True)
class Caps:
    """What a decoder device can do.

    max_lanes: most reservations and entries at once. ordered_copy: imports have a fence that proves
    their end; without it an owner refuses to start. device_events: fences are device events.
    decodes: whether `decode_step` computes anything. decode_batch: most entries that one decode
    step computes together; 1 is the exact mode, one sequence per forward. copies: how to feed a
    device that copies by itself. reads_back: whether `read` gives the very bytes that were sent,
    which a cache of another number format cannot. work: the names of those statistics that count
    what was done, and so only grow; all others are equal again when all is free again.
    """

    max_lanes: int
    ordered_copy: bool = True
    device_events: bool = False
    decodes: bool = True
    decode_batch: int = 1
    copies: CopyTuning | None = None
    reads_back: bool = True
    work: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Storage of one lane for a prompt of `num_tokens`, invisible until published."""

    lane: int
    num_tokens: int
    serial: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A published cache entry: what was the reservation of the same lane and serial."""

    lane: int
    num_tokens: int
    serial: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The prompt's cells of an entry, kept beyond it for later prompts; they never change.

    storage: the number of the lane memory that its full-attention rows lie in, which entries share
    where one continues another. storage_nbytes: bytes of that memory. nbytes: bytes of what it has
    for itself, the copied tails of sliding layers.
    """

    serial: int
    num_tokens: int
    storage: int
    storage_nbytes: int
    nbytes: int


class ReserveFailed(DeviceError):
    """The device failed while a reservation was filled: its lane is not known to be quiet."""

    def __init__(self, text: str, reservation: Reservation) -> None:
        super().__init__(text)
        self.reservation = reservation


@runtime_checkable
class KeepsEntries(Protocol):
    """A decoder whose published entries can outlive their lanes.

    keeps_nbytes: what `kept_nbytes` may come to, 0 if it was told to keep none. It is the caller
    who keeps to it, by evicting before anything else is reserved.
    """

    keeps_nbytes: int

    @property
    def kept_nbytes(self) -> int:
        """Bytes of lane memories that no lane uses and something is kept in, and of all tails."""

    def keep(self, entry: Entry) -> Kept:
        """Keep a published entry's prompt; called before its first decode step.

        Full-attention rows stay where they are, since decode only appends to them. The rows of
        sliding layers are copied, since decode overwrites them.
        """

    def can_reuse(self, kept: Kept, positions: int) -> bool:
        """Whether positions [0, `positions`) of it are enough to go on from: a sliding layer needs
        its rows of the window that ends there.
        """

    def reserve_from(self, kept: Kept, positions: int, num_tokens: int) -> Reservation:
        """As `reserve`, with the live cells of positions [0, `positions`) of `kept` in place.

        Later imports, and what decodes, come after these cells on the device. Raises as `reserve`;
        ReserveFailed where a lane was set aside and the cells could not be had.
        """

    def storage_of(self, held: Reservation | Entry) -> int:
        """The number of the lane memory that a reservation or an entry uses."""

    def evict(self, kept: Kept) -> None:
        """Keep it no longer."""


@runtime_checkable
class ReservesByLabel(Protocol):
    """A decoder whose storage its caller allocates: an attempt's is what was bound to its label."""

    def reserve_for(self, label: int | None, num_tokens: int) -> Reservation:
        """The reservation of what was bound; raises WouldBlock if nothing fitting is."""


@runtime_checkable
class ContinuesKept(Protocol):
    """An engine in the owner's process that computes on top of what the decoder keeps."""

    def continue_from(self, kept: Kept) -> None:
        """The next `prefill_stream` starts at a position that `kept` can be reused up to."""


class HostRange(NamedTuple):
    """Host memory of this process: what a slab is to a device that copies from or to it."""

    address: int
    nbytes: int


@runtime_checkable
class PinsSlabs(Protocol):
    """An engine or a decoder whose device copies faster from host memory that it was told of."""

    def register(self, slab: HostRange) -> None:
        """Pin a slab, once it is mapped. Where that fails, copies are pageable; it never raises."""

    def unregister(self, slab: HostRange) -> None:
        """The slab is about to be unmapped; no copy of it is in flight."""


@runtime_checkable
class PrefillsItself(Protocol):
    """A decoder that can also prefill, in the owner's own process.

    The engine may share the decoder's weights and device. It is called by the owner's thread, and
    from within its calls of the sink every method of the decoder but `decode_step` may be called:
    a decoder whose runtime cannot have that must not offer one.
    """

    def prefill_engine(self) -> PrefillEngine:
        """An engine that fits this decoder; whoever asked for it closes it."""


class SlotView(NamedTuple):
    """A slot as the owner sees it: its bytes, their address, and the layout of its KV area."""

    buffer: memoryview
    address: int
    layout: Layout


class Fence(Protocol):
    """The proof that an import finished."""

    def done(self) -> bool:
        """Whether it has; raises DeviceError if the copy failed."""


@runtime_checkable
class TimedFence(Protocol):
    """A fence of a device with events, which tell when its copy ran."""

    def done(self) -> bool: ...

    def times(self) -> DeviceTimes:
        """When the copy ran, by device events; once it is done."""


@runtime_checkable
class ForgetsImports(Protocol):
    """A decoder that counts what was imported, to see that all of a prompt is there."""

    def forget_imports(self, reservation: Reservation) -> None:
        """What was imported into it counts no more: what is to be published comes from here on.

        Said before the first import of each attempt, since a further one keeps the reservation.
        """


class Done:
    """The fence of a copy that finished before it returned."""

    def done(self) -> bool:
        return True


class Decoder(Protocol):
    """What a decoder device implements. Only the owner's thread calls it."""

    caps: Caps

    def manifest(self) -> Manifest: ...

    def reserve(self, num_tokens: int) -> Reservation:
        """Set a lane aside; raises WouldBlock if none is free, DeviceError if the device fails."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        """Copy cells from the slot into the reservation; a cell may be copied more than once."""

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        """The prompt's bytes of a copy's cells as landed, in `layout` order, once it is fenced."""

    def publish(self, reservation: Reservation) -> Entry:
        """Make the reservation visible to decode, in one step."""

    def free(self, held: Reservation | Entry) -> None:
        """Give the lane back; nothing may be in flight into it."""

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Feed each entry its next token; returns each one's float32 row of logits."""

    def statistics(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...
