"""The owner's shell: carries out the machine's commands with real memory, channels and a decoder.

One thread owns the decoder's device. A turn takes messages, cancels and deaths, publishes what is
complete, imports up to a byte budget, and decodes one step of one entry. It decides nothing that
the machine decides.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from headrace.backends.base import Decoder, Fence, SlotView
from headrace.errors import (
    DeviceError,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.geometry import Manifest
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.messages import (
    MAX_TEXT,
    Cancel,
    Failed,
    Prefill,
    Progress,
    Released,
    SourceFinal,
)
from headrace.plan import Plan, compile_plan
from headrace.protocol.books import AttemptMessage, Limits
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
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

IDLE_BUDGET_NBYTES = 64 << 20  # imported in one turn when nobody decodes
SHARED_BUDGET_NBYTES = 8 << 20  # imported in one turn between two decode steps

MAX_FLIGHTS = 64  # imports begun and not fenced, on a device that copies by itself

HANG_UP_GRACE_S = 0.2  # from the end of a source's channel to its death, in a process that ends

DECODER_FAULTS = (DeviceError, LocalProtocolError)  # of the device, or of the code that drives it

_log = logging.getLogger("headrace.owner")

_epochs = itertools.count(time.time_ns())


@dataclass(frozen=True, slots=True)
class _Flight:
    active: Active
    fence: Fence
    piece: Span
    begun_ns: int
    nbytes: int


class DecoderOwner:
    """The sole owner of one decoder and of the sources attached to it.

    Every method must be called from the thread that made it. `turn` does a bounded piece of work;
    call it until the requests of interest are `done`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        context: int,
        prefetch_depth: int = 1,
        chunk_nbytes: int = 4 << 20,
        progress_timeout_s: float = 600.0,
        drain_timeout_s: float = 30.0,
    ) -> None:
        """`context`: the longest prompt plus its tokens, in positions, that a lane holds.

        Raises:
            Refused: the decoder has no ordered, fenceable copy.
        """
        if not decoder.caps.ordered_copy:
            raise Refused("this decoder has no ordered copy with a fence; it cannot own a cache")
        self.context = context
        self._decoder = decoder
        self._manifest = decoder.manifest()
        limits = Limits(
            decoder.caps.max_lanes,
            context,
            prefetch_depth,
            chunk_nbytes,
            int(progress_timeout_s * 1e9),
            int(drain_timeout_s * 1e9),
        )
        self._machine = Owner(next(_epochs), limits)
        self._handles: dict[SourceId, SourceHandle] = {}
        self._active: dict[AttemptId, Active] = {}
        self._flights: dict[ImportId, _Flight] = {}
        self._decoding: deque[Active] = deque()
        self._selector = selectors.DefaultSelector()
        self._failures: list[Callable[[], None]] = []
        self._plans: dict[SourceId, Callable[[int], Plan]] = {}
        self._granted: dict[SourceId, StartPrefill] = {}  # the last grant of each

    # What a caller does.

    def attach(self, handle: SourceHandle) -> None:
        """Take a started source: handshake, slab, and from then on its messages and its death.

        Raises:
            Refused: it does not fit this decoder. PeerDied: it died.
        """
        handle.attach(self._manifest, self.context, self._machine.epoch)
        source = SourceId(len(self._handles))
        layout = handle.layout

        @lru_cache(maxsize=64)
        def plan_for(num_tokens: int) -> Plan:
            return compile_plan(self._manifest, layout, num_tokens, self.context)

        self._handles[source] = handle
        self._plans[source] = plan_for
        self._machine.add_source(source, handle.num_slots, plan_for, time.monotonic_ns())
        self.watch(handle.channel_fd, lambda: self._receive(source))
        self.watch(handle.death_fd, lambda: self._bury(source))
        self._run_commands()

    def watch(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` in a turn whenever `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, act)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        self._selector.unregister(fd)

    def submit(
        self,
        tokens: Sequence[int],
        options: RequestOptions | None = None,
        *,
        on_token: Callable[[int], None] | None = None,
        on_progress: Callable[[Span, int, int], None] | None = None,
    ) -> Request:
        """Start a request; the callbacks are called from within turns.

        `on_progress(span, imported, total)` tells what was imported last, and bytes of KV so far.

        Raises:
            Refused: it can never be served as asked; the text says what to change.
        """
        options = options or RequestOptions()
        prompt = _prompt(tokens)
        self._check(prompt, options)
        now_ns = time.monotonic_ns()
        deadline_ns = None
        if options.deadline_s is not None:
            deadline_ns = now_ns + int(options.deadline_s * 1e9)
        request_id = self._machine.submit(len(tokens), now_ns, deadline_ns, digest=options.digest)
        request = Request(request_id, len(tokens), options, on_token, on_progress)
        attempt = AttemptId(*request_id, 1)
        self._active[attempt] = Active(attempt, request, prompt)
        self._run_commands()
        return request

    def cancel(self, request: Request) -> None:
        """The caller wants no more of it, wherever it is; a request that is done stays as it is."""
        if request.done:
            return
        now_ns = time.monotonic_ns()
        if not self._machine.cancel(request.request, now_ns):
            active = self._active[AttemptId(*request.request, 1)]
            if active in self._decoding:
                self._decoding.remove(active)
                self._finish(active, "cancelled", "cancelled by the caller")
        self._run_commands()

    def release(self, request: Request) -> None:
        """Give back the entry of a finished request that asked to hold it."""
        if request.entry is None:
            raise LocalProtocolError(f"request {request.request} holds no entry")
        request.entry = None
        self._machine.retire(request.request, time.monotonic_ns())
        self._run_commands()

    def turn(self, timeout_s: float = 0.0) -> None:
        """One owner turn; waits at most `timeout_s` if there is nothing to do."""
        for key, _ in self._selector.select(self._wait_s(timeout_s)):
            key.data()
        now_ns = time.monotonic_ns()
        due_ns = self._machine.next_deadline_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._machine.tick(now_ns)
        self._run_commands()
        self._poll_fences()
        budget = SHARED_BUDGET_NBYTES if self._decoding else IDLE_BUDGET_NBYTES
        if len(self._flights) < MAX_FLIGHTS and self._machine.begin_imports(budget):
            self._run_commands()
        if self._decoding:
            self._decode()

    def plan_of(self, request: Request) -> Plan:
        """The plan of a running or held request, once it was leased a slot."""
        return self._active[AttemptId(*request.request, 1)].the_plan

    def run_until_done(self, *requests: Request) -> None:
        """Turn until all of `requests` are done."""
        while not all(request.done for request in requests):
            self.turn(1.0)

    @property
    def idle(self) -> bool:
        """Whether nothing is held: no request, no slot, no import."""
        statistics = self._machine.statistics()
        slots = statistics["slots"]
        return not self._active and slots.get("free", 0) == sum(slots.values())

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Turn until idle; False if that took longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.idle:
            if time.monotonic() > deadline_s:
                return False
            self.turn(0.05)
        return True

    def statistics(self) -> dict[str, dict[str, int]]:
        """Lanes, slots, hand-offs by state, dropped messages by reason, and the decoder's own."""
        return {**self._machine.statistics(), "decoder": dict(self._decoder.statistics())}

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless every lane, slot and token is accounted for."""
        self._machine.check_integrity()

    def close(self) -> None:
        """End all requests, then the sources, then the decoder."""
        for active in list(self._active.values()):
            self.cancel(active.request)
        for handle in self._handles.values():
            handle.close()
        self._selector.close()
        self._decoder.close()

    # What comes in.

    def _receive(self, source: SourceId) -> None:
        handle = self._handles[source]
        while True:
            try:
                message = handle.receive()
            except WouldBlock:
                return
            except PeerDied:
                self._hung_up(handle)
                return
            except RemoteProtocolError as exc:
                self._machine.dropped["undecodable"] += 1
                self._fail_running(source, str(exc))
                continue
            if not isinstance(message, Progress | SourceFinal | Failed | Released):
                self._machine.dropped["unexpected"] += 1
                continue
            if isinstance(message, SourceFinal):
                message = self._checked_final(handle.manifest, message)
            self._tell(source, message)

    def _tell(self, source: SourceId, message: AttemptMessage) -> None:
        active = self._active.get(message.attempt)
        dropped = self._machine.dropped.total()
        self._machine.message(source, message, time.monotonic_ns())
        if active is not None and self._machine.dropped.total() == dropped:
            active.heard(message)  # only now: what was refused may hold anything
        self._run_commands()

    def _fail_running(self, source: SourceId, reason: str) -> None:
        """What names no attempt is the running one's fault; the source itself lives on."""
        granted = self._granted.get(source)
        if granted is not None:
            identity = granted.attempt, granted.slot, granted.generation
            self._tell(source, Failed(*identity, reason[:MAX_TEXT]))

    def _checked_final(self, manifest: Manifest, final: SourceFinal) -> SourceFinal | Failed:
        """The final, or a failure if it is not what the source's manifest promised."""
        if final.first == manifest.first and final.token < manifest.vocab_size:
            return final
        self._machine.dropped["malformed"] += 1
        reason = (
            f"a final of {final.first} {final.token}, the source's manifest has {manifest.first} "
            f"and {manifest.vocab_size} ids"
        )
        return Failed(final.attempt, final.slot, final.generation, reason)

    def _hung_up(self, handle: SourceHandle) -> None:
        """The channel ended. That is no proof of death: one that lives on has to be ended."""
        if handle.channel_fd in self._selector.get_map():
            self.unwatch(handle.channel_fd)
            if not handle.wait(HANG_UP_GRACE_S):
                handle.kill()  # it can take no prompt and give no lease back any more

    def _bury(self, source: SourceId) -> None:
        handle = self._handles[source]
        if not handle.died():
            return
        self.unwatch(handle.death_fd)
        self._receive(source)  # what it said before it died still counts
        if handle.channel_fd in self._selector.get_map():
            self.unwatch(handle.channel_fd)  # a process that it forked may hold the other end
        _log.info("%s", handle.exit_text())
        self._machine.source_died(source, handle.exit_text(), time.monotonic_ns())
        self._run_commands()

    # What the machine commands.

    def _run_commands(self) -> None:
        commands = deque(self._machine.commands())
        while commands or self._failures:
            while commands:
                self._run(commands.popleft())
            while self._failures:  # only now: what was commanded before must be carried out first
                self._failures.pop(0)()
            commands.extend(self._machine.commands())

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
        except DECODER_FAULTS as exc:
            self._fail_later(self._machine.device_failed, command.attempt, exc)

    def _fail_later(
        self, fail: Callable[[AttemptId, str, int], None], attempt: AttemptId, exc: Exception
    ) -> None:
        self._active[attempt].broken = True
        self._failures.append(lambda: fail(attempt, _reason(exc), time.monotonic_ns()))

    def _free(self, command: Free) -> None:
        active = self._active.pop(command.attempt)
        if active.held is None:
            return
        try:
            self._decoder.free(active.held)
        except DECODER_FAULTS as exc:
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
        options = active.request.options
        _log.debug("prefill granted: %s, slot %d", command.attempt, command.slot)
        self._send(
            command.source,
            Prefill(
                command.attempt,
                command.slot,
                command.generation,
                plan.num_tokens,
                options.route,
                options.group_layers,
                options.chunk,
                options.prefill_chunk,
                options.emission,
                options.digest,
            ),
        )

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
        except DECODER_FAULTS as exc:
            self._machine.import_failed(command.import_id, _reason(exc), time.monotonic_ns())
            return
        flight = _Flight(active, fence, command.piece, begun_ns, nbytes)
        if not self._landed(command.import_id, flight):
            self._flights[command.import_id] = flight

    def _poll_fences(self) -> None:
        for import_id, flight in list(self._flights.items()):
            if self._landed(import_id, flight):
                del self._flights[import_id]
        self._run_commands()

    def _landed(self, import_id: ImportId, flight: _Flight) -> bool:
        """Whether the import is over; reports it if so."""
        try:
            if not flight.fence.done():
                return False
        except DECODER_FAULTS as exc:
            self._machine.import_failed(import_id, _reason(exc), time.monotonic_ns())
            return True
        now_ns = time.monotonic_ns()
        flight.active.imported(flight.piece, flight.begun_ns, now_ns, flight.nbytes)
        self._machine.import_done(import_id, now_ns)
        return True

    def _check_digest(self, command: CheckDigest) -> None:
        active = self._active[command.attempt]
        plan = active.the_plan
        try:
            actual = crc32(
                self._decoder.read(active.reservation, plan.layout, copy)
                for copy in plan.copies(command.span)
            )
        except DECODER_FAULTS as exc:
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
        except DECODER_FAULTS as exc:
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
        try:
            if not last:
                last = active.take(active.choose(logits) if token is None else token)
        except DeviceError as exc:  # the source's row of logits holds no choice
            self._finish(active, "failed", str(exc))
            return
        if request.options.audit:
            active.audit(self._decoder)
        if last:
            self._finish(active, "finished", "")
        else:
            self._decoding.append(active)

    def _decode(self) -> None:
        """One step of the entry whose turn it is; the others' order stays."""
        active = self._decoding[0]
        begun_ns = time.monotonic_ns()
        try:
            (logits,) = self._decoder.decode_step([(active.entry, active.request.tokens[-1])])
            last = active.take(active.choose(logits))
        except DECODER_FAULTS as exc:
            self._decoding.popleft()
            self._finish(active, "failed", _reason(exc), quarantine=isinstance(exc, DeviceError))
            return
        self._decoding.rotate(-1)
        for other in self._active.values():
            other.decoded_meanwhile(time.monotonic_ns() - begun_ns)
        if last:
            self._decoding.remove(active)
            self._finish(active, "finished", "")

    def _finish(
        self, active: Active, outcome: str, reason: str, *, quarantine: bool = False
    ) -> None:
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

    def _check(self, tokens: Sequence[int], options: RequestOptions) -> None:
        for handle in self._handles.values():
            options.check(handle.manifest)
        vocab_size = self._manifest.vocab_size
        if any(not 0 <= token < vocab_size for token in tokens):
            raise Refused(f"a token id is outside [0, {vocab_size})", field="prompt")
        decodes = self._decoder.caps.decodes or options.hold
        if options.max_tokens > 1 and not decodes:
            raise Refused(
                f"max_tokens is {options.max_tokens} and this decoder cannot decode; give 0 or 1",
                field="max_tokens",
            )
        if options.max_tokens > 0 and not options.hold:
            from headrace.engine.sampling import check_sampling  # as where tokens are chosen

            check_sampling(options.sampling)
        reach = len(tokens) + (0 if options.hold else max(options.max_tokens - 1, 0))
        if reach > self.context:
            raise Refused(
                f"{len(tokens)} prompt tokens and {options.max_tokens} to decode need a context of "
                f"{reach}, and it is {self.context}; raise --context or ask for less",
                field="context",
            )

    def _wait_s(self, timeout_s: float) -> float:
        if self._decoding or self._flights or self._machine.has_pieces:
            return 0.0
        due_ns = self._machine.next_deadline_ns()
        if due_ns is None:
            return timeout_s
        return min(timeout_s, max(0.0, (due_ns - time.monotonic_ns()) / 1e9))


def _reason(exc: Exception) -> str:
    return str(exc) or type(exc).__name__


def _prompt(tokens: Sequence[int]) -> array[int]:
    try:
        return array("I", tokens)
    except (TypeError, OverflowError) as exc:
        raise Refused(f"the prompt is no sequence of token ids: {exc}", field="prompt") from exc
