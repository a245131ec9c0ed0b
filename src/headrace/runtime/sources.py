"""The sources of one owner: attached, listened to, buried, and started again where asked for.

What a source says is brought to the owner; what its death means is brought to the machine. A source
that has hung up, or was told to be killed, is not waited for: time is kept for each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import lru_cache

from headrace.backends.base import HostRange, PinsSlabs
from headrace.errors import (
    DeviceError,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.geometry import Layout, Manifest
from headrace.ids import SourceId
from headrace.messages import (
    Computing,
    Failed,
    FromSource,
    Progress,
    Released,
    SourceFinal,
    SourceHeld,
)
from headrace.plan import Plan, compile_plan
from headrace.process import KILL_WAIT_S
from headrace.protocol.books import AttemptMessage, PlanFor
from headrace.protocol.owner import Owner
from headrace.protocol.snapshot import SlotLine
from headrace.runtime.keeping import Maker
from headrace.runtime.local import LocalSource
from headrace.runtime.restarts import HANG_UP_GRACE_S, Line, Restarts
from headrace.runtime.roster import Roster
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.watch import Watch
from headrace.runtime.worker import MESSAGES_PER_ATTEMPT, SourceHandle, close_together

_log = logging.getLogger("headrace.owner")


class Sources:
    """All sources of one owner, the local one included.

    handles, plans: by source, while it is in the machine's books.
    """

    def __init__(
        self,
        machine: Owner,
        decoder: Manifest,
        context: int,
        local: LocalSource | None,
        watch: Watch,
        tell: Callable[[SourceId, AttemptMessage, str], None],
        carry_out: Callable[[], None],
        pins: PinsSlabs | None = None,
    ) -> None:
        """`tell` brings what a source said of an attempt, and what is wrong with it, if anything.

        `carry_out` runs the commands.

        `local` is closed here, and comes into service with `open_local`. `pins`: who copies from
        the slabs, if it wants to be told of them.
        """
        self.handles: dict[SourceId, SourceHandle | LocalSource] = {}
        self.plans: dict[SourceId, PlanFor] = {}
        self._machine = machine
        self._decoder = decoder
        self._context = context
        self._watch = watch
        self._tell = tell
        self._carry_out = carry_out
        self._pins = pins
        self._pinned: dict[SourceId, HostRange] = {}
        self._still_pinned: list[SourceHandle] = []  # never unmapped under a device that copies
        self._next = 0
        self._dead: set[SourceId] = set()
        self._leaving: dict[SourceId, int] = {}  # hung up: killed at this time if it lives on
        self._killed: dict[SourceId, int] = {}  # given up at this time if it lives on
        self._local = local
        self._local_id: SourceId | None = None
        self._restarts = Restarts(machine, decoder, context, watch, self._enter_again)
        self._roster = Roster()

    def attach(self, handle: SourceHandle, policy: RestartPolicy | None) -> None:
        """Take a started source; waits for its handshake. Raises: Refused, PeerDied."""
        handle.attach(self._decoder, self._context, self._machine.epoch)
        line = None if policy is None else Line(handle, policy, time.monotonic_ns())
        self._enter(handle, line, expected=False)

    @property
    def has_local(self) -> bool:
        """Whether the owner can prefill by itself."""
        return self._local is not None

    def open_local(self) -> None:
        """Have the owner's own engine in service. Raises: Refused when memory is short."""
        if self._local is None or self._local_id is not None:
            return
        self._local.open()
        source = self._local_id = self._new(self._local)
        self._pin(source, HostRange(self._local.slot_address(0), self._local.slot(0).nbytes))
        now_ns = time.monotonic_ns()
        self._machine.add_source(
            source, self._local.num_slots, self.plans[source], now_ns, local=True
        )
        self._carry_out()

    def sides(self, *, local: bool) -> Iterator[tuple[Manifest, PlanFor]]:
        """Manifest and plans of every source that a request may go to, those away included.

        `local`: with the owner's own engine.
        """
        for source, handle in self.handles.items():
            if source not in self._dead and isinstance(handle, SourceHandle):
                yield handle.manifest, self.plans[source]
        if local and self._local is not None:
            yield self._local.manifest, self._plan_for(self._local.layout)
        for line in self._restarts.away:
            yield line.manifest, self._plan_for(line.layout)

    def makers(self, *, local: bool) -> Iterator[Maker]:
        """Who may compute for a request, those away included; `local`: the owner's engine too."""
        for source, handle in self.handles.items():
            if source not in self._dead and isinstance(handle, SourceHandle):
                yield Maker(handle.maker, handle.manifest.prefix)
        if local and self._local is not None:
            yield Maker(self._local.maker, self._local.manifest.prefix)
        for line in self._restarts.away:
            yield Maker(line.maker, line.manifest.prefix)

    def local_continues(self) -> bool:
        """Whether the owner can compute a remainder by itself; its slot is made by the first call.

        Not where memory is short, or its slot is out of service.
        """
        if self._local is None or not self._local.continues:
            return False
        try:
            self.open_local()
        except Refused as exc:
            _log.info("the owner's own engine is not used for remainders: %s", exc)
            return False
        return not self._machine.no_local_left

    @property
    def in_service(self) -> list[SourceId]:
        """Those in processes of their own that are not known to be dead."""
        return [
            source
            for source, handle in self.handles.items()
            if source not in self._dead and isinstance(handle, SourceHandle)
        ]

    @property
    def num_slots(self) -> int:
        """Slots of those."""
        return sum(self._process(source).num_slots for source in self.in_service)

    def run_local(self, take_in: Callable[[], None]) -> None:
        """Run the attempt that the owner's own engine was granted, if there is one."""
        source = self._local_id
        if self._local is not None and source is not None:
            self._local.run(
                self.plans[source], lambda message: self._take(source, message), take_in
            )

    def kill(self, source: SourceId, reason: str) -> None:
        """The machine wants a source ended; its pidfd tells when it is."""
        _log.warning("source %s is ended: %s", self._process(source).name, reason)
        self._roster.lost(source, reason)
        self._end(source)

    def served(self, source: SourceId) -> None:
        """It finished a request."""
        self._restarts.served(source)

    def before_tick(self, now_ns: int) -> None:
        """Expect another one after each that this tick of the machine will have killed."""
        for source in self._machine.overdue_sources(now_ns):
            self._restarts.expect_after(source)

    def tick(self, now_ns: int) -> None:
        """Do what is due by now: kills, and starts."""
        for source in [s for s, due_ns in self._leaving.items() if due_ns <= now_ns]:
            del self._leaving[source]
            self._end(source)  # it can take no prompt and give no lease back any more
        for source in [s for s, due_ns in self._killed.items() if due_ns <= now_ns]:
            del self._killed[source]
            handle = self._process(source)
            reason = f"source {handle.name} (pid {handle.pid}) cannot be killed"
            self._restarts.gave_up_on(source, f"{reason}: stuck in a device driver", now_ns)
        self._restarts.tick(now_ns)

    def next_due_ns(self) -> int | None:
        """When `tick` must be called next."""
        due = [*self._leaving.values(), *self._killed.values()]
        restart_ns = self._restarts.next_due_ns()
        return min([*due, *([] if restart_ns is None else [restart_ns])], default=None)

    def let_go(self) -> None:
        """Close what dead sources held, once nothing reads their slots."""
        for source in sorted(self._dead):
            if self._machine.forget_source(source):
                self._dead.remove(source)
                handle = self._process(source)
                try:
                    self._unpin(source)
                except DeviceError as exc:
                    _log.error("the slab of source %s stays mapped: %s", handle.name, exc)
                    self._still_pinned.append(handle)
                else:
                    handle.close(0.0, aside=True)
                del self.handles[source]
                del self.plans[source]

    @property
    def local_waits(self) -> bool:
        """Whether the owner's own engine has an attempt to run."""
        return self._local is not None and self._local.waits

    @property
    def set_aside(self) -> list[str]:
        """Why sources are not started again."""
        return self._restarts.set_aside

    def statistics(self) -> dict[str, dict[str, int]]:
        """Of the restarts, and of each source by its id."""
        each = {f"source {source}": h.statistics() for source, h in self.handles.items()}
        return {"restarts": self._restarts.statistics(), **each}

    def held(self, slots: Iterable[SlotLine]) -> list[SourceHeld]:
        """How each stands, the owner's own engine last once it is in service."""
        return self._roster.held(slots, self._local_id)

    def close(self) -> None:
        """End all of them, also those that start."""
        with ExitStack() as stack:
            if self._local is not None:
                stack.callback(self._local.close)
            handles = (*self.handles.values(), *self._still_pinned)
            processes = [each for each in handles if isinstance(each, SourceHandle)]
            stack.callback(close_together, processes)
            stack.callback(self._restarts.close)
            for source in list(self._pinned):
                stack.callback(self._unpin, source)

    # In service.

    def _enter(self, handle: SourceHandle, line: Line | None, *, expected: bool) -> None:
        source = self._new(handle)
        self._roster.entered(source, handle, line)
        if line is not None:
            self._restarts.serves(source, line)
        slab = HostRange(handle.slot_address(0), handle.num_slots * handle.slot_nbytes)
        self._pin(source, slab)
        plan_for, now_ns = self.plans[source], time.monotonic_ns()
        self._machine.add_source(source, handle.num_slots, plan_for, now_ns, expected=expected)
        self._watch.add(handle.channel_fd, lambda: self._receive(source))
        self._watch.add(handle.death_fd, lambda: self._bury(source))
        self._carry_out()

    def _enter_again(self, handle: SourceHandle, line: Line) -> None:
        self._enter(handle, line, expected=True)

    def _new(self, handle: SourceHandle | LocalSource) -> SourceId:
        source = SourceId(self._next)
        self._next += 1
        self.handles[source] = handle
        self.plans[source] = self._plan_for(handle.layout)
        return source

    def _pin(self, source: SourceId, slab: HostRange) -> None:
        if self._pins is not None:
            self._pins.register(slab)
            self._pinned[source] = slab

    def _unpin(self, source: SourceId) -> None:
        """Before its slab is unmapped. Raises: DeviceError."""
        slab = self._pinned.pop(source, None)
        if self._pins is not None and slab is not None:
            self._pins.unregister(slab)

    def _process(self, source: SourceId) -> SourceHandle:
        handle = self.handles[source]
        if isinstance(handle, LocalSource):
            raise LocalProtocolError("the owner's own engine is no process")
        return handle

    def _plan_for(self, layout: Layout) -> PlanFor:
        @lru_cache(maxsize=64)
        def plan_for(num_tokens: int, start: int) -> Plan:
            return compile_plan(self._decoder, layout, num_tokens, self._context, start)

        return plan_for

    # What comes in.

    def _receive(self, source: SourceId) -> None:
        """Take in what a source told: in one turn no more than one attempt may have queued."""
        for _ in range(MESSAGES_PER_ATTEMPT):
            if not self._receive_one(source):
                return

    def _receive_one(self, source: SourceId) -> bool:
        handle = self._process(source)
        try:
            message = handle.receive()
        except WouldBlock:
            return False
        except PeerDied:
            self._hung_up(source)
            return False
        except RemoteProtocolError as exc:
            self._machine.undecodable(source, str(exc), time.monotonic_ns())
            self._carry_out()
            return True
        self._take(source, message)
        return True

    def _take(self, source: SourceId, message: FromSource) -> None:
        if isinstance(message, SourceFinal):
            fault = _fault_of(self.handles[source].manifest, message)
            self._tell(source, message, fault)
        elif isinstance(message, Computing | Progress | Failed | Released):
            self._tell(source, message, "")
        else:
            self._machine.dropped["unexpected"] += 1

    # How it goes.

    def _hung_up(self, source: SourceId) -> None:
        """The channel ended. That is no proof of death: one that lives on has to be ended."""
        handle = self._process(source)
        if handle.channel_fd in self._watch:
            self._watch.remove(handle.channel_fd)
            self._leaving[source] = time.monotonic_ns() + int(HANG_UP_GRACE_S * 1e9)
            self._roster.lost(source, f"source {handle.name} closed its channel")

    def _end(self, source: SourceId) -> None:
        self._process(source).kill()
        self._killed[source] = time.monotonic_ns() + int(KILL_WAIT_S * 1e9)

    def _bury(self, source: SourceId) -> None:
        handle = self._process(source)
        if not handle.died():
            return
        self._watch.remove(handle.death_fd)
        while self._receive_one(source):
            pass  # what it said before it died still counts; no more can come
        self._watch.remove(handle.channel_fd)  # a process that it forked may hold the other end
        self._leaving.pop(source, None)
        self._killed.pop(source, None)
        _log.info("%s", handle.exit_text())
        self._roster.lost(source, handle.exit_text())
        self._restarts.died(source, handle.exit_text(), time.monotonic_ns())
        self._dead.add(source)
        self._carry_out()


def _fault_of(manifest: Manifest, final: SourceFinal) -> str:
    """What of a final its source's manifest did not promise; empty if nothing."""
    if final.first == manifest.first and final.token < manifest.vocab_size:
        return ""
    return (
        f"a final of {final.first} {final.token}, the source's manifest has {manifest.first} "
        f"and {manifest.vocab_size} ids"
    )
