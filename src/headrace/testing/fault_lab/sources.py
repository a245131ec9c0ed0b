"""A source process of a schedule: its slab, the engine that runs, and its life and death.

What it tells goes through a real `SourceAttempt`. Like the real process it runs one engine at a
time, takes in a cancel at the engine's next call of the sink, and says last that the engine
returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace.errors import Cancelled, LocalProtocolError, RemoteProtocolError
from headrace.ids import SourceId, Span
from headrace.messages import Cancel, Prefill, Shutdown, ToSource, decode_to_source
from headrace.testing.fault_lab import faults
from headrace.testing.fault_lab.engines import Step, mistaken, script
from headrace.testing.fault_lab.geometries import Places
from headrace.testing.fault_lab.safety import Broken
from headrace.testing.fault_lab.setting import MS, S
from headrace.testing.fault_lab.storage import (
    WRONG,
    SlotMemory,
    digest_of,
    logits_of,
    token_of,
)
from headrace.testing.fault_lab.transport import Link
from headrace.testing.fault_lab.watched import WatchedAttempt

if TYPE_CHECKING:
    from headrace.testing.fault_lab.schedule import Lab

_PACES: Final = (1 * MS, 0, 30 * MS, 800 * MS, 2500 * MS, 3 * S)
_OVER: Final = {"raise": "the engine failed", "leave": "the engine returned without its final"}
_STOPS: Final = (2 * S, 12 * S, 45 * S, 0)  # 0: never continued
LONGEST_STEP_NS: Final = 2 * _PACES[-1]
SLOW_NS: Final = 6 * S
SILENT_NS: Final = 40 * S


class Engine:
    """One prefill that runs."""

    __slots__ = ("attempt", "pace_ns", "slot", "steps", "stubborn")

    def __init__(
        self, attempt: WatchedAttempt, slot: SlotMemory, steps: list[Step], pace_ns: int
    ) -> None:
        self.attempt = attempt
        self.slot = slot
        self.steps = steps
        self.pace_ns = pace_ns
        self.stubborn = False  # goes on where the sink says that the attempt is withdrawn


class LabSource:
    """One source process."""

    def __init__(self, lab: Lab, source: SourceId, num_slots: int, *, local: bool = False) -> None:
        self.id = source
        self.local = local
        self.slots = [SlotMemory(source, at) for at in range(num_slots)]
        self.num_tokens = 1  # of the prompt that it computes, or computed last
        self.dead = False

        self.stopped = False
        self.link: Link = Link(lab, self)
        self._lab = lab
        self._stream = lab.choices.stream(f"p{source}")
        self._inbox: list[bytes] = []
        self._engine: Engine | None = None
        self._postponed: list[Callable[[], None]] = []
        self._last: WatchedAttempt | None = None
        if not local:
            self._foresee()

    def receive(self, payload: bytes) -> None:
        """A message reaches the process; an engine that runs looks at it with its next call."""
        if self.dead:
            return
        self._inbox.append(payload)
        if self._engine is None:
            self._when_running(self._serve)

    def stop(self, for_ns: int) -> None:
        """SIGSTOP; after `for_ns` SIGCONT, unless that is 0."""
        if self.dead or self.stopped:
            return
        self.stopped = True
        self._lab.say("source %s is stopped", self.id)
        if for_ns:
            self._lab.at(self._lab.now_ns + for_ns, self._go_on)

    def kill(self) -> None:
        """SIGKILL: nothing of it writes any more, and what it said still arrives."""
        if self.dead:
            return
        lab = self._lab
        self.dead = True
        self._engine = None
        for slot in self.slots:
            slot.writing = False
        lab.say("source %s is killed", self.id)
        told_ns = max(lab.now_ns, self.link.quiet_ns) + self._stream.pick((0, 1 * MS, 300 * MS))
        lab.at(told_ns, lab.shell.bury, self)
        if lab.fault(self._stream, "transport", faults.OF_THE_DEAD):
            self.link.after_death(told_ns)

    def _go_on(self) -> None:
        if self.dead or not self.stopped:
            return
        self.stopped = False
        self._lab.say("source %s is continued", self.id)
        postponed, self._postponed = self._postponed, []
        for act in postponed:
            act()

    def _foresee(self) -> None:
        """A stop or a kill that comes whatever the source does."""
        lab = self._lab
        fault = lab.fault(self._stream, "process", faults.PROCESS)
        if fault:
            at_ns = lab.now_ns + self._stream.pick((10 * MS, 1 * S, 20 * S))
            lab.at(at_ns, self._suffer, fault)

    def _suffer(self, fault: str) -> None:
        if self.dead:
            return
        self._lab.blame_source(self.id)
        if fault == "source-killed":
            self.kill()
        else:
            self.stop(self._stream.pick(_STOPS))

    def _when_running(self, act: Callable[[], None]) -> None:
        if self.stopped:
            self._postponed.append(act)
        elif not self.dead:
            act()

    # Between two prefills.

    def _serve(self) -> None:
        while self._inbox and self._engine is None and not self.dead:
            try:
                message = decode_to_source(self._inbox.pop(0))
            except RemoteProtocolError:
                self._lab.say("source %s cannot read its owner and exits", self.id)
                self._lab.blame_source(self.id)
                self.kill()
                return
            if isinstance(message, Prefill):
                self._begin(message)
            elif isinstance(message, Cancel) and self._last is not None:
                self._last.cancel_late(message.attempt)

    def _begin(self, prefill: Prefill) -> None:
        lab = self._lab
        slot = self.slots[prefill.slot]
        if (slot.granted, slot.generation) != (prefill.attempt, prefill.generation):
            raise Broken(2, f"{prefill.attempt} begins in {slot}, which is {slot.granted}'s")
        geometry = lab.geometry
        plan = geometry.plan(prefill.num_tokens)
        self.num_tokens = prefill.num_tokens
        attempt = self._last = WatchedAttempt(prefill, plan, geometry, lab.world.base_terms)
        attempt.start(lab.now_ns)
        pace_ns = self._stream.pick(_PACES)
        steps = script(prefill, plan, slow=pace_ns >= 1 * S)
        self._engine = Engine(attempt, slot, steps, pace_ns)
        self._next_step()

    # One step of the engine.

    def _next_step(self, extra_ns: int = 0) -> None:
        engine = self._engine
        if engine is not None:
            delay_ns = engine.pace_ns * self._stream.below(3) if engine.pace_ns else 0
            self._lab.at(self._lab.now_ns + delay_ns + extra_ns, self._when_running, self._step_now)

    def _step_now(self) -> None:
        engine = self._engine
        if engine is None or self.dead:
            return
        if not self.local:
            fault = self._lab.fault(self._stream, "process", faults.PROCESS, 0.1)
            if fault:
                self._suffer(fault)
                self._when_running(self._step_now)
                return
        extra_ns = self._go_wrong(engine)
        step = engine.steps.pop(0) if engine.steps else Step("leave")
        if step.what == "hang":
            self._lab.say("the engine of source %s hangs", self.id)
            return
        over, failure = self._make(engine, step)
        if over:
            self._end(failure)
        else:
            self._next_step(extra_ns)

    def _make(self, engine: Engine, step: Step) -> tuple[bool, str | None]:
        """Make one step; returns whether the engine is over, and why if it was not cancelled."""
        try:
            self._poll(engine)
            self._take(engine, step)
        except Cancelled:
            return not engine.stubborn, None
        except LocalProtocolError as exc:
            return not engine.stubborn, f"{type(exc).__name__}: {exc}"
        except RemoteProtocolError as exc:  # it cannot read what its owner sent
            return True, str(exc)
        return step.what in _OVER, _OVER.get(step.what)

    def _go_wrong(self, engine: Engine) -> int:
        """Perhaps a fault comes over the engine; returns by how much its next step is late."""
        lab, prefill = self._lab, engine.attempt.prefill
        asked = lab.asked[prefill.attempt.counter]
        shown = faults.BYTES if asked.digest else faults.EARLY if asked.poison else ()
        kinds = faults.LOCAL_ENGINE if self.local else faults.ENGINE + shown * 3
        fault = lab.fault(self._stream, "engine", kinds)
        if not fault:
            return 0
        lab.blame_request(prefill.attempt.counter)
        match fault:
            case "engine-slow":
                return SLOW_NS
            case "engine-silent":
                return SILENT_NS
            case "engine-ignores-cancel":
                engine.stubborn = True
            case _:
                told = tuple(engine.attempt.committed)
                engine.stubborn = engine.stubborn or bool(self._stream.below(2))
                engine.steps = mistaken(fault, engine.steps, told, prefill)
        return 0

    def _poll(self, engine: Engine) -> None:
        """What came meanwhile: a cancel of this attempt counts, anything else is lost."""
        while self._inbox:
            message: ToSource = decode_to_source(self._inbox.pop(0))
            mine = isinstance(message, Cancel) and message.attempt == engine.attempt.prefill.attempt
            if mine or isinstance(message, Shutdown):
                engine.attempt.cancel()

    def _take(self, engine: Engine, step: Step) -> None:
        lab, attempt, spans = self._lab, engine.attempt, step.spans
        match step.what:
            case "check":
                for word in attempt.working(lab.now_ns):
                    self.link.up(word)
            case "emit" | "write" | "commit":
                if step.what == "emit":
                    attempt.writable(spans)
                if step.what != "commit":
                    self._write(engine, spans)
                if step.what != "write":
                    self._commit(engine, spans)
            case "misstamp":
                self._commit(engine, spans, misstamped=True)
            case "final":
                identity = attempt.prefill.attempt
                token = token_of(identity) if lab.geometry.first == "token" else None
                told = attempt.final(token, lab.now_ns)
                engine.slot.logits = logits_of(identity)
                for message in told:
                    self.link.up(message)
            case "spoil":
                self._write(engine, spans, wrong=True)
            case "stray":
                self._stray(engine)

    def _places(self, engine: Engine, span: Span) -> Places:
        return self._lab.geometry.written(engine.attempt.prefill.num_tokens, span)

    def _write(self, engine: Engine, spans: tuple[Span, ...], *, wrong: bool = False) -> None:
        for span in spans:
            places = self._places(engine, span)
            engine.slot.write(engine.attempt.prefill.attempt, places, wrong=wrong)

    def _commit(self, engine: Engine, spans: tuple[Span, ...], *, misstamped: bool = False) -> None:
        machine, digests = engine.attempt.machine, list[int]()
        legal = self._lab.geometry.legal(machine.prefill.num_tokens, spans)
        if machine.stamps_layers and legal:  # as the real sink cuts them
            spans = tuple(layer for span in spans for layer in machine.plan.by_layer(span))
        if machine.prefill.digest:
            digests = [
                digest_of(engine.slot.values(self._places(engine, span))) if legal else 0
                for span in spans
            ]
        if misstamped:
            digests = digests[1:] if digests else [0] * len(spans)
        for message in engine.attempt.commit(spans, digests, self._lab.now_ns):
            self.link.up(message)

    def _stray(self, engine: Engine) -> None:
        """Spoil a cell of another slot whose engine has returned and whose request has digests."""
        for slot in self.slots:
            granted = slot.granted
            if slot is engine.slot or slot.writing or granted is None or not slot.cells:
                continue
            if self._lab.asked[granted.counter].digest:
                offset = min(slot.cells)
                slot.cells[offset] |= WRONG
                self._lab.blame_request(granted.counter)
                return

    def _end(self, failure: str | None) -> None:
        """The engine is over: `failure` unless it was cancelled; then the write token goes back."""
        engine = self._engine
        if engine is None:
            return
        self._engine = None
        engine.slot.writing = False
        for failed in engine.attempt.fail(failure) if failure is not None else []:
            self.link.up(failed)
        self.link.up(engine.attempt.returned())
        self._serve()
