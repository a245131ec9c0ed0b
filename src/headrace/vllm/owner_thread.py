"""The worker half of a consumer: one thread that owns vLLM's blocks while they are being filled.

The thread runs a `DecoderOwner` over a `PagedDecoder`: it spawns the sources, and nobody else
writes a block between its binding and its report. vLLM's worker gives it orders and asks for
reports. Each load is reported once, when its request has ended and nothing can write its blocks any
more, and with whether they hold the prompt. That is so for an abort too, and for a source that
died, and for the end of this thread itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from headrace.backends.base import Decoder
from headrace.backends.paged import Binding, PagedDecoder
from headrace.errors import DeviceError, HeadraceError, LocalProtocolError, Refused
from headrace.geometry import Manifest, agree
from headrace.ids import AttemptId
from headrace.messages import AskedRoute
from headrace.protocol.commands import Cause
from headrace.runtime.config import SourceConfig
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import ASKED_ROUTES, Request
from headrace.runtime.worker import SourceHandle
from headrace.vllm.scheduling import Load, Orders, Told
from headrace.vllm.settings import Settings

_log = logging.getLogger("headrace.vllm")

IDLE_TURN_S: Final = 60.0
ASK_AGAIN_S: Final = 0.1  # of blocks that a device did not clear
CLOSE_TIMEOUT_S: Final = 4.0  # vLLM ends a worker 5 s after it asked it to
REFUSED: Final = "refused"
OWNER_ENDED: Final = "owner-ended"
"""Causes of a load's failure beside those of a request, `protocol.commands.Cause`."""


@dataclass(slots=True)
class Reports:
    """What ended since reports were taken last.

    loaded, failed: request ids. ended: the requests themselves, for what was measured. causes: of
    those that failed, and how many of each.
    """

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    ended: list[Request] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Running:
    load: Load
    label: int
    request: Request | None  # None: it was refused


