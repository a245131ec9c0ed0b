"""A prefill engine in the owner's own process, as one more source under the same rules.

It has a slab of one slot in this process, a `SourceAttempt` and a `SlotSink`, and no channel: what
the sink sends goes straight to the owner's machine, and at each of its calls the owner takes a part
of a turn (messages, deaths, deadlines, cancels, imports; no decode step). So a cancel reaches the
engine within one layer and other hand-offs keep moving, but entries that decode wait until the
prefill is over. The engine is run from a turn and from nowhere else.

The decoder is called from within the engine's calls of its sink: a pair that cannot have this must
not offer an engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.backends.base import ContinuesKept, Decoder, Kept, PrefillEngine, PrefillsItself
from headrace.errors import Cancelled, LocalProtocolError, PeerDied, Refused, Unquiet
from headrace.geometry import Manifest, agree
from headrace.memory import Slab
from headrace.messages import Cancel, Computing, FromSource, Prefill, ToSource
from headrace.plan import slot_layout
from headrace.protocol.books import PlanFor
from headrace.protocol.source import SourceAttempt
from headrace.runtime.attempt import run_attempt
from headrace.runtime.prefix import OWNER
from headrace.runtime.sink import SlotSink


class LocalSource:
    """The owner's own engine. Its one slot is made when the first request may need it."""

    num_slots = 1
    maker = OWNER

    def __init__(self, engine: PrefillEngine, decoder: Manifest, context: int) -> None:
        """Takes the engine, and closes it at the end.

        Raises:
            Refused: it does not fit the decoder, or cannot hold the context.
        """
        self.manifest = engine.manifest()
        self.layout = agree(self.manifest, decoder)
        if context > self.manifest.max_positions:
            raise Refused(
                f"context {context} is more than the {self.manifest.max_positions} positions of "
                "the decoder's own engine; lower --context",
                field="context",
            )
        self._engine = engine
        self._slot_nbytes = slot_layout(decoder, context).nbytes
        self._slab: Slab | None = None
        self._granted: Prefill | None = None
        self._kept: Kept | None = None
        self._withdrawn = False
        self._attempt: SourceAttempt | None = None
        self._untold: deque[FromSource] = deque()  # of an attempt that is over
        self._counts = dict.fromkeys(("attempts", "cancelled"), 0)

    def open(self) -> None:
        """Make the slot. Raises: Refused when memory is short."""
        self._slab = Slab.create(self._slot_nbytes, "headrace-local")
        self._slab.close_fd()

    @property
    def waits(self) -> bool:
        """Whether it has an attempt to run, or something left to tell of the last one."""
        return self._granted is not None or bool(self._untold)

    def slot(self, index: int) -> memoryview:
        """The bytes of its one slot."""
        return self._open_slab().view

    def slot_address(self, index: int) -> int:
        """The address of its first byte."""
        return self._open_slab().address

    @property
    def continues(self) -> bool:
        """Whether it can go on from what the decoder keeps."""
        return isinstance(self._engine, ContinuesKept) and self.manifest.prefix == "own_cache"

    def continue_from(self, kept: Kept) -> None:
        """The attempt that is granted next goes on from this."""
        self._kept = kept

    def send(self, message: ToSource) -> None:
        """Take a grant, to be run in the next turn, or a cancel."""
        if isinstance(message, Prefill):
            self._granted, self._withdrawn = message, False
        elif isinstance(message, Cancel):
            if self._attempt is not None and self._attempt.prefill.attempt == message.attempt:
                self._attempt.cancel()
                self._counts["cancelled"] += 1
            elif self._granted is not None and self._granted.attempt == message.attempt:
                self._withdrawn = True
                self._counts["cancelled"] += 1

    def run(
        self,
        plan_for: PlanFor,
        tell: Callable[[FromSource], None],
        take_in: Callable[[], None],
    ) -> None:
        """Run the attempt that was granted, if one was.

        `tell` brings the owner what a source tells; `take_in` is the part of a turn. What they
        raise ends the attempt, and is raised again when the engine has returned. What an interrupt
        kept from being told then is told by the next call.
        """
        self._tell_rest(tell)
        granted, self._granted = self._granted, None
        if granted is None:
            return
        self._counts["attempts"] += 1
        attempt = SourceAttempt(granted, plan_for(granted.num_tokens, granted.start))
        link = _Link(attempt, tell, take_in)
        self._attempt = attempt
        try:
            self._untold.extend(self._run(attempt, link))
        finally:
            self._attempt = None
        try:
            self._tell_rest(tell)
        except BaseException as exc:
            if link.broken is not None:
                raise link.broken from exc
            raise
        if link.broken is not None:
            raise link.broken

    def _tell_rest(self, tell: Callable[[FromSource], None]) -> None:
        while self._untold:
            tell(self._untold[0])  # once more after an interrupt: it may not have been heard
            self._untold.popleft()

    def _run(self, attempt: SourceAttempt, link: _Link) -> Sequence[FromSource]:
        """Run the engine; returns what is still to be told."""
        kept, self._kept = self._kept, None
        if self._withdrawn:
            attempt.start(time.monotonic_ns())
            attempt.cancel()
            return [attempt.returned()]
        if kept is not None and isinstance(self._engine, ContinuesKept):
            self._engine.continue_from(kept)
        slot = self._open_slab().view
        sink = SlotSink(attempt, slot, link.send, link.poll)
        try:
            return run_attempt(self._engine, attempt, sink, slot)
        except PeerDied as exc:  # the engine's own affair: the owner's errors come as `Cancelled`
            return [*attempt.fail(f"{type(exc).__name__}: {exc}"), attempt.returned()]
        except Unquiet as exc:  # no end of this process proves it: the slot stays out of service
            return attempt.fail(f"{type(exc).__name__}: {exc}")
        except BaseException as exc:  # an interrupt: the engine has returned all the same
            link.broken = link.broken or exc
            return [*attempt.fail(f"interrupted by {type(exc).__name__}"), attempt.returned()]

    def statistics(self) -> dict[str, int]:
        """Attempts run since the start, those cancelled, and the bytes of its slot."""
        return {**self._counts, "slab_nbytes": 0 if self._slab is None else self._slab.nbytes}

    def close(self) -> None:
        """Let go of slot and engine. Idempotent."""
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        self._engine.close()

    def _open_slab(self) -> Slab:
        if self._slab is None:
            raise LocalProtocolError("the decoder's own engine has no slot yet")
        return self._slab


