"""Sources that died are started again here, without ever making their owner wait.

A **line** is one source and all that take its place. While one of it serves, it is watched by
`headrace.runtime.sources`; from its death until the next one is attached, the line is here: waiting
for its time, starting (the handshake is taken piece by piece, as it comes), or ending (a start that
failed and whose process has to be gone before the next). The machine is told of each source that is
expected before it hears of the death, so that nobody who waits for a slot is turned away meanwhile.

Only two things take the owner's time: the spawn, and making the slab, which is allocated and
touched at once (about 0.3 s for each GiB).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum

from headrace.errors import HeadraceError, PeerDied
from headrace.geometry import Manifest
from headrace.ids import SourceId
from headrace.messages import SourceState
from headrace.process import KILL_WAIT_S
from headrace.protocol.owner import Owner
from headrace.runtime.supervisor import RestartPolicy, SetAside, Supervisor
from headrace.runtime.watch import Watch
from headrace.runtime.worker import SourceHandle

HANG_UP_GRACE_S = 0.2  # from the end of a source's channel to its death, in a process that ends

_UNLUCKY = (HeadraceError, OSError, MemoryError)  # what a start may raise; the owner lives on

_log = logging.getLogger("headrace.owner")


class _Phase(Enum):
    SERVING = "serving"
    WAITING = "waiting"
    STARTING = "starting"
    ENDING = "ending"


class Line:
    """One source and those that take its place.

    handle: the one that serves, starts or ends, or the last. manifest, layout: the first one's,
    which the others must have too. due_ns: when time does the next thing.
    """

    def __init__(self, handle: SourceHandle, policy: RestartPolicy, now_ns: int) -> None:
        self.handle = handle
        self.manifest = handle.manifest
        self.maker = handle.maker
        self.layout = handle.layout
        self.supervisor = Supervisor(f"source {handle.name}", policy, now_ns)
        self.phase = _Phase.SERVING
        self.due_ns: int | None = None
        self.expected = False  # as the machine was told
        self.greeted = False
        self.failure = ""  # of a start: why, if its end does not tell
        self.hopeless = False  # to start it once more would change nothing
        self.reason = ""  # why it is away, or was the last time
        self.aside = False

    @property
    def standing(self) -> tuple[SourceState, str]:
        """What becomes of it, and why."""
        if self.aside:
            return "set aside", self.reason
        match self.phase:
            case _Phase.SERVING:
                return "in service", ""
            case _Phase.WAITING:
                return "waiting to restart", self.reason
            case _Phase.STARTING | _Phase.ENDING:
                return "starting", self.reason


class Restarts:
    """The lines of one owner."""

    def __init__(
        self,
        machine: Owner,
        decoder: Manifest,
        context: int,
        watch: Watch,
        enter: Callable[[SourceHandle, Line], None],
    ) -> None:
        """`enter` takes a source that was attached into service."""
        self._machine = machine
        self._decoder = decoder
        self._context = context
        self._watch = watch
        self._enter = enter
        self._serving: dict[SourceId, Line] = {}
        self._away: list[Line] = []
        self._stuck: list[SourceHandle] = []
        self._counts: Counter[str] = Counter()
        self.set_aside: list[str] = []  # the reasons

    @property
    def away(self) -> list[Line]:
        """Lines of which none is in service now, but one will be."""
        return self._away

    def serves(self, source: SourceId, line: Line) -> None:
        """A source of this line is in service."""
        if line in self._away:
            self._away.remove(line)
            self._counts["restarted"] += 1
        self._serving[source] = line
        line.phase, line.due_ns, line.expected = _Phase.SERVING, None, False
        line.supervisor.entered(time.monotonic_ns())

    def served(self, source: SourceId) -> None:
        """It finished a request."""
        if source in self._serving:
            self._serving[source].supervisor.served()

    def expect_after(self, source: SourceId) -> None:
        """It is about to be killed: another will take its place, if it has a line."""
        if source in self._serving:
            self._expect(self._serving[source])

    def died(self, source: SourceId, reason: str, now_ns: int) -> None:
        """It is proven gone: tell the machine, and start another after a while."""
        line = self._serving.pop(source, None)
        if line is None:
            self._machine.source_died(source, reason, now_ns)
            return
        self._expect(line)
        self._machine.source_died(source, reason, now_ns)
        self._away.append(line)
        self._failed(line, reason, now_ns)

    def gave_up_on(self, source: SourceId, reason: str, now_ns: int) -> None:
        """It does not die although it was killed: do not wait for it."""
        line = self._serving.pop(source, None)
        if line is not None:
            self._put_aside(line, reason, now_ns)

    def tick(self, now_ns: int) -> None:
        """Do what is due by now."""
        for line in list(self._away):
            if line.due_ns is None or line.due_ns > now_ns:
                continue
            if line.phase is _Phase.WAITING:
                self._start(line, now_ns)
            elif line.phase is _Phase.STARTING:
                self._end(line, line.handle.late_text(), now_ns)
            elif not line.failure:  # its channel ended, and it lives on
                self._end(line, "it closed its channel while starting", now_ns)
            else:
                self._stuck.append(line.handle)
                text = f"source {line.handle.name} (pid {line.handle.pid}) cannot be killed"
                self._put_aside(line, f"{text}: stuck in a device driver", now_ns)

    def next_due_ns(self) -> int | None:
        """When `tick` must be called next."""
        return min((line.due_ns for line in self._away if line.due_ns is not None), default=None)

    def statistics(self) -> dict[str, int]:
        """Lines by phase; and since the start: restarts, starts that failed, lines set aside."""
        phases = Counter(line.phase.value for line in self._away)
        phases["serving"] = len(self._serving)
        counted = ("restarted", "start_failed")
        return {
            **{phase.value: phases[phase.value] for phase in _Phase},
            **{name: self._counts[name] for name in counted},
            "set_aside": len(self.set_aside),
        }

    def close(self) -> None:
        """End those that start or end."""
        with ExitStack() as stack:
            for handle in (*self._stuck, *(line.handle for line in self._away)):
                stack.callback(handle.close, 0.0)

    # A line away.

    def _expect(self, line: Line) -> None:
        if not line.expected:
            line.expected = True
            self._machine.expect_source()

    def _failed(self, line: Line, reason: str, now_ns: int) -> None:
        line.reason = reason
        decision = line.supervisor.died(reason, now_ns)
        if line.hopeless:
            self._put_aside(line, reason, now_ns)
        elif isinstance(decision, SetAside):
            self._put_aside(line, decision.reason, now_ns)
        else:
            line.phase, line.due_ns = _Phase.WAITING, decision.at_ns
            after_s = (decision.at_ns - now_ns) / 1e9
            _log.warning("%s; it is started again in %.1f s", reason, after_s)

    def _put_aside(self, line: Line, reason: str, now_ns: int) -> None:
        _log.error("%s", reason)
        if line in self._away:
            self._away.remove(line)
        line.due_ns, line.reason, line.aside = None, reason, True
        self.set_aside.append(reason)
        if line.expected:
            line.expected = False
            self._machine.source_not_coming(reason, now_ns)

    def _start(self, line: Line, now_ns: int) -> None:
        handle = line.handle = line.handle.respawn()
        line.greeted, line.failure = False, ""
        try:
            handle.start()
        except _UNLUCKY as exc:
            handle.close(0.0)
            self._counts["start_failed"] += 1
            self._failed(line, str(exc), now_ns)
            return
        line.phase = _Phase.STARTING
        line.due_ns = now_ns + int(handle.start_timeout_s * 1e9)
        self._watch.add(handle.channel_fd, lambda: self._step(line))
        self._watch.add(handle.death_fd, lambda: self._over(line))

    def _step(self, line: Line) -> None:
        """Take what came of the handshake."""
        handle = line.handle
        try:
            if not line.greeted:
                manifest = handle.take_manifest()
                if manifest is None or not self._is_the_same(line, manifest):
                    return
                handle.greet(self._decoder, self._context, self._machine.epoch)
                line.greeted = True
            attached = handle.take_attached()
        except PeerDied:  # its pidfd tells how it ended
            self._watch.remove(handle.channel_fd)
            line.phase = _Phase.ENDING
            line.due_ns = time.monotonic_ns() + int(HANG_UP_GRACE_S * 1e9)
        except _UNLUCKY as exc:
            self._end(line, str(exc) or type(exc).__name__, time.monotonic_ns())
        else:
            if attached:
                self._attached(line)  # its errors are the owner's, and no start that failed

    def _is_the_same(self, line: Line, manifest: Manifest) -> bool:
        for field in Manifest.__struct_fields__:
            before, now = getattr(line.manifest, field), getattr(manifest, field)
            if now != before:
                line.hopeless = True
                text = f"source {line.handle.name} came back with another {field} and is set"
                self._end(line, f"{text} aside", time.monotonic_ns())
                return False
        return True

    def _attached(self, line: Line) -> None:
        for fd in (line.handle.channel_fd, line.handle.death_fd):
            self._watch.remove(fd)
        _log.info("source %s is in service again", line.handle.name)
        self._enter(line.handle, line)

    def _end(self, line: Line, failure: str, now_ns: int) -> None:
        """A start failed: the process must be gone before the next one."""
        line.failure = failure
        line.phase = _Phase.ENDING
        line.due_ns = now_ns + int(KILL_WAIT_S * 1e9)
        self._watch.remove(line.handle.channel_fd)
        line.handle.kill()

    def _over(self, line: Line) -> None:
        handle = line.handle
        if not handle.died():
            return
        if line.phase is _Phase.STARTING:
            self._step(line)  # it may have said why
        if line.phase is _Phase.SERVING:
            return  # it came into service and is buried from there
        self._watch.remove(handle.channel_fd)
        self._watch.remove(handle.death_fd)
        reason = line.failure or f"{handle.exit_text()} while starting"
        handle.close(0.0, aside=True)
        if line not in self._away:  # it was given up, and is gone at last
            self._stuck.remove(handle)
            return
        self._counts["start_failed"] += 1
        self._failed(line, reason, time.monotonic_ns())
