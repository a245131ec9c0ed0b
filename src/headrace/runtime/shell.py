"""Carries out what the owner's machine commands, with real memory, channels and a decoder.

It decides nothing that the machine decides: each command is done at once and in order, and what
comes of it is told back to the machine. A reservation that could not be had is told only when the
batch is done, since what was commanded beside it (a slot's grant) must be carried out too.

A decoder is another's code: whatever it raises is a fault of its device, and what it touched is not
known to be quiet.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from headrace.backends.base import Decoder, Fence, SlotView
from headrace.errors import PeerDied, WouldBlock
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.messages import Cancel, Prefill
from headrace.plan import Plan
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Free,
    KillSource,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.protocol.owner import Owner
from headrace.runtime.active import Active
from headrace.runtime.digest import crc32
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

_log = logging.getLogger("headrace.owner")


@dataclass(frozen=True, slots=True)
class _Flight:
    active: Active
    fence: Fence
    piece: Span
    begun_ns: int
    nbytes: int


class Shell:
    """The hands of one owner: one decoder, its sources, and the requests that run on them."""

    def __init__(self, machine: Owner, decoder: Decoder) -> None:
        self._machine = machine
        self._decoder = decoder
        self._handles: dict[SourceId, SourceHandle] = {}
        self._plans: dict[SourceId, Callable[[int], Plan]] = {}
        self._granted: dict[SourceId, StartPrefill] = {}  # the last grant of each
        self._active: dict[AttemptId, Active] = {}
        self._flights: dict[ImportId, _Flight] = {}
        self._decoding: deque[Active] = deque()
        self._failures: list[Callable[[], None]] = []
        self._carrying_out = False

    def _run_commands(self) -> None:
        if self._carrying_out:  # a callback called us: what it caused comes after what runs now
            return
        self._carrying_out = True
        try:
            commands = deque(self._machine.commands())
            while commands or self._failures:
                while commands:
                    self._run(commands.popleft())
                while self._failures:  # only now: see above
                    self._failures.pop(0)()
                commands.extend(self._machine.commands())
        finally:
            self._carrying_out = False

    def _run(self, command: Command) -> None:
        match command:
            case Reserve():
                self._reserve(command)
            case StartPrefill():
                self._start_prefill(command)
            case SendCancel():
                self._send(command.source, Cancel(command.attempt))
            case KillSource():
                _log.warning("%s: it is ended", command.reason)
                self._handles[command.source].kill()  # its pidfd tells the machine
            case StartImport():
                self._start_import(command)
            case CheckDigest():
                self._check_digest(command)
            case Publish():
                self._publish(command)
            case Free():
                self._free(command)
            case Quarantine():
                self._active.pop(command.attempt, None)
            case Report():
                self._report(command)
            case _:
                assert_never(command)

    def _reserve(self, command: Reserve) -> None:
        active = self._active[command.attempt]
        try:
            active.held = self._decoder.reserve(command.num_tokens)
        except WouldBlock as exc:
            self._fail_later(self._machine.reserve_refused, command.attempt, exc)
        except Exception as exc:
            self._fail_later(self._machine.device_failed, command.attempt, exc)

    def _fail_later(
        self, fail: Callable[[AttemptId, str, int], None], attempt: AttemptId, exc: Exception
    ) -> None:
        self._active[attempt].broken = True
        self._failures.append(lambda: fail(attempt, _reason(exc), time.monotonic_ns()))

    def _free(self, command: Free) -> None:
        active = self._active.pop(command.attempt, None)
        if active is None or active.held is None:
            return
        try:
            self._decoder.free(active.held)
        except Exception as exc:
            _log.error("%s was not freed and is out of service: %s", active.held, _reason(exc))
            self._machine.lane_lost(time.monotonic_ns())

    def _start_prefill(self, command: StartPrefill) -> None:
        active = self._active[command.attempt]
        self._granted[command.source] = command
        handle = self._handles[command.source]
        plan = active.plan = self._plans[command.source](active.request.num_tokens)
        slot = handle.slot(command.slot)
        prompt = active.prompt_bytes()
        slot[plan.slot.prompt_offset : plan.slot.prompt_offset + len(prompt)] = prompt
        _log.debug("prefill granted: %s, slot %d", command.attempt, command.slot)
        identity = command.attempt, command.slot, command.generation
        self._send(command.source, grant(*identity, plan.num_tokens, active.request.options))

    def _send(self, source: SourceId, message: Prefill | Cancel) -> None:
        try:
            self._handles[source].send(message)
        except PeerDied:
            return  # its pidfd tells the machine

    def _start_import(self, command: StartImport) -> None:
        active = self._active[command.attempt]
        handle = self._handles[command.source]
        copies = active.the_plan.copies(command.piece)
        nbytes = sum(copy.nbytes for copy in copies)
        slot = SlotView(handle.slot(command.slot), handle.slot_address(command.slot), handle.layout)
        begun_ns = time.monotonic_ns()
        try:
            fence = self._decoder.begin_import(active.reservation, slot, copies)
        except Exception as exc:
            self._machine.import_failed(command.import_id, _reason(exc), time.monotonic_ns())
            return
        flight = _Flight(active, fence, command.piece, begun_ns, nbytes)
        if not self._landed(command.import_id, flight):
            self._flights[command.import_id] = flight

    def _poll_fences(self) -> None:
        for import_id, flight in list(self._flights.items()):
            given_up = not self._machine.is_in_flight(import_id)  # its storage is set apart
            if given_up or self._landed(import_id, flight):
                del self._flights[import_id]
        self._run_commands()

    def _landed(self, import_id: ImportId, flight: _Flight) -> bool:
        """Whether the import is over; reports it if so."""
        try:
            if not flight.fence.done():
                return False
        except Exception as exc:
            self._machine.import_failed(import_id, _reason(exc), time.monotonic_ns())
            return True
        now_ns = time.monotonic_ns()
        active = flight.active
        active.imported(flight.piece, flight.begun_ns, now_ns, flight.nbytes)
        self._machine.import_done(import_id, now_ns)
        if active.callback_error:
            self._machine.cancel(active.request.request, now_ns, active.callback_error)
        return True

    def _check_digest(self, command: CheckDigest) -> None:
        active = self._active[command.attempt]
        plan = active.the_plan
        try:
            actual = crc32(
                self._decoder.read(active.reservation, plan.layout, copy)
                for copy in plan.copies(command.span)
            )
        except Exception as exc:
            self._machine.import_failed(command.import_id, _reason(exc), time.monotonic_ns())
            return
        self._machine.digest_checked(command.import_id, actual, time.monotonic_ns())

    def _publish(self, command: Publish) -> None:
        active = self._active[command.attempt]
        if active.broken:
            return
        layout = active.the_plan.slot
        logits = memoryview(b"")
        if command.token is None:  # copied, since publishing ends the slot's lease
            slot = self._handles[command.source].slot(command.slot)
            logits = memoryview(bytes(slot[layout.logits_offset :][: layout.logits_nbytes]))
        try:
            entry = self._decoder.publish(active.reservation)
        except Exception as exc:
            self._machine.device_failed(command.attempt, _reason(exc), time.monotonic_ns())
            return
        active.published(entry)
        _log.debug("published: %s", command.attempt)
        self._machine.published(command.attempt, time.monotonic_ns())
        self._begin_decode(active, command.token, logits)

    def _begin_decode(self, active: Active, token: int | None, logits: memoryview) -> None:
        request = active.request
        if request.options.hold:
            request.entry, request.logits = active.entry, bytes(logits)
            request.tokens += [] if token is None else [token]
            active.end("finished", "")
            return
        last = request.options.max_tokens == 0
        if not last:
            try:
                chosen = active.choose(logits) if token is None else token
            except Exception as exc:  # a row of logits that holds no choice
                self._finish(active, "failed", _reason(exc))
                return
            last = active.take(chosen)
        if request.options.audit:
            try:
                active.audit(self._decoder)
            except Exception as exc:
                self._finish(active, "failed", _reason(exc), quarantine=True)
                return
        if not self._ended_by_callback(active):
            if last:
                self._finish(active, "finished", "")
            else:
                self._decoding.append(active)

    def _decode(self) -> None:
        """One step of the entry whose turn it is; the others' order stays."""
        active = self._decoding[0]
        begun_ns = time.monotonic_ns()
        stepped = False
        try:
            (logits,) = self._decoder.decode_step([(active.entry, active.request.tokens[-1])])
            stepped = True
            token = active.choose(logits)
        except Exception as exc:
            self._finish(active, "failed", _reason(exc), quarantine=not stepped)
            return
        self._decoding.rotate(-1)
        for other in self._active.values():
            other.decoded_meanwhile(begun_ns, time.monotonic_ns())
        last = active.take(token)
        if not self._ended_by_callback(active) and last:
            self._finish(active, "finished", "")

    def _ended_by_callback(self, active: Active) -> bool:
        """Whether a callback cancelled or broke its request, which is then over."""
        if active.callback_error and not active.request.done:
            self._finish(active, "failed", active.callback_error)
        return active.request.done

    def _finish(
        self, active: Active, outcome: str, reason: str, *, quarantine: bool = False
    ) -> None:
        if active in self._decoding:
            self._decoding.remove(active)
        active.end(outcome, reason)
        why = reason if quarantine else ""
        self._machine.retire(active.request.request, time.monotonic_ns(), why)
        self._run_commands()

    def _report(self, command: Report) -> None:
        attempt = AttemptId(*command.request, 1)
        active = self._active[attempt]
        if command.outcome is not Outcome.PUBLISHED:
            _log.info("%s %s: %s", attempt, command.outcome.value, command.reason)
            active.end(command.outcome.value, command.reason)
            if active.held is None:
                del self._active[attempt]


def grant(
    attempt: AttemptId, slot: int, generation: int, num_tokens: int, options: RequestOptions
) -> Prefill:
    """The message that grants a source its slot, with how the request is to be cut."""
    return Prefill(
        attempt,
        slot,
        generation,
        num_tokens,
        options.route,
        options.group_layers,
        options.chunk,
        options.prefill_chunk,
        options.emission,
        options.digest,
    )


def _reason(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