class _Link:
    """What stands for the channel: straight to the owner, and the first error is kept.

    An error of the owner's must pass through the engine, which may swallow it: so it is told there
    as `Cancelled`, at this call and at all that follow, and raised by `LocalSource.run` in the end.
    """

    def __init__(
        self,
        attempt: SourceAttempt,
        tell: Callable[[FromSource], None],
        take_in: Callable[[], None],
    ) -> None:
        self._attempt = attempt
        self._tell = tell
        self._take_in = take_in
        self.broken: BaseException | None = None

    def send(self, message: FromSource) -> None:
        self._guarded(lambda: self._tell(message))

    def poll(self) -> None:
        """The engine is at work, which is told before deadlines are looked at."""
        self._guarded(self._poll)

    def _poll(self) -> None:
        words: list[Computing] = []
        with suppress(Cancelled, LocalProtocolError):  # over, or broken: its next call says so
            words = self._attempt.computing(time.monotonic_ns())
        for word in words:
            self._tell(word)
        self._take_in()

    def _guarded(self, act: Callable[[], None]) -> None:
        if self.broken is None:
            try:
                act()
            except BaseException as exc:
                self.broken = exc
        if self.broken is not None:
            raise Cancelled("the owner cannot go on") from self.broken


def why_not_local(decoder: Decoder) -> str:
    """Why an owner of this decoder that has no engine does not compute a prompt by itself."""
    if isinstance(decoder, PrefillsItself):
        return (
            "on_failure is local and this owner was started without that; a server has it if its "
            'config says on_failure = "local" under [requests]; else use fail or retry'
        )
    return (
        "on_failure is local and this decoder has no prefill engine of its own; use fail or retry"
    )
