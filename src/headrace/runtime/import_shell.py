"""The imports of one owner: begun as its machine commands, polled, and looked at as landed.

A decoder is another's code: whatever it raises is a fault of its device, and what it touched is not
known to be quiet.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from headrace.backends.base import Decoder, Entry, Fence, ForgetsImports, SlotView, TimedFence
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.plan import Copy
from headrace.protocol.commands import CheckDigest, StartImport
from headrace.protocol.owner import Owner
from headrace.runtime.active import Active, pass_on, reason_of
from headrace.runtime.digest import crc32
from headrace.runtime.local import LocalSource
from headrace.runtime.poison import PoisonMemory, poison_in
from headrace.runtime.worker import SourceHandle

_MOST_PLACES = 3  # of poison, as a reason names them


@dataclass(frozen=True, slots=True)
class _Flight:
    active: Active
    fence: Fence
    piece: Span
    begun_ns: int
    nbytes: int


class _After:
    """The fence of a copy that is begun once another one is fenced."""

    def __init__(self, before: Fence, begin: Callable[[], Fence]) -> None:
        self._before = before
        self._begin = begin
        self._copy: Fence | None = None

    def done(self) -> bool:
        if self._copy is None:
            if not self._before.done():
                return False
            self._copy = self._begin()
        return self._copy.done()


class ImportShell(ABC):
    """The part of a shell that imports."""

    def __init__(
        self,
        machine: Owner,
        decoder: Decoder,
        handles: Mapping[SourceId, SourceHandle | LocalSource],
    ) -> None:
        self._machine = machine
        self._decoder = decoder
        self._handles = handles
        self._active: dict[AttemptId, Active] = {}
        self._flights: dict[ImportId, _Flight] = {}
        self._poison = PoisonMemory()
        self._num_poisoned = 0  # publications that poison was found before
        self._imported = Counter(imports=0, nbytes=0, nbytes_before_final=0)  # of what is published

    @abstractmethod
    def _run_commands(self) -> None:
        """Carry out what the machine commands now."""

    def _start_import(self, command: StartImport) -> None:
        active = self._active[command.attempt]
        handle = self._handles[command.source]
        copies = active.the_plan.copies(command.piece)
        nbytes = sum(copy.nbytes for copy in copies)
        slot = SlotView(handle.slot(command.slot), handle.slot_address(command.slot), handle.layout)
        begin = partial(self._decoder.begin_import, active.reservation, slot, copies)
        begun_ns = time.monotonic_ns()
        try:
            if not active.imports_begun:
                active.imports_begun = True
                self._begin_anew(active)
            poison = active.request.options.poison
            fence = _After(self._poisoned(active), begin) if poison else begin()
        except BaseException as exc:
            self._machine.import_failed(command.import_id, reason_of(exc), time.monotonic_ns())
            pass_on(exc)
            return
        flight = _Flight(active, fence, command.piece, begun_ns, nbytes)
        if not self._landed(command.import_id, flight):
            self._flights[command.import_id] = flight

    def _poisoned(self, active: Active) -> Fence:
        """The fence of the poison in an attempt's reserved cells, begun before its first import."""
        if active.poisoned is None:
            plan = active.the_plan
            slot = active.poison_slot = self._poison.as_slot(plan)
            copies = plan.copies(plan.whole())
            active.poisoned = self._decoder.begin_import(active.reservation, slot, copies)
            self._begin_anew(active)
        return active.poisoned

    def _begin_anew(self, active: Active) -> None:
        """Have a decoder that counts what is imported count from here on."""
        if isinstance(self._decoder, ForgetsImports):
            self._decoder.forget_imports(active.reservation)

    def _published(self, active: Active, entry: Entry) -> None:
        """The entry is visible: what its imports came to counts."""
        active.published(entry)
        measured = active.record.measured(active.carried_nbytes)
        self._imported["imports"] += measured.imports
        self._imported["nbytes"] += active.record.nbytes_imported
        self._imported["nbytes_before_final"] += measured.nbytes_before_final

    def _poll_fences(self) -> None:
        for import_id, flight in list(self._flights.items()):
            given_up = not self._machine.is_in_flight(import_id)  # its storage is set apart
            if given_up or self._landed(import_id, flight):
                del self._flights[import_id]
        self._run_commands()

    def _landed(self, import_id: ImportId, flight: _Flight) -> bool:
        """Whether the import is over; reports it if so."""
        fence = flight.fence
        try:
            if not fence.done():
                return False
            ran = fence.times() if isinstance(fence, TimedFence) else None
        except BaseException as exc:
            self._machine.import_failed(import_id, reason_of(exc), time.monotonic_ns())
            pass_on(exc)
            return True
        now_ns = time.monotonic_ns()
        active = flight.active
        active.imported(flight.piece, flight.begun_ns, now_ns, flight.nbytes, ran)
        self._machine.import_done(import_id, now_ns)
        if active.callback_error:
            self._machine.cancel(active.request.request, now_ns, active.callback_error)
        return True

    def _check_digest(self, command: CheckDigest) -> None:
        """Look at the bytes as landed: those that were stamped, and none of them left unwritten."""
        active = self._active[command.attempt]
        found: list[str] = []
        try:
            actual = crc32(self._cells(active, command.span, found))
        except BaseException as exc:
            self._machine.import_failed(command.import_id, reason_of(exc), time.monotonic_ns())
            pass_on(exc)
            return
        reason = f"{_places(found)} not written when {command.span} were told" if found else ""
        self._machine.digest_checked(command.import_id, actual, time.monotonic_ns(), reason)

    def _cells(self, active: Active, span: Span, found: list[str]) -> Iterator[memoryview | bytes]:
        """The bytes of a span's cells as landed, copy by copy; where poison is goes to `found`."""
        plan = active.the_plan
        for copy in plan.copies(span):
            cells = self._read(active, copy)
            where = poison_in(plan, copy, cells)
            if where:
                found.append(where)
            yield cells

    def _read(self, active: Active, copy: Copy) -> memoryview | bytes:
        return self._decoder.read(active.reservation, active.the_plan.layout, copy)

    def _poison_left(self, active: Active) -> str:
        found: list[str] = []
        for _ in self._cells(active, active.the_plan.whole(), found):
            pass
        self._num_poisoned += bool(found)
        return f"{_places(found)} never written: the reserved cells hold poison" if found else ""


def _places(found: list[str]) -> str:
    more = f" and {len(found) - _MOST_PLACES} more parts" if len(found) > _MOST_PLACES else ""
    return f"{', '.join(found[:_MOST_PLACES])}{more} were"
