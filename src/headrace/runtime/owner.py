"""`DecoderOwner`: the sole owner of one decoder, in turns.

One thread owns the decoder's device. A turn takes messages, cancels and deaths, publishes what is
complete, imports up to a byte budget, and decodes one step of one entry.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

from headrace.backends.base import Decoder
from headrace.errors import (
    Closed,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.geometry import Manifest
from headrace.ids import AttemptId, SourceId, Span
from headrace.messages import (
    Computing,
    Failed,
    Progress,
    Released,
    SourceFinal,
    travelling_text,
)
from headrace.plan import Plan, compile_plan
from headrace.protocol.books import AttemptMessage, Limits
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import Owner
from headrace.protocol.source import MOST_SPANS, expected_spans
from headrace.runtime.active import Active
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.shell import Shell, grant
from headrace.runtime.worker import MESSAGES_PER_ATTEMPT, SourceHandle

IDLE_BUDGET_NBYTES = 64 << 20  # imported in one turn when nobody decodes
SHARED_BUDGET_NBYTES = 8 << 20  # imported in one turn between two decode steps

MAX_FLIGHTS = 64  # imports begun and not fenced, on a device that copies by itself

HANG_UP_GRACE_S = 0.2  # from the end of a source's channel to its death, in a process that ends


_log = logging.getLogger("headrace.owner")

_epochs = itertools.count(time.time_ns())


class DecoderOwner(Shell):
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
        chunk_nbytes: int = 8 << 20,
        progress_timeout_s: float = 600.0,
        drain_timeout_s: float = 120.0,
        budget_nbytes: int | None = None,
    ) -> None:
        """`context`: the longest prompt plus its tokens, in positions, that a lane holds.

        `progress_timeout_s`: how long a running source may be silent. `drain_timeout_s`: how long
        one may keep a slot that is no longer wanted before it is ended, and how long an import may
        take to be fenced. `budget_nbytes`: imported in one turn at most; by default 64 MiB, and 8
        MiB between two decode steps. A caller that decodes by itself sets what its steps can spare.

        Raises:
            Refused: the decoder has no ordered, fenceable copy.
        """
        if not decoder.caps.ordered_copy:
            raise Refused("this decoder has no ordered copy with a fence; it cannot own a cache")
        self.context = context
        self._manifest = decoder.manifest()
        limits = Limits(
            decoder.caps.max_lanes,
            context,
            prefetch_depth,
            chunk_nbytes,
            int(progress_timeout_s * 1e9),
            int(drain_timeout_s * 1e9),
        )
        super().__init__(Owner(next(_epochs), limits), decoder)
        self._selector = selectors.DefaultSelector()
        self._closed = False
        self._dead: set[SourceId] = set()
        self._next_source = 0
        self._budget_nbytes = budget_nbytes

    # What a caller does.

    def attach(self, handle: SourceHandle) -> None:
        """Take a started source: handshake, slab, and from then on its messages and its death.

        Raises:
            Refused: it does not fit this decoder. PeerDied: it died.
        """
        handle.attach(self._manifest, self.context, self._machine.epoch)
        source = SourceId(self._next_source)
        self._next_source += 1
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
        self._check_open()
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
        self._check_open()
        if request.done:
            return
        decided = not self._machine.cancel(request.request, time.monotonic_ns())
        if decided and self._machine.state_of(request.request) is HandoffState.PUBLISHED:
            active = self._active[AttemptId(*request.request, 1)]
            self._finish(active, "cancelled", "cancelled by the caller")
        self._run_commands()

    def release(self, request: Request) -> None:
        """Give back the entry of a finished request that asked to hold it."""
        self._check_open()
        if request.entry is None:
            raise LocalProtocolError(f"request {request.request} holds no entry")
        request.entry = None
        self._machine.retire(request.request, time.monotonic_ns())
        self._run_commands()

    def turn(self, timeout_s: float = 0.0) -> None:
        """One owner turn; waits at most `timeout_s` if there is nothing to do."""
        self._check_open()
        for key, _ in self._selector.select(self._wait_s(timeout_s)):
            key.data()
        now_ns = time.monotonic_ns()
        due_ns = self._machine.next_deadline_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._machine.tick(now_ns)
        self._run_commands()
        self._poll_fences()
        budget = SHARED_BUDGET_NBYTES if self._decoding else IDLE_BUDGET_NBYTES
        budget = self._budget_nbytes or budget
        if len(self._flights) < MAX_FLIGHTS and self._machine.begin_imports(
            budget, time.monotonic_ns()
        ):
            self._run_commands()
        if self._decoding:
            self._decode()
        self._let_go()

    def fileno(self) -> int:
        """A descriptor that is readable when a turn has something to take in.

        For a caller with an event loop of its own: turn when it is readable, and at least as often
        as `next_turn_s` says.
        """
        return self._selector.fileno()

    def next_turn_s(self) -> float | None:
        """Seconds after which a turn is due although nothing comes in; None = no such time."""
        if self._decoding or self._flights or self._machine.has_pieces:
            return 0.0
        due_ns = self._machine.next_deadline_ns()
        return None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)

    def plan_of(self, request: Request) -> Plan:
        """The plan of a running or held request, once it was leased a slot."""
        attempt = AttemptId(*request.request, 1)
        if attempt not in self._active:
            raise Closed(f"request {request.request} is over")
        return self._active[attempt].the_plan

    def read(self, request: Request, layer: int, part: int) -> bytes:
        """The bytes of one part of a held entry: its live window, in the plan's layout.

        That is [heads, n - lo, head_dim] for `head_major` and [n - lo, heads, head_dim] for
        `token_major`, where `plan_of(request).windows[layer]` is (lo, n); empty for a layer without
        cells.
        """
        if request.entry is None:
            raise LocalProtocolError(f"request {request.request} holds no entry")
        plan = self.plan_of(request)
        if not (0 <= layer < len(plan.layers) and 0 <= part < len(plan.layers[layer].parts)):
            raise LocalProtocolError(f"there is no part {part} of a layer {layer}")
        copies = plan.copies(Span(layer, layer + 1, 0, plan.num_tokens))
        wanted = [copy for copy in copies if copy.part == part]
        return b"".join(self._decoder.read(request.entry, plan.layout, copy) for copy in wanted)

    def run_until_done(self, *requests: Request) -> None:
        """Turn until all of `requests` are done."""
        while not all(request.done for request in requests):
            self.turn(1.0)

    @property
    def idle(self) -> bool:
        """Whether nothing is held: no request, no import, no slot but those in quarantine."""
        slots = self._machine.statistics()["slots"]
        at_rest = slots.get("free", 0) + slots.get("quarantined", 0)
        return not self._active and at_rest == sum(slots.values())

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
        """End all requests, then the sources, then the decoder. Idempotent."""
        if self._closed:
            return
        try:
            for active in list(self._active.values()):
                self.cancel(active.request)
        finally:
            self._closed = True
            for handle in self._handles.values():
                handle.close()
            self._selector.close()
            self._decoder.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this owner was closed")

    # What comes in.

    def _receive(self, source: SourceId) -> None:
        """Take in what a source told: in one turn no more than one attempt may have queued."""
        for _ in range(MESSAGES_PER_ATTEMPT):
            if not self._receive_one(source):
                return

    def _receive_one(self, source: SourceId) -> bool:
        handle = self._handles[source]
        try:
            message = handle.receive()
        except WouldBlock:
            return False
        except PeerDied:
            self._hung_up(handle)
            return False
        except RemoteProtocolError as exc:
            self._machine.dropped["undecodable"] += 1
            self._fail_running(source, str(exc))
            return True
        if isinstance(message, SourceFinal):
            message = self._checked_final(handle.manifest, message)
        if isinstance(message, Computing | Progress | SourceFinal | Failed | Released):
            self._tell(source, message)
        else:
            self._machine.dropped["unexpected"] += 1
        return True

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
            self._tell(source, Failed(*identity, travelling_text(reason)))

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
        while self._receive_one(source):
            pass  # what it said before it died still counts; no more can come
        if handle.channel_fd in self._selector.get_map():
            self.unwatch(handle.channel_fd)  # a process that it forked may hold the other end
        _log.info("%s", handle.exit_text())
        self._machine.source_died(source, handle.exit_text(), time.monotonic_ns())
        self._dead.add(source)
        self._run_commands()

    def _let_go(self) -> None:
        """Close what dead sources held, once nothing reads their slots."""
        for source in sorted(self._dead):
            if self._machine.forget_source(source):
                self._dead.remove(source)
                self._handles.pop(source).close(0.0)
                del self._plans[source]
                self._granted.pop(source, None)

    def _check(self, tokens: Sequence[int], options: RequestOptions) -> None:
        for handle in self._handles.values():
            options.check(handle.manifest, self._manifest)
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
            _check_sampling(options)
        reach = len(tokens) + (0 if options.hold else max(options.max_tokens - 1, 0))
        if reach > self.context:
            raise Refused(
                f"{len(tokens)} prompt tokens and {options.max_tokens} to decode need a context of "
                f"{reach}, and it is {self.context}; raise --context or ask for less",
                field="context",
            )
        for plan_for in self._plans.values():
            plan = plan_for(len(tokens))
            asked = grant(AttemptId(0, 0, 0), 0, 0, len(tokens), options)
            num_spans = expected_spans(asked, plan)
            if num_spans > MOST_SPANS:
                raise Refused(
                    f"this is cut into {num_spans} spans and at most {MOST_SPANS} can be told; use "
                    "larger chunks or layer groups",
                    field="chunk",
                )

    def _wait_s(self, timeout_s: float) -> float:
        due_s = self.next_turn_s()
        return timeout_s if due_s is None else min(timeout_s, due_s)


def _check_sampling(options: RequestOptions) -> None:
    try:
        from headrace.engine.sampling import check_sampling
    except ImportError as exc:
        raise Refused(
            f"choosing tokens needs numpy ({exc}); install headrace[cpu], or ask for max_tokens=0",
            field="max_tokens",
        ) from exc
    check_sampling(options.sampling)


def _prompt(tokens: Sequence[int]) -> array[int]:
    try:
        return array("I", tokens)
    except (TypeError, OverflowError) as exc:
        raise Refused(f"the prompt is no sequence of token ids: {exc}", field="prompt") from exc