class OwnerThread:
    """Loads prompts into blocks of `paged`; every method may be called from vLLM's thread.

    decoder: what the owner drives, by default `paged` itself. told_ended: called in the thread with
    each request that ended and its tokens.
    """

    def __init__(
        self,
        paged: PagedDecoder,
        settings: Settings,
        sources: Sequence[SourceConfig],
        *,
        decoder: Decoder | None = None,
        told_ended: Callable[[Load, Request], None] = lambda load, request: None,
    ) -> None:
        self._paged = paged
        self._decoder = decoder or paged
        self._settings = settings
        self._sources = sources
        self._told_ended = told_ended
        self._changed = threading.Condition()
        self._inbox: deque[Load | str] = deque()
        self._reports = Reports()
        self._outstanding: set[str] = set()  # given and not reported
        self._told: Told | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._ready = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._running: dict[int, _Running] = {}  # of the thread alone, by label
        self._late: set[AttemptId] = set()  # whose blocks a device did not clear
        self._last_label = 0
        self._thread = threading.Thread(target=self._run, name="headrace-owner", daemon=True)

    # vLLM's side.

    def start(self) -> Told:
        """Start the sources; returns when all of them are ready.

        Raises:
            Refused, BackendUnavailable, PeerDied: a source does not fit or could not start.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure is not None)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        if self._told is None:
            raise LocalProtocolError("the owner's thread told nothing of its sources")
        return self._told

    def carry_out(self, orders: Orders) -> None:
        """Begin loads and end others. An abort of what was reported meanwhile is ignored."""
        with self._changed:
            self._outstanding.update(load.request_id for load in orders.loads)
            for request_id in orders.dropped:
                self._report(request_id, Cause.CANCELLED.value)
            given: list[Load | str] = [*orders.aborted, *orders.loads]
            if self._failure is None:
                self._inbox.extend(given)
            else:  # the thread is over, and nothing writes
                self._fail_all()
                given = []
        if given:
            self._wake_up()

    def take_reports(self, wait_s: float = 0.0) -> Reports:
        """What ended meanwhile; waits for something to, if nothing has and something can."""
        with self._changed:
            if wait_s > 0 and self._outstanding:
                self._changed.wait_for(self._has_reports, wait_s)
            reports, self._reports = self._reports, Reports()
        return reports

    @property
    def told(self) -> Told | None:
        """Of the sources; that there is none any more once the thread has ended."""
        if self._failure is not None:
            return Told(0, starts_anywhere=False, in_service=False)
        return self._told

    @property
    def outstanding(self) -> int:
        """Loads that were not reported."""
        return len(self._outstanding)

    def close(self) -> None:
        """End all loads and all sources. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        if self._thread.is_alive():
            self._wake_up()
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("the owner's thread did not end within %.0f s", CLOSE_TIMEOUT_S)
            return
        os.close(self._wake)

    def _has_reports(self) -> bool:
        return bool(self._reports.loaded or self._reports.failed)

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # The thread's side.

    def _run(self) -> None:
        owner: DecoderOwner | None = None
        failure: BaseException | None = None
        try:
            owner = self._make_owner()
            with self._changed:
                self._ready = True
                self._changed.notify_all()
            while not self._closing:
                owner.turn(self._turn_s())
                self._tell(owner)  # first: a report must not lead to a load that nobody takes
                self._settle(owner)
        except BaseException as exc:
            failure = exc
            if self._ready:
                _log.exception("the owner of vLLM's blocks ended; prompts are vLLM's from here on")
        finally:
            self._end(owner, failure)

    def _make_owner(self) -> DecoderOwner:
        """The owner, with all of its sources ready."""
        settings, decoder = self._settings, self._paged.manifest()
        handles = [_handle(each, settings.start_timeout_s) for each in self._sources]
        with ExitStack() as undo:
            for handle in handles:
                undo.callback(handle.close)
                handle.start()
            manifests = [handle.manifest for handle in handles]
            for manifest in manifests:
                agree(manifest, decoder)
                settings.options(settings.route).check(manifest, decoder)
            longest = min(manifest.max_positions for manifest in (decoder, *manifests))
            context = min(longest, settings.context or longest)
            owner = DecoderOwner(
                self._decoder,
                context=context,
                progress_timeout_s=settings.progress_timeout_s,
                drain_timeout_s=settings.drain_timeout_s,
            )
            undo.callback(owner.close)
            for handle in handles:
                owner.attach(handle, restart=settings.policy)
            undo.pop_all()
        anywhere = all(manifest.prefix != "none" for manifest in manifests)
        routes = tuple(r for r in ASKED_ROUTES if _offered(settings, r, manifests, decoder))
        self._told = Told(context, anywhere, owner.has_source, owner.num_slots, routes)
        owner.watch(self._wake, lambda: self._take_in(owner))
        return owner

    def _take_in(self, owner: DecoderOwner) -> None:
        os.eventfd_read(self._wake)
        while self._inbox:
            given = self._inbox.popleft()
            if isinstance(given, Load):
                self._begin(owner, given)
            else:
                self._abort(owner, given)

    def _begin(self, owner: DecoderOwner, load: Load) -> None:
        self._last_label += 1
        label, request = self._last_label, None
        count = len(load.tokens)
        try:
            self._paged.bind(Binding(label, count, load.block_ids, load.start))
            options = self._settings.options(load.route)
            request = owner.submit(load.tokens, options, label=label, start=load.start)
        except HeadraceError as exc:  # nothing of it was begun
            _log.warning("%s cannot be loaded: %s", load.request_id, exc)
        self._running[label] = _Running(load, label, request)

    def _abort(self, owner: DecoderOwner, request_id: str) -> None:
        for running in self._running.values():
            if running.load.request_id == request_id:
                if running.request is not None:
                    owner.cancel(running.request)
                return

    def _settle(self, owner: DecoderOwner) -> None:
        """Report what ended and cannot be written any more."""
        for label, running in list(self._running.items()):
            request = running.request
            if request is not None and not (request.done and request.drained):
                continue
            if self._paged.holds(label):
                self._answer_for(owner)
            if self._paged.holds(label):
                continue
            del self._running[label]
            self._paged.unbind(label)
            cause = REFUSED if request is None else request.cause
            with self._changed:
                if request is not None:
                    self._reports.ended.append(request)
                self._report(running.load.request_id, cause)
            if request is not None:
                self._keep(running.load, request)

    def _keep(self, load: Load, request: Request) -> None:
        try:
            self._told_ended(load, request)
        except Exception:  # no load may depend on what is kept of another
            _log.exception("what %s came to is not kept", load.request_id)

    def _tell(self, owner: DecoderOwner) -> None:
        if self._told is not None:
            now = owner.has_source, owner.num_slots
            if now != (self._told.in_service, self._told.num_slots):
                self._told = replace(self._told, in_service=now[0], num_slots=now[1])

    def _answer_for(self, owner: DecoderOwner) -> None:
        """Storage is apart after an import that raised: it is quiet, since imports are over when
        they return, and this is the thread that they ran in.

        A device that cannot clear it either is asked again, for as long as a drain may take; after
        that this thread ends, with all loads.
        """
        for attempt, apart in owner.quarantined().items():
            if not apart.lane:
                continue
            try:
                owner.reinstate(attempt)
            except DeviceError as exc:
                waited_s = (time.monotonic_ns() - apart.since_ns) / 1e9
                if waited_s > self._settings.drain_timeout_s:
                    raise
                if attempt not in self._late:
                    self._late.add(attempt)
                    _log.warning("blocks of attempt %s are not given back yet: %s", attempt, exc)

    def _turn_s(self) -> float:
        """How long a turn may wait."""
        if self._inbox:
            return 0.0
        ended = any(each.request and each.request.drained for each in self._running.values())
        return ASK_AGAIN_S if ended else IDLE_TURN_S

    def _report(self, request_id: str, cause: str) -> None:
        """A load is over; the cause is empty if its blocks hold the prompt."""
        if cause:
            self._reports.failed.add(request_id)
            self._reports.causes[cause] += 1
        else:
            self._reports.loaded.add(request_id)
        self._outstanding.discard(request_id)
        self._changed.notify_all()

    def _fail_all(self) -> None:
        for request_id in list(self._outstanding):
            self._report(request_id, OWNER_ENDED)

    def _end(self, owner: DecoderOwner | None, failure: BaseException | None) -> None:
        """The thread ends, and with it whoever could write a block: fail what is left."""
        try:
            if owner is not None:
                owner.close()
        except Exception:
            _log.exception("the owner of vLLM's blocks was not closed well")
        finally:
            self._paged.close()
            with self._changed:
                self._failure = failure or HeadraceError("the connector was shut down")
                self._inbox.clear()
                self._fail_all()
                self._changed.notify_all()  # also whoever waits for the start


def _offered(
    settings: Settings, route: AskedRoute, sources: Sequence[Manifest], decoder: Manifest
) -> bool:
    """Whether all sources take a prompt by this route."""
    try:
        for source in sources:
            settings.options(route).check(source, decoder)
    except Refused:
        return False
    return True


def _handle(source: SourceConfig, start_timeout_s: float) -> SourceHandle:
    return SourceHandle(
        source.source,
        source.options,
        interpreter=source.python,
        num_slots=source.num_slots,
        start_timeout_s=start_timeout_s,
        name=source.name,
    )
