"""A decoder as it is served: its owner process, started again when it dies, and what runs on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from headrace.errors import HeadraceError, PeerDied, Refused, RemoteProtocolError, WouldBlock
from headrace.messages import Ended, Events, FromOwner, Inspect, Inspected, Token, Up, Withdraw
from headrace.runtime.owner_link import OwnerLink
from headrace.runtime.requests import RequestOptions
from headrace.runtime.supervisor import Restart, SetAside, Supervisor
from headrace.server import events
from headrace.server.choices import Choice
from headrace.server.closing import closed
from headrace.server.decoder_settings import DecoderSettings
from headrace.server.outbox import Outbox
from headrace.server.standing import Standing
from headrace.server.terminals import Ending, Terminal, ending_of

_log = logging.getLogger("headrace.server")

RECEIVED_AT_ONCE = 256  # messages of one owner, before others have their turn
CLOSE_GRACE_S = 5.0
CLOSE_WITHIN_S = 10.0  # of all owners, and of checks that are still made for one
EXIT_WITHIN_S = 0.02  # from the end of an owner's channel to its exit status
_UNLUCKY = (HeadraceError, OSError, MemoryError, RuntimeError)  # no descriptor, memory or thread
OVERDUE_S = 1.0  # after a deadline, until an owner that does not tell of it is no longer waited for


class ServedDecoder:
    """One decoder and its owner, in the server's event loop.

    `changed` is called whenever it may take more than before, or less; `over` when a choice that it
    took had its end.
    """

    def __init__(
        self,
        settings: DecoderSettings,
        told: events.Events,
        changed: Callable[[], None],
        over: Callable[[Choice], None],
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.state: events.DecoderState = "stopped"
        self.reason = ""
        self.mistake = False  # whether what ended it last was a user's mistake
        self.up: Up | None = None
        self.report: Inspected | None = None
        self.incarnation = -1
        self._told = told
        self._changed = changed
        self._over = over
        self._supervisor = Supervisor(
            f"decoder {settings.name}", settings.restart, time.monotonic_ns()
        )
        self._link: OwnerLink | None = None
        self._running: dict[int, Choice] = {}
        self._next_label = 0
        self._outbox: Outbox | None = None
        self._asked_ns: int | None = None  # since when an answer to Inspect is waited for
        self._timers: list[asyncio.TimerHandle] = []
        self._closings: set[asyncio.Task[None]] = set()
        self._stopping = False

    # What it can take.

    @property
    def _standing(self) -> Standing:
        return Standing(self.up, self.report, self.settings.owner.local)

    @property
    def lanes(self) -> int:
        """Lanes in service."""
        return self._standing.lanes

    @property
    def sources(self) -> int:
        """Sources in service."""
        return self._standing.sources

    @property
    def ready(self) -> bool:
        """Whether a source and the owner can take work, or the owner by itself."""
        standing = self._standing
        able = standing.sources > 0 or standing.alone
        return self.state == "ready" and standing.lanes > 0 and able

    @property
    def hopeless(self) -> bool:
        """Whether it serves nothing any more, whatever is waited for."""
        return self.state in ("set aside", "stopped")

    @property
    def load(self) -> float:
        """Choices that it holds, in lanes."""
        return len(self._running) / max(1, self.lanes)

    def has_room(self, num_tokens: int, long_from: int) -> bool:
        """Whether it takes one more prompt of `num_tokens` positions.

        Not more than its sources have slots for at once: who is next is decided in the queue.
        Prompts of at least `long_from` positions (0: none is long) leave one of several lanes free.
        """
        if not self.ready:
            return False
        running = self._running.values()
        slots = self._standing.slots
        ahead = min(self.settings.owner.prefetch_depth, max(0, slots - 1))
        if len(self._running) >= self.lanes + ahead:
            return False
        if sum(not each.begun for each in running) >= slots:
            return False
        if 0 < long_from <= num_tokens and self.lanes > 1:
            return sum(each.job.num_prompt_tokens >= long_from for each in running) < self.lanes - 1
        return True

    def submit(self, choice: Choice) -> None:
        """Take a choice: from now on it is the owner's."""
        label = self._next_label
        self._next_label += 1
        self._running[label] = choice
        choice.withdraw = lambda: self._withdraw(label)
        self._watch_deadline(label, choice)
        now_ns = time.monotonic_ns()
        self._told.tell(events.Dispatched(now_ns, choice.request, choice.index, self.name, label))
        options = replace(choice.options, prefill_chunk=self.settings.prefill_chunk)
        if self._outbox is not None:
            self._outbox.send(lambda link: self._submit(link, label, choice, options))

    def _submit(self, link: OwnerLink, label: int, choice: Choice, options: RequestOptions) -> None:
        try:
            link.submit(label, choice.prompt, options)
        except (WouldBlock, PeerDied):
            raise
        except Exception as exc:  # the others behind it go on
            del self._running[label]
            ending = ending_of(exc)
            if ending.terminal is Terminal.BUG:
                _log.error("choice %d of %s cannot be told", label, self.name, exc_info=exc)
            self._fail(choice, ending)
            self._tell_end(choice, _untold(label, ending.terminal, ending.text))
            self._changed()

    def _watch_deadline(self, label: int, choice: Choice) -> None:
        """The owner keeps deadlines; one that does not, since it is stuck, holds up no answer."""
        deadline_ns = choice.job.deadline_ns
        if deadline_ns is None:
            return
        delay_s = (deadline_ns - time.monotonic_ns()) / 1e9 + OVERDUE_S

        def overdue() -> None:
            if not choice.begun and not choice.over:
                text = f"its deadline passed {OVERDUE_S:.0f} s ago, and its owner says nothing"
                choice.fail(Ending(Terminal.DEADLINE, text))
                self._withdraw(label)  # it stays the owner's until that tells its end

        choice.deadline = asyncio.get_running_loop().call_later(max(0.0, delay_s), overdue)

    def _withdraw(self, label: int) -> None:
        if label in self._running and self._outbox is not None:
            self._outbox.send(lambda link: link.send(Withdraw(label)))

    # Its owner's life.

    async def start(self) -> None:
        """Start the owner; `state` tells when it is ready, and why not."""
        self.incarnation += 1
        self._enter("starting", "")
        link = OwnerLink(self.settings.owner, interpreter=self.settings.interpreter)
        try:
            await asyncio.to_thread(link.check)
            if self._stopping:
                return
            link.spawn()
        except _UNLUCKY as exc:
            self._lost(str(exc) or type(exc).__name__, mistake=_is_mistake(exc))
            return
        self._link, self._outbox = link, Outbox(link)
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable)
        self._later(self.settings.start_s, self._too_late)

    def _too_late(self) -> None:
        if self.state == "starting":
            self._lost(f"its owner was not ready within {self.settings.start_s:.0f} s")

    async def stop(self, grace_s: float) -> None:
        """End the owner, in good order if it does so within `grace_s`; all that runs fails."""
        self._stopping = True
        self._fail_all(Terminal.SHUTTING_DOWN, "the server is shutting down")
        link = self._forget_link()
        if link is not None:
            loads = self.state == "starting"  # it would not hear it, and has nothing to end
            self._close_apart(link, grace_s if not loads and link.ask_to_end() else 0.0)
        if self._closings:
            await asyncio.wait(self._closings, timeout=CLOSE_WITHIN_S)
        if self.state != "stopped":
            self._enter("stopped", "the server is shutting down")

    def _readable(self) -> None:
        for _ in range(RECEIVED_AT_ONCE):
            link = self._link
            if link is None:
                return
            try:
                message = link.receive()
            except WouldBlock:
                return
            except RemoteProtocolError as exc:
                _log.error("the owner of %s sent what is no message: %s", self.name, exc)
                continue
            except PeerDied:
                self._lost(f"its owner process {link.exit_text(EXIT_WITHIN_S)}")
                return
            except HeadraceError as exc:
                self._lost(str(exc), mistake=_is_mistake(exc))
                return
            self._hear(message)

    def _hear(self, message: FromOwner) -> None:
        match message:
            case Up():
                self.up = message
                self._supervisor.entered(time.monotonic_ns())
                self._enter("ready", "")
                self._look()
            case Token():
                self._token(message)
            case Events():
                choice = self._running.get(message.label)
                if choice is not None:
                    source = message.lane == "source"
                    kept = choice.source_intervals if source else choice.owner_intervals
                    kept.extend(message.intervals)
            case Ended():
                self._end(message)
            case Inspected():
                self._asked_ns = None
                self.report = message
                now_ns = time.monotonic_ns()
                self._told.tell(events.Looked(now_ns, self.name, self.incarnation, message))
                if not self._running:
                    self._check_standing(message)
                self._changed()

    def _check_standing(self, report: Inspected) -> None:
        """An owner that can serve nothing any more is ended, which proves all of its quiet."""
        if self._standing.forsaken:
            self._lost(f"no source is left: {report.sources[0].reason}", well=False)
        elif self.lanes == 0:
            self._lost("all of its lanes are quarantined", well=False)

    def _token(self, token: Token) -> None:
        choice = self._running.get(token.label)
        if choice is None:
            return
        choice.came(token)
        now_ns = time.monotonic_ns()
        index = choice.num_tokens - 1
        self._told.tell(events.Decoded(now_ns, choice.request, choice.index, index))
        if index == 0:
            self._changed()  # a slot is free

    def _end(self, ended: Ended) -> None:
        choice = self._running.pop(ended.label, None)
        if choice is None:
            return
        if ended.outcome == "finished":
            self._supervisor.served()
        choice.end(ended)
        self._tell_end(choice, ended)
        self._over(choice)
        if choice.failure is not None:
            self._look()  # a source may be gone
        self._changed()

    def _tell_end(self, choice: Choice, ended: Ended) -> None:
        self._told.tell(
            events.ChoiceEnded(
                time.monotonic_ns(),
                choice.request,
                choice.index,
                self.name,
                choice.num_tokens,
                ended,
                tuple(choice.source_intervals),
                tuple(choice.owner_intervals),
                choice.job.num_prompt_tokens,
            )
        )

    def _lost(self, reason: str, *, mistake: bool = False, well: bool = True) -> None:
        """The owner is dead or has to be: all that ran on it fails, and it is started again.

        well: whether having been up for long forgives earlier deaths.
        """
        first = self.incarnation == 0 and self.state == "starting"
        link = self._forget_link()
        if link is not None:
            self._close_apart(link, 0.0)
        self.mistake = mistake and first  # later it is what was lacking just then
        self._fail_all(Terminal.OWNER_DIED, f"decoder {self.name}: {reason}")
        decision = self._supervisor.died(reason, time.monotonic_ns(), well=well)
        if self._stopping:
            self._enter("stopped", reason)
        elif isinstance(decision, Restart) and not self.mistake:
            self._enter("waiting", reason)
            delay_s = max(0.0, decision.at_ns / 1e9 - time.monotonic())
            self._later(delay_s, self._start_again)
        else:
            aside = decision.reason if isinstance(decision, SetAside) else reason
            self._enter("set aside", aside)

    def _start_again(self) -> None:
        if not self._stopping:
            task = asyncio.ensure_future(self.start())
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    def _close_apart(self, link: OwnerLink, grace_s: float) -> None:
        task = asyncio.ensure_future(closed(self.name, link, grace_s))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    def _forget_link(self) -> OwnerLink | None:
        link, self._link = self._link, None
        self.up = self.report = self._asked_ns = None
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if link is not None:
            loop = asyncio.get_running_loop()
            with suppress(PeerDied):
                loop.remove_reader(link.fileno())
                loop.remove_writer(link.fileno())
        return link

    def _fail_all(self, terminal: Terminal, text: str) -> None:
        running, self._running = self._running, {}
        for choice in running.values():
            self._fail(choice, Ending(terminal, text, retry_after_s=1.0))

    def _fail(self, choice: Choice, failure: Ending) -> None:
        choice.fail(failure)
        self._over(choice)

    def _enter(self, state: events.DecoderState, reason: str) -> None:
        self.state, self.reason = state, reason
        pid = 0 if self._link is None or self._link.pid is None else self._link.pid
        now_ns = time.monotonic_ns()
        self._told.tell(
            events.DecoderChanged(now_ns, self.name, state, reason, self.incarnation, pid)
        )
        self._changed()

    # What it is asked.

    def _look(self) -> None:
        """Ask the owner what it holds, now and again; one that does not answer is stuck."""
        if self._outbox is None:
            return
        now_ns = time.monotonic_ns()
        if self._asked_ns is None:
            self._asked_ns = now_ns
            self._outbox.send(lambda link: link.send(Inspect()))
        elif now_ns - self._asked_ns > self.settings.silence_s * 1e9:
            self._lost(f"its owner did not answer for {self.settings.silence_s:.0f} s")
            return
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._later(self.settings.look_every_s, self._look)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, act))


def _untold(label: int, terminal: Terminal, text: str) -> Ended:
    """The end of a choice that its owner never heard of."""
    mistake = "" if terminal is Terminal.BUG else terminal.value
    return Ended(label, "failed", text, mistake, None, "", (), "", (), None)


def _is_mistake(exc: Exception) -> bool:
    """Whether to start it again would change nothing."""
    return isinstance(exc, Refused) and not exc.shortage
