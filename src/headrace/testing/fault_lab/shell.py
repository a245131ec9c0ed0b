"""The hands of the owner in a schedule: it brings events to the machine and does what it commands.

As in the real shell every command is done at once and in order, and what comes of it is told back.
The device may refuse, fail, be late or never come back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

from headrace.errors import RemoteProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SourceId
from headrace.messages import (
    Cancel,
    Computing,
    Failed,
    Progress,
    Released,
    SourceFinal,
    decode_from_source,
)
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
    Retry,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.testing import events
from headrace.testing.events import (
    Answer,
    Begin,
    Die,
    Digested,
    Event,
    Forget,
    Garble,
    Imported,
    Misuse,
    Reinstate,
    Tell,
    Tick,
)
from headrace.testing.fault_lab import faults
from headrace.testing.fault_lab.parking import Parking
from headrace.testing.fault_lab.safety import Broken
from headrace.testing.fault_lab.setting import MS, S
from headrace.testing.fault_lab.storage import POISON, Copying, digest_of, logits_of, token_of
from headrace.testing.fault_lab.watched import Attach, LabEvent
from headrace.testing.instances import EPOCH

if TYPE_CHECKING:
    from headrace.testing.fault_lab.schedule import Lab
    from headrace.testing.fault_lab.sources import LabSource

_ANSWERS: Final = {Reserve: faults.RESERVE, Publish: faults.PUBLISH, Free: faults.FREE}
LATE_NS: Final = 26 * S  # longer than most drain deadlines and than some progress deadlines


class Shell:
    """Carries out the commands of the owner's machine."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._device = lab.choices.stream("d")
        self._owner = lab.choices.stream("o")
        self._later: list[Event] = []  # what a command came to, told once all are done
        self._copying: Counter[AttemptId] = Counter()  # copies that run, of each attempt
        self._poisoned: set[AttemptId] = set()  # whose storage was filled before the first import
        self.parking = Parking(lambda attempt: lab.world.ledger.accounts[attempt])
        self.num_phantoms = 0  # reserves that failed and took no lane: by so many a count is off
        self._import_planned = False
        self._tick_ns: int | None = None

    def bring(self, event: LabEvent) -> None:
        """Bring one event and all that follows from it at once."""
        self._bring(event)
        while self._lab.world.unanswered or self._later:
            if self._lab.world.unanswered:
                self._call_back()
                self._answer()
            else:
                self._bring(self._later.pop(0))
        self._let_go()
        if self._owner.odds(0.02):
            self._bring(self._misuse())
        self._plan()

    def receive(self, source: LabSource, payload: bytes) -> None:
        """A message arrives."""
        lab = self._lab
        if source.id in lab.world.ledger.forgotten:
            return  # its channel is closed
        try:
            message = decode_from_source(payload)
        except RemoteProtocolError:
            self.bring(Garble(source.id))
            return
        if isinstance(message, Computing | Progress | SourceFinal | Failed | Released):
            fault = isinstance(message, SourceFinal) and not self._is_promised(message)
            lab.request_event(message.attempt, Tell(source.id, message, good=False, fault=fault))
        else:
            lab.world.owner.dropped["unexpected"] += 1

    def bury(self, source: LabSource) -> None:
        """The death of a source is proven, and all that it said was read."""
        restart = self._lab.restarts_left > 0
        self.bring(Die(source.id, restart))
        if restart:
            self._lab.restart(source)

    def tick(self) -> None:
        """The timer fires."""
        world = self._lab.world
        world.now_ns = self._lab.now_ns - 1  # the event moves it on by one
        world.ticked_ns = self._lab.now_ns
        self.bring(Tick())

    def _bring(self, event: LabEvent) -> None:
        lab, world = self._lab, self._lab.world
        lab.note(event)
        if not isinstance(event, Tick):
            world.now_ns = lab.now_ns
        if not isinstance(event, Attach) and world.is_idle(event):
            world.bring_idle(event)
            world.check()
            return
        world.bring(event)
        world.check()
        for command in world.owner.given:
            self.parking.saw(command)
            self._carry_out(command)

    def _let_go(self) -> None:
        ledger = self._lab.world.ledger
        for source in ledger.dead - ledger.forgotten:
            self._bring(Forget(source))  # refused until nothing is left of it

    def _misuse(self) -> Event:
        """A call that the shell must not make."""
        lab, ledger = self._lab, self._lab.world.ledger
        calls: list[Event] = [
            Misuse("import_done", ImportId(1 << 20)),
            Misuse("digest_checked", ImportId(1 << 20)),
        ]
        calls.append(Misuse("reinstate", AttemptId(EPOCH, 1 << 20, 1)))
        if not ledger.num_expected:
            calls.append(Misuse("not_coming", SourceId(0)))
        for source in lab.sources:
            calls.append(Forget(source))
            known = source not in ledger.forgotten
            calls.append(Misuse("add_source" if known else "forget_source", source))
        for attempt, account in ledger.accounts.items():
            if account.over or account.followed:
                continue
            calls.append(Misuse("published", attempt))
            calls.append(Misuse("publish_refused", attempt))
            if account.outcome is not Outcome.PUBLISHED:
                calls.append(Misuse("retire", attempt.request))
            if account.outcome is not None or account.flights or not account.storage:
                calls.append(Misuse("reserve_refused", attempt))
        calls = [call for call in calls if lab.world.is_idle(call)]
        return self._owner.pick(calls)

    def _plan(self) -> None:
        """See to it that the timer fires in time, and that imports begin."""
        lab = self._lab
        due_ns = lab.world.owner.due_ns
        if due_ns is not None and (self._tick_ns is None or due_ns < self._tick_ns):
            self._tick_ns = due_ns
            at_ns = max(due_ns, lab.now_ns)
            lab.at(at_ns + lab.setting.lateness_ns, self._timer, due_ns)
            if self._owner.odds(0.05):  # a timer may also fire for nothing
                lab.at(max(lab.now_ns, at_ns - 1), self.tick)
        if lab.world.owner.has_pieces and not self._import_planned:
            self._import_planned = True
            wait_ns = self._owner.pick((0, 1 * MS, 40 * MS))
            lab.at(lab.now_ns + wait_ns, self._begin_imports)

    def _timer(self, due_ns: int) -> None:
        if self._tick_ns != due_ns:
            return  # an earlier one was set meanwhile, and fired
        self._tick_ns = None
        now_due_ns = self._lab.world.owner.due_ns
        if now_due_ns is not None and now_due_ns <= self._lab.now_ns:
            self.tick()
        else:
            self._plan()

    def _begin_imports(self) -> None:
        self._import_planned = False
        if self._lab.world.owner.has_pieces:
            self.bring(Begin(self._lab.setting.budget_nbytes))

    def _is_promised(self, final: SourceFinal) -> bool:
        """Whether a final is what the source's manifest promises."""
        geometry = self._lab.geometry
        return final.first == geometry.first and final.token < geometry.manifest.vocab_size

    # What comes of each command.

    def _carry_out(self, command: Command) -> None:
        lab = self._lab
        match command:
            case StartPrefill():
                self._start_prefill(command)
            case SendCancel(attempt=attempt, source=source):
                lab.sources[source].link.down(Cancel(attempt))
            case KillSource(source=source):
                lab.blame_source(source)
                lab.sources[source].kill()
            case StartImport():
                self._start_import(command)
            case CheckDigest():
                self._check_digest(command)
            case Quarantine(attempt=attempt):
                self._lose(attempt)
            case Retry(attempt=attempt):
                lab.retried(attempt)
            case Report():
                lab.reported(command)
            case _:
                pass  # answered one by one: Reserve, Publish, Free

    def _start_prefill(self, command: StartPrefill) -> None:
        lab, attempt = self._lab, command.attempt
        source, asked = lab.sources[command.source], lab.asked[attempt.counter]
        slot = source.slots[command.slot]
        slot.grant(attempt, command.generation, poison=asked.digest or asked.poison)
        if source.dead:
            slot.writing = False  # nobody is there to take the grant
        lab.grants.append((attempt, int(command.slot), int(command.generation)))
        lab.granted[attempt.counter] = source.id
        source.link.down(asked.grant(attempt, command.slot, command.generation))

    def _start_import(self, command: StartImport) -> None:
        lab, attempt = self._lab, command.attempt
        slot = lab.sources[command.source].slots[command.slot]
        if slot.granted != attempt:
            raise Broken(2, f"an import for {attempt} reads {slot}, which is {slot.granted}'s")
        asked = lab.asked[attempt.counter]
        if asked.poison and attempt not in self._poisoned:
            self._poisoned.add(attempt)
            lab.device.poison(attempt.counter, asked.num_tokens)
        places = lab.geometry.copied(asked.num_tokens, command.piece)
        copying = Copying(attempt, lab.device.held(attempt.counter), slot, places)
        self._copying[attempt] += 1
        fault = lab.fault(self._device, "device", faults.IMPORT)
        takes_ns = self._device.pick((0, 1 * MS, 30 * MS, 500 * MS))
        if fault:
            lab.blame_device(attempt.counter)
            self._disturb(fault, command.import_id, copying, takes_ns)
        elif takes_ns:
            lab.at(lab.now_ns + takes_ns, self._fence, command.import_id, copying, True)
        else:
            self._land(copying)
            self._later.append(Imported(command.import_id, good=True))

    def _disturb(self, fault: str, import_id: ImportId, copying: Copying, takes_ns: int) -> None:
        lab = self._lab
        ended_ns = lab.now_ns + takes_ns
        match fault:
            case "import-never-ends":
                pass
            case "import-fails-at-once":  # and goes on for a while all the same
                self._later.append(Imported(import_id, good=False))
                lab.at(ended_ns, self._fence, import_id, copying, False)
            case "import-fails-later":
                lab.at(ended_ns, self._fail_import, import_id, copying)
            case "import-leaves-out":
                asked = lab.asked[copying.attempt.counter]
                copying.short = asked.digest or asked.poison  # else nothing could show it
                lab.at(ended_ns, self._fence, import_id, copying, True)
            case _:
                lab.at(lab.now_ns + LATE_NS, self._fence, import_id, copying, True)

    def _fence(self, import_id: ImportId, copying: Copying, told: bool) -> None:
        self._land(copying)
        if told and self._lab.world.owner.is_in_flight(import_id):
            self._lab.request_event(copying.attempt, Imported(import_id, good=True))

    def _land(self, copying: Copying) -> None:
        self._copying[copying.attempt] -= 1
        copying.land()

    def _fail_import(self, import_id: ImportId, copying: Copying) -> None:
        if self._lab.world.owner.is_in_flight(import_id):
            self._lab.request_event(copying.attempt, Imported(import_id, good=False))
        self._lab.at(self._lab.now_ns + 2 * S, self._fence, import_id, copying, False)

    def _check_digest(self, command: CheckDigest) -> None:
        lab, attempt, import_id = self._lab, command.attempt, command.import_id
        fault = lab.fault(self._device, "device", faults.CHECK)
        if fault:
            lab.blame_device(attempt.counter)
            if fault == "digest-check-fails":
                self._later.append(Imported(import_id, good=False))
            return
        n = lab.asked[attempt.counter].num_tokens
        cells = lab.device.held(attempt.counter).cells
        landed = [cells.get(key, POISON) for _, key in lab.geometry.copied(n, command.span)]
        actual = digest_of(landed)
        reason = f"{command.span} hold poison" if POISON in landed else ""
        lab.world.digests[import_id] = actual, reason
        good = actual == command.expected and not reason
        self._later.append(Digested(import_id, good))

    def _call_back(self) -> None:
        """Perhaps a caller, called back meanwhile, cancels what is about to be published."""
        world = self._lab.world
        command = world.unanswered[0]
        if isinstance(command, Publish) and self._owner.odds(0.02):
            self._bring(events.Cancel(command.attempt.request))

    def _answer(self) -> None:
        """What the device makes of the oldest command that it was given."""
        lab = self._lab
        command = lab.world.unanswered[0]
        request = command.attempt.counter
        if isinstance(command, Publish) and not lab.world.owner.may_publish(command.attempt):
            lab.world.unanswered = lab.world.unanswered[1:]
            return
        how: Literal["done", "failed", "refused"] = "done"
        fault = lab.fault(self._device, "device", _ANSWERS[type(command)], 0.5)
        if fault:
            lab.blame_device(request)
            how = "refused" if fault == "reserve-refused" else "failed"
        if isinstance(command, Publish) and how == "done" and self._shows_poison(request):
            how = "refused"
        match command:
            case Reserve() if how != "refused":
                got = self._reserve(request)
                self.num_phantoms += how == "failed" and not got
                how = how if got or how == "failed" else "refused"
            case Publish() if how == "done":
                self._publish(command)
            case Free() if how == "done":
                lab.device.free(request)
            case Free():
                self._lose(command.attempt)
        if how == "done" and not isinstance(command, Publish):
            lab.world.unanswered = lab.world.unanswered[1:]
            return
        self._bring(Answer(command, how))

    def _shows_poison(self, request: int) -> bool:
        asked = self._lab.asked[request]
        return asked.poison and self._lab.device.has_poison(request, asked.num_tokens)

    def _lose(self, attempt: AttemptId) -> None:
        """What this attempt had is out of service; somebody may look after it later."""
        lab = self._lab
        lab.device.lose(attempt.counter)
        after_ns = self._owner.pick((0, 3 * S, 50 * S))
        if after_ns:
            lab.at(lab.now_ns + after_ns, self._reinstate, attempt)

    def _reinstate(self, attempt: AttemptId) -> None:
        """An operator has made sure that the device is quiet."""
        lab = self._lab
        if attempt in lab.world.ledger.apart and not self._copying[attempt]:
            lab.device.reinstate(attempt.counter)
            self.bring(Reinstate(attempt))

    def _reserve(self, request: int) -> bool:
        """Set a lane aside; False if the one that was promised could not be freed."""
        lab = self._lab
        if lab.device.reserve(request) is not None:
            return True
        if lab.world.ledger.lanes_free >= 0 and not self.num_phantoms:
            raise Broken(3, f"storage is set aside for request {request} and no lane is free")
        return False

    def _publish(self, command: Publish) -> None:
        lab, attempt = self._lab, command.attempt
        asked = lab.asked[attempt.counter]
        lab.device.publish(attempt, asked.num_tokens)
        if command.source is None or command.slot is None:
            raise Broken(1, f"{attempt} is published without a source")
        if command.token is None:
            slot = lab.sources[command.source].slots[command.slot]
            if slot.granted != attempt or slot.logits != logits_of(attempt):
                raise Broken(1, f"{attempt} is published with the logits of another, {slot}")
        elif command.token != token_of(attempt):
            raise Broken(5, f"{attempt} is published with token {command.token}")
        lab.at(lab.now_ns + asked.decode_ns, self.retire, attempt.counter)

    def retire(self, request: int) -> None:
        """Nobody decodes the entry any more."""
        lab = self._lab
        _, account = lab.world.ledger.current(RequestId(EPOCH, request))
        if account.outcome is not Outcome.PUBLISHED or account.retired:
            return
        faulty = bool(lab.fault(self._device, "device", faults.DECODE, 0.5))
        if faulty:
            lab.blame_device(request)
        self.bring(events.Retire(RequestId(EPOCH, request), good=not faulty))
