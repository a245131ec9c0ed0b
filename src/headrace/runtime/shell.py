"""Carries out what the owner's machine commands, with real memory, channels and a decoder.

It decides nothing that the machine decides: each command is done at once and in order, and what
comes of it is told back to the machine. A reservation that could not be had is told only when the
batch is done, since what was commanded beside it (a slot's grant) must be carried out too.

A decoder is another's code: whatever it raises is a fault of its device, and what it touched is not
known to be quiet. What such a request held is kept, for an operator who answers for the device.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import assert_never

from msgspec.structs import replace

from headrace.backends.base import Decoder, Entry, Reservation, ReserveFailed
from headrace.errors import PeerDied, Refused, WouldBlock
from headrace.ids import AttemptId, RequestId, SourceId
from headrace.messages import Cancel, Prefill, Reuse
from headrace.protocol.books import AttemptMessage
from headrace.protocol.commands import (
    Cause,
    CheckDigest,
    Command,
    Free,
    KillSource,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    Retry,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.protocol.owner import Owner
from headrace.runtime.active import Active, pass_on, reason_of
from headrace.runtime.checks import grant
from headrace.runtime.costs import Sample
from headrace.runtime.decoding import Decoding
from headrace.runtime.import_shell import ImportShell
from headrace.runtime.keeping import Keeping, verified_by
from headrace.runtime.local import LocalSource, why_not_local
from headrace.runtime.poison import fill, kv_range
from headrace.runtime.prefix import Found, KeptPrompt
from headrace.runtime.requests import RequestOptions
from headrace.runtime.routing import RouteChooser
from headrace.runtime.sources import Sources

_log = logging.getLogger("headrace.owner")

_OF_WHAT_WAS_PUBLISHED = (Cause.MALFORMED.value, Cause.DEVICE.value)


class Shell(ImportShell):
    """The hands of one owner: one decoder, its sources, and the requests that run on them."""

    def __init__(
        self, machine: Owner, decoder: Decoder, sources: Sources, import_share: float
    ) -> None:
        super().__init__(machine, decoder, sources.handles)
        self._sources = sources
        self._of_request: dict[RequestId, Active] = {}
        self._apart: dict[AttemptId, Reservation | Entry] = {}  # what is quarantined, if known
        self._decoding = Decoding(machine, decoder, self._active, self._run_commands)
        self._keeping = Keeping(decoder, decoder.manifest())
        self._import_share = import_share
        self._chooser = RouteChooser()
        self._commands: deque[Command] = deque()
        self._failures: list[Callable[[], None]] = []
        self._carrying_out = False

    # What the machine is told.

    def _check_local(self, options: RequestOptions) -> bool:
        local = options.on_failure == "local"
        if local and not self._sources.has_local:
            raise Refused(why_not_local(self._decoder), field="on_failure")
        return local

    def _submit(
        self,
        prompt: array[int],
        now_ns: int,
        deadline_ns: int | None,
        options: RequestOptions,
        found: Found | None,
        reuse: Reuse | None,
        start: int,
    ) -> RequestId:
        local = reuse is not None and reuse.remainder == "owner"
        try:
            return self._machine.submit(
                len(prompt),
                now_ns,
                deadline_ns,
                digest=options.digest,
                policy=options.policy,
                start=start,
                local=local,
            )
        except Refused as exc:
            if exc.field == "source" and self._sources.set_aside:
                why = self._sources.set_aside[-1]
                raise Refused(f"{exc}: {why}", field=exc.field) from exc
            raise

    def _tell(self, source: SourceId, message: AttemptMessage, fault: str) -> None:
        active = self._active.get(message.attempt)
        dropped = self._machine.dropped.total()
        self._machine.message(source, message, time.monotonic_ns(), fault)
        if active is not None and self._machine.dropped.total() == dropped:
            # Only now: what was refused may hold anything.
            active.record.heard(message, active.plan)
        self._run_commands()

    # What the machine commands.

    def _take_up(self, active: Active) -> None:
        self._active[active.attempt] = active
        self._of_request[active.request.request] = active

    def _forget(self, attempt: AttemptId, *, retried: bool = False) -> Active | None:
        active = self._active.pop(attempt, None)
        if active is not None:
            self._of_request.pop(active.request.request)
            if not retried:
                self._unpin(active)
            if active.request.done:
                active.drained()
        return active

    def _run_commands(self) -> None:
        if self._carrying_out:  # a callback called us: what it caused comes after what runs now
            return
        self._carrying_out = True
        try:
            self._commands.extend(self._machine.commands())
            while self._commands or self._failures:
                while self._commands:  # what an interrupt leaves is carried out by the next call
                    self._run(self._commands.popleft())
                while self._failures:  # only now: see above
                    self._failures.pop(0)()
                self._commands.extend(self._machine.commands())
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
                self._sources.kill(command.source, command.reason)
            case StartImport():
                self._start_import(command)
            case CheckDigest():
                self._check_digest(command)
            case Publish():
                self._publish(command)
            case Free():
                self._free(command)
            case Quarantine():
                self._quarantine(command)
            case Retry():
                self._retry(command)
            case Report():
                self._report(command)
            case _:
                assert_never(command)

    # Storage.

    def _reserve(self, command: Reserve) -> None:
        active = self._active[command.attempt]
        try:
            active.held = self._keeping.reserve(
                active.found, command.num_tokens, active.request.label
            )
            active.record.reserved()
        except WouldBlock as exc:
            self._fail_later(active, exc, refused=True)
        except ReserveFailed as exc:
            active.held = exc.reservation  # kept for an operator who answers for the device
            self._fail_later(active, exc, refused=False)
        except BaseException as exc:
            self._fail_later(active, exc, refused=False)
            pass_on(exc)

    def _fail_later(self, active: Active, exc: BaseException, *, refused: bool) -> None:
        active.broken = True
        reason = reason_of(exc)

        def tell() -> None:
            now_ns = time.monotonic_ns()
            attempt = self._machine.attempt_of(active.request.request)
            if attempt is None and not refused:  # a callback ended it: its lane counts as free
                self._machine.lane_lost(active.attempt, reason, now_ns)
            elif attempt is not None:
                fail = self._machine.reserve_refused if refused else self._machine.device_failed
                fail(attempt, reason, now_ns)

        self._failures.append(tell)

    def _free(self, command: Free) -> None:
        active = self._forget(command.attempt)
        if active is None or active.held is None:
            return
        self._distrust(active)
        try:
            self._decoder.free(active.held)
        except BaseException as exc:
            reason = f"it was not freed: {reason_of(exc)}"
            _log.error("%s is out of service, since %s", active.held, reason)
            self._keeping.lose(active.held)
            self._apart[command.attempt] = active.held
            self._machine.lane_lost(command.attempt, reason, time.monotonic_ns())
            pass_on(exc)
        self._keeping.evict()

    def _distrust(self, active: Active) -> None:
        """Whoever goes on from cells that gave no choice of a token fails as well."""
        if active.record.published and active.request.cause in _OF_WHAT_WAS_PUBLISHED:
            found = None if active.found is None else active.found.prompt.kept
            self._keeping.distrust(active.kept, found)

    def _unpin(self, active: Active) -> None:
        if active.pinned and active.found is not None:
            active.pinned = False
            self._keeping.index.unpin(active.found.prompt)

    def _quarantine(self, command: Quarantine) -> None:
        active = self._forget(command.attempt)
        _log.error("storage of %s is out of service: %s", command.attempt, command.reason)
        if active is not None and active.held is not None:
            self._keeping.lose(active.held)
            self._apart[command.attempt] = active.held

    # Prefill.

    def _start_prefill(self, command: StartPrefill) -> None:
        active = self._active[command.attempt]
        plan_for = self._sources.plans[command.source]
        plan = active.plan = plan_for(active.request.num_tokens, active.start)
        active.whole_plan = plan_for(active.request.num_tokens, 0)
        active.alone = len(self._active) == 1 and active.held is not None
        handle, options = self._handles[command.source], active.request.options
        if options.route == "auto":
            self._chooser.keep(self._handles)
            taken = self._decoder.manifest().emits
            emits = [each for each in handle.manifest.emits if each in taken]
            copies_itself = self._decoder.caps.device_events  # and spends no time of the owner's
            shared = bool(self._decoding) and not copies_itself
            slowdown = 1 / self._import_share if shared else 1.0
            choose = partial(self._chooser.choose, command.source, plan, options, emits)
            active.routed(*choose(slowdown=slowdown))
        slot = handle.slot(command.slot)
        prompt = active.prompt_bytes()
        slot[plan.slot.prompt_offset : plan.slot.prompt_offset + len(prompt)] = prompt
        options = active.options
        if options.digest or options.poison:
            begin, end = kv_range(plan)
            fill(slot[begin:end])
        _log.debug("prefill granted: %s, slot %d", command.attempt, command.slot)
        identity = command.attempt, command.slot, command.generation
        if isinstance(handle, LocalSource) and active.found is not None:
            handle.continue_from(active.found.prompt.kept)
        parked = active.held is None and not active.broken
        active.record.granted(local=isinstance(handle, LocalSource), parked=parked)
        told = grant(*identity, plan.num_tokens, options, active.start, active.cuts)
        self._send(command.source, told)

    def _send(self, source: SourceId, message: Prefill | Cancel) -> None:
        try:
            self._handles[source].send(message)
        except PeerDied:
            return  # its pidfd tells the machine

    # The end.

    def _publish(self, command: Publish) -> None:
        active = self._active.get(command.attempt)
        if active is None or active.broken or not self._machine.may_publish(command.attempt):
            return  # it ended after this was commanded, by a callback of another
        poison = active.request.options.poison and command.source is not None
        try:
            logits, token = self._source_final(active, command)
            left = self._poison_left(active) if poison else ""
            entry = None if left else self._decoder.publish(active.reservation)
        except BaseException as exc:
            self._machine.device_failed(command.attempt, reason_of(exc), time.monotonic_ns())
            pass_on(exc)
            return
        if entry is None:
            self._machine.publish_refused(command.attempt, left, time.monotonic_ns())
            return
        if command.source is None:
            active.record.nothing_to_prefill()
        self._published(active, entry)
        _log.debug("published: %s", command.attempt)
        self._machine.published(command.attempt, time.monotonic_ns())
        if command.source is not None:
            self._sources.served(command.source)
            self._learn(command.source, active)
        if self._keep(active, entry, command.source, logits, token):
            self._unpin(active)
            self._decoding.begin(active, token, logits)

    def _source_final(self, active: Active, command: Publish) -> tuple[memoryview, int | None]:
        """The last row of logits, empty where there is a token instead."""
        if command.source is None or command.slot is None:
            prompt = active.prompt_found
            return memoryview(prompt.logits), prompt.token
        if command.token is not None:
            return memoryview(b""), command.token
        layout = active.the_plan.slot
        slot = self._handles[command.source].slot(command.slot)
        row = slot[layout.logits_offset :][: layout.logits_nbytes]
        return memoryview(bytes(row)), None  # copied, since publishing ends the slot's lease

    def _keep(
        self,
        active: Active,
        entry: Entry,
        source: SourceId | None,
        logits: memoryview,
        token: int | None,
    ) -> bool:
        """Keep what was published, if its request wants that; False if the device failed."""
        request = active.request
        if source is None or request.reuse is None or not self._keeping.index.nbytes:
            return True
        handle = self._handles[source]
        local = isinstance(handle, LocalSource)
        request.reuse = replace(request.reuse, remainder="owner" if local else "source")
        make = partial(
            KeptPrompt,
            schedule=self._keeping.schedule_of(request.options, handle.maker, active.found),
            tokens=active.prompt_tokens(),
            plan=active.the_whole_plan,
            logits=bytes(logits),
            token=token,
            is_cut=handle.manifest.prefix != "none",
            verified=verified_by(request.options),
        )
        try:
            active.kept = self._keeping.publish(entry, make)
        except Refused as exc:  # there is no memory for it
            _log.warning("%s is not kept: %s", active.attempt, exc)
        except BaseException as exc:
            reason = f"it could not be kept: {reason_of(exc)}"
            self._decoding.finish(active, "failed", reason, Cause.DEVICE, quarantine=True)
            pass_on(exc)
            return False
        return True

    def _learn(self, source: SourceId, active: Active) -> None:
        plan = active.the_plan
        measured = active.record.measured(plan.nbytes)
        if plan.start:  # not what a prefill of all of it would take
            rest = plan.num_tokens - plan.start
            handle, costs = self._handles[source], self._chooser.known([source])
            if isinstance(handle, LocalSource):
                self._keeping.computed_here(rest, measured)
            elif costs is not None:
                ns = costs.compute_ns(plan.num_tokens, active.options.prefill_chunk)
                share = rest / plan.num_tokens
                self._keeping.computed_there(handle.manifest.prefix, share, ns, measured)
            return
        alone = active.alone and len(self._active) == 1
        sample = Sample(plan, active.options, measured, active.expected_ns, alone)
        self._chooser.learn(source, sample)

    def _retry(self, command: Retry) -> None:
        active = self._forget(command.attempt, retried=True)
        if active is not None:
            _log.info("%s failed and is followed by another: %s", command.attempt, command.reason)
            active.retry(command.reason)
            self._take_up(active)

    def _report(self, command: Report) -> None:
        active = self._of_request[command.request]
        if command.outcome is not Outcome.PUBLISHED:
            _log.info("%s %s: %s", active.attempt, command.outcome.value, command.reason)
            active.end(command.outcome.value, command.reason, command.cause)
            if active.held is None:
                self._forget(active.attempt)
