"""One schedule: a seeded run of the real machines in virtual time, checked after every step."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.ids import AttemptId, RequestId, SourceId
from headrace.protocol.commands import Cause, Outcome, Report
from headrace.testing.events import Cancel, GiveUp, Imported, Outrun, Tell
from headrace.testing.fault_lab import faults
from headrace.testing.fault_lab.choices import Choices, Recorded, Stream
from headrace.testing.fault_lab.faults import Group
from headrace.testing.fault_lab.forging import Identity
from headrace.testing.fault_lab.rest import at_rest, longest_ns
from headrace.testing.fault_lab.safety import Broken, attributed
from headrace.testing.fault_lab.setting import MAX_REQUESTS, MS, Asked, S, draw_setting
from headrace.testing.fault_lab.shell import Shell
from headrace.testing.fault_lab.sources import LabSource
from headrace.testing.fault_lab.storage import Device
from headrace.testing.fault_lab.watched import Attach, LabEvent, WatchedWorld
from headrace.testing.fault_lab.words import describe_event, facts_of, seconds
from headrace.testing.instances import EPOCH

MAX_STEPS: Final = 6000
PUBLISH_REFUSED: Final = "poison"  # the shell would say where; here it is the explorer's word
_BACKOFFS: Final = (1 * MS, 500 * MS, 5 * S)


@dataclass
class Seen:
    """What one schedule came to."""

    recorded: Recorded
    fingerprint: int = 0
    num_steps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    parked: Counter[str] = field(default_factory=Counter)
    broken: Broken | None = None
    trace: list[str] = field(default_factory=list)


class Lab:
    """Everything that takes part in one schedule, and its clock."""

    def __init__(self, choices: Choices, *, tracing: bool = False, one_lane: bool = False) -> None:
        self.choices = choices
        callers = [choices.stream(f"c{at}") for at in range(MAX_REQUESTS)]
        self.setting = draw_setting(choices.stream("s"), callers, one_lane=one_lane)
        self.geometry = self.setting.tiny.geometry
        self.now_ns = 0
        self.calm = False
        self.trace: list[str] | None = [] if tracing else None
        self.faults: Counter[str] = Counter()
        self.fingerprint = 0
        self.num_steps = 0
        self.world = WatchedWorld(self.setting.tiny)
        self.device = Device(self.setting.tiny.lanes, self.geometry)
        self.sources: dict[SourceId, LabSource] = {}
        self.grants: list[Identity] = []
        self.granted: dict[int, SourceId] = {}  # the last source of each request
        self.asked: list[Asked] = []  # of each request that was taken
        self.reports: dict[int, Outcome] = {}
        self.outcomes: Counter[str] = Counter()
        self.submitted_ns: dict[int, int] = {}
        self._num_events: Counter[int] = Counter()  # of each request
        self._blamed: set[int] = set()
        self._blamed_sources: set[SourceId] = set()
        self._all_blamed = False
        self.restarts_left = self.setting.restarts
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._next_event = 0
        self.shell = Shell(self)

    def run(self) -> None:
        """Run until everything has come to rest.

        Raises:
            Broken: a rule was broken.
        """
        if self.setting.local:
            self._attach(1, local=True)
        for num_slots in self.setting.slots:
            self._attach(num_slots)
        at_ns = 0
        for place, asked in enumerate(self.setting.asked):
            at_ns += asked.after_ns
            self.at(at_ns, self._submit, place)
        while self._heap:
            at_ns, _, act, arguments = heapq.heappop(self._heap)
            self.now_ns = max(self.now_ns, at_ns)
            if not self.calm and self.now_ns >= self.setting.horizon_ns:
                self.calm = True
                self.say("all faults stop")
            self.num_steps += 1
            if self.num_steps > MAX_STEPS:
                raise Broken(4, f"after {MAX_STEPS} steps it is still not at rest")
            act(*arguments)
        at_rest(self)

    def at(self, at_ns: int, act: Callable[..., None], *arguments: Any) -> None:
        """Call `act` at a time that is now or later."""
        self._next_event += 1
        heapq.heappush(self._heap, (at_ns, self._next_event, act, arguments))

    # What goes wrong.

    def fault(self, stream: Stream, group: Group, kinds: Sequence[str], weight: float = 1.0) -> str:
        """Perhaps one of `kinds` happens now; empty if not."""
        peril = self.setting.perils[group]
        if self.calm or not peril.share:
            return ""
        able = [kind for kind in kinds if kind in peril.only]
        if not able or not stream.odds(peril.share * weight):
            return ""
        kind = stream.pick(able)
        self.faults[kind] += 1
        self.fingerprint = hash((self.fingerprint, kinds.index(kind), len(kinds)))
        self.say("fault: %s", kind)
        return kind

    def blame_request(self, request: int) -> None:
        """A fault of this request: it may fail."""
        self._blamed.add(request)

    def blame_source(self, source: SourceId) -> None:
        """A fault of this source's process: what it runs may fail, and so may who waits."""
        self._blamed_sources.add(source)
        self._all_blamed = True

    def blame_device(self, request: int) -> None:
        """A fault of the device: a lane may be lost, so who waits may fail too."""
        self._blamed.add(request)
        self._all_blamed = True

    def blame(self, message: Any, source: SourceId) -> None:
        """A fault on the way: the message's request may fail, and what its source runs."""
        self._blamed.add(message.attempt.counter)
        self._blamed_sources.add(source)

    def identities(self) -> list[Identity]:
        """All grants so far."""
        return self.grants

    # What the callers do, and what they are told.

    def request_event(self, attempt: AttemptId, event: Tell | Imported) -> None:
        """An event of one request; its caller may cancel just now, before or after what follows."""
        request = attempt.counter
        self._num_events[request] += 1
        asked = self.asked[request] if request < len(self.asked) else None
        due = asked is not None and asked.cancel_at == self._num_events[request]
        outrun = due and asked is not None and asked.outrun and not self.world.is_idle(event)
        if outrun and asked is not None and isinstance(event, Imported):
            # A digest check is begun with the import's end, whatever comes next; a forged message
            # may bring a digest that nobody asked for.
            outrun = not (asked.digest or self.world.ledger.accounts[attempt].digests)
        if outrun:
            self.shell.bring(Outrun(event, Cancel(RequestId(EPOCH, request))))
        else:
            self.shell.bring(event)
            if due:
                self._cancel(request)

    def retried(self, attempt: AttemptId) -> None:
        """An attempt failed and another follows."""
        self.device.pass_on(attempt)
        self.outcomes["retried"] += 1
        if attempt.counter in self.reports:
            raise Broken(4, f"{attempt} is followed by another although its request has ended")

    def reported(self, report: Report) -> None:
        """The caller hears of its request's end."""
        number, outcome = report.request.counter, report.outcome
        if number in self.reports:
            raise Broken(4, f"request {number} ends as {self.reports[number]}, then as {outcome}")
        self.reports[number] = outcome
        self.outcomes[outcome.value if report.cause is None else report.cause.value] += 1
        took_ns = self.now_ns - self.submitted_ns[number]
        if took_ns > longest_ns(self.setting):
            raise Broken(4, f"request {number} took {seconds(took_ns)} to end")
        blamed = self._all_blamed or number in self._blamed
        blamed = blamed or self.granted.get(number) in self._blamed_sources
        if outcome is Outcome.FAILED and not blamed:
            raise Broken(
                4, f"request {number} fails although no fault was near it: {report.reason}"
            )
        located = "positions [" in report.reason or report.reason == PUBLISH_REFUSED
        if report.cause is Cause.CORRUPT and not located:
            raise Broken(1, f"request {number} is corrupt, and where is not said: {report.reason}")

    def restart(self, source: LabSource) -> None:
        """Its death was told: a new process takes its place after a while, or is given up."""
        self.restarts_left -= 1
        stream = self.choices.stream(f"p{source.id}")
        at_ns = self.now_ns + stream.pick(_BACKOFFS)
        if self.fault(stream, "process", faults.NOT_COMING, 3.0):
            self.at(at_ns, self.shell.bring, GiveUp())
        else:
            self.at(at_ns, self._attach, len(source.slots), True)

    def _attach(self, num_slots: int, expected: bool = False, local: bool = False) -> None:
        source = SourceId(len(self.sources))
        self.sources[source] = LabSource(self, source, num_slots, local=local)
        self.shell.bring(Attach(source, num_slots, expected, local))

    def _submit(self, place: int) -> None:
        asked = self.setting.asked[place]
        event = self.world.ask(asked)
        if self.world.is_idle(event):
            self.outcomes["refused"] += 1
            self.shell.bring(event)
            return
        request = len(self.asked)
        self.asked.append(asked)
        self.submitted_ns[request] = self.now_ns
        if asked.deadline_ns is not None:
            self._blamed.add(request)
        if asked.cancel_after_ns is not None:
            self.at(self.now_ns + asked.cancel_after_ns, self._cancel, request)
        if asked.cancel_at == 0 and asked.outrun:
            self.shell.bring(Outrun(event, Cancel(RequestId(EPOCH, request))))
        else:
            self.shell.bring(event)
            if asked.cancel_at == 0:
                self._cancel(request)

    def _cancel(self, request: int) -> None:
        self.shell.bring(Cancel(RequestId(EPOCH, request)))
        if self.reports.get(request) is Outcome.PUBLISHED:
            self.shell.retire(request)  # a caller that wants no more of an entry gives it back

    # What is kept of it.

    def note(self, event: LabEvent) -> None:
        """An event is brought to the machine."""
        self.fingerprint = hash((self.fingerprint, *facts_of(event)))
        if self.trace is not None:
            self.trace.append(f"{seconds(self.now_ns)}  {describe_event(event)}")

    def say(self, text: str, *facts: object) -> None:
        """Something happened that the machine does not see."""
        if self.trace is not None:
            self.trace.append(f"{seconds(self.now_ns)}    {text % facts}")


def run_schedule(
    seed: int = 0,
    recorded: Mapping[str, Sequence[int]] | None = None,
    *,
    tracing: bool = False,
    one_lane: bool = False,
) -> Seen:
    """Run one schedule: of a seed, or of recorded choices; a broken rule is in what it returns.

    `one_lane`: of the seeds, those settings are drawn that have one lane, and where some may park.
    """
    choices = Choices(seed, recorded)
    lab = None
    broken: Broken | None = None
    try:
        lab = Lab(choices, tracing=tracing, one_lane=one_lane)
        lab.run()
    except Exception as exc:  # whatever a machine raises where it must not is a finding
        broken = attributed(exc)
        broken.__cause__ = exc
    seen = Seen(choices.recorded(), broken=broken)
    if lab is not None:
        seen.fingerprint, seen.num_steps = lab.fingerprint, lab.num_steps
        seen.outcomes, seen.faults = lab.outcomes, lab.faults
        seen.dropped, seen.parked = lab.world.owner.dropped, lab.shell.parking.counts
        seen.trace = lab.trace or []
    return seen
