"""`DecoderOwner`: the sole owner of one decoder, in turns.

One thread owns the decoder's device. A turn takes messages, cancels and deaths, publishes what is
complete, imports up to a byte budget, decodes one step of as many entries as the decoder computes
together, and runs one prefill of its own if one waits.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from headrace.backends.base import Decoder, PinsSlabs, PrefillEngine
from headrace.errors import Closed, LocalProtocolError, Refused
from headrace.ids import AttemptId, Span
from headrace.plan import Plan
from headrace.protocol.books import Limits
from headrace.protocol.commands import Cause
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import Owner
from headrace.runtime.active import Active
from headrace.runtime.checks import check_bounds, check_request, check_start, prompt_of
from headrace.runtime.importing import SHARED_CHUNK_NBYTES, Importing
from headrace.runtime.local import LocalSource
from headrace.runtime.operated import OperatedShell
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.share import IMPORT_SHARE
from headrace.runtime.sources import Sources
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.watch import Watch
from headrace.runtime.worker import SourceHandle

_log = logging.getLogger("headrace.owner")

_epochs = itertools.count(time.time_ns())


class DecoderOwner(OperatedShell):
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
        chunk_nbytes: int | None = None,
        progress_timeout_s: float = 600.0,
        drain_timeout_s: float = 120.0,
        budget_nbytes: int | None = None,
        import_share: float = IMPORT_SHARE,
        local: PrefillEngine | None = None,
    ) -> None:
        """`context`: the longest prompt plus its tokens, in positions, that a lane holds.

        `prefetch_depth`: how many requests may be prefilled into their slots while no lane is free
        for them; 0 turns that off.
        `progress_timeout_s`: how long a running source may be silent. `drain_timeout_s`: how long
        one may keep a slot that is no longer wanted before it is ended, and how long an import may
        take to be fenced. `chunk_nbytes`: what an import is cut into, by default 8 MiB where
        entries decode, and 32 MiB where none does. `budget_nbytes`: imported in one
        turn at most, by default 64 MiB; a caller that decodes by itself sets what its steps can
        spare. `import_share`: while entries decode here, the time that imports may take from the
        owner, as a share of decode time.
        `local`: an engine that runs in this process for requests with `on_failure="local"`; it is
        closed with the owner. Its one slot is made when the first such request is submitted.

        Raises:
            Refused: the decoder has no ordered, fenceable copy, `local` does not fit it, or a bound
            is none.
        """
        timeouts = progress_timeout_s, drain_timeout_s
        check_bounds(*timeouts, chunk_nbytes, budget_nbytes, import_share, prefetch_depth)
        if not decoder.caps.ordered_copy:
            raise Refused("this decoder has no ordered copy with a fence; it cannot own a cache")
        self.context = context
        self._manifest = decoder.manifest()
        own = None if local is None else LocalSource(local, self._manifest, context)
        limits = Limits(
            decoder.caps.max_lanes,
            context,
            prefetch_depth,
            chunk_nbytes or SHARED_CHUNK_NBYTES,
            int(progress_timeout_s * 1e9),
            int(drain_timeout_s * 1e9),
        )
        machine = Owner(next(_epochs), limits)
        self._watch = Watch()
        sources = Sources(
            machine,
            self._manifest,
            context,
            own,
            self._watch,
            self._tell,
            self._run_commands,
            decoder if isinstance(decoder, PinsSlabs) else None,
        )
        super().__init__(machine, decoder, sources, import_share)
        self._closed = False
        self._turning = False
        self._checked = True  # whether the books were checked since it became idle
        self._importing = Importing(
            machine,
            self._flights,
            share=import_share,
            chunk_nbytes=chunk_nbytes,
            budget_nbytes=budget_nbytes,
            copies=decoder.caps.copies,
        )
        self._each_turn: list[Callable[[], None]] = []

    # What a caller does.

    def attach(self, handle: SourceHandle, *, restart: RestartPolicy | None = None) -> None:
        """Take a started source: handshake, slab, and from then on its messages and its death.

        With `restart`, one of the same configuration is started each time it dies, as the policy
        says; turns spawn it and take its handshake as it comes. Without it a dead source is gone.

        Raises:
            Refused: it does not fit this decoder. PeerDied: it died.
        """
        self._check_open()
        self._sources.attach(handle, restart)

    def watch(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` in a turn whenever `fd` is readable."""
        self._watch.add(fd, act)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        self._watch.remove(fd)

    def each_turn(self, act: Callable[[], None]) -> None:
        """Call `act` at the end of each turn, and often while the owner prefills by itself."""
        self._each_turn.append(act)

    def submit(
        self,
        tokens: Sequence[int],
        options: RequestOptions | None = None,
        *,
        on_token: Callable[[int], None] | None = None,
        on_progress: Callable[[Span, int, int], None] | None = None,
        label: int | None = None,
        start: int = 0,
    ) -> Request:
        """Start a request; the callbacks are called from within turns.

        `on_progress(span, imported, total)` tells what was imported last, and bytes of KV so far,
        of the attempt that runs. `label`: the caller's own number for it. `start`: the storage that
        the caller bound to the label holds positions [0, start) already, so that the source emits
        only those from there on.

        Raises:
            Refused: it can never be served as asked; the text says what to change.
        """
        self._check_open()
        options = options or RequestOptions()
        prompt = prompt_of(tokens)
        local = self._check_local(options)
        sides = list(self._sources.sides(local=local))
        if start:
            check_start(start, len(prompt), options, self._decoder, sides)
        plans = check_request(prompt, options, self._decoder, self._manifest, self.context, sides)
        if options.poison:
            for plan in plans:
                self._poison.make(plan)
        if local:
            self._sources.open_local()
        if options.route == "auto" or options.prefix == "shared":
            self._chooser.prepare()
        found, reuse = self._keeping.look_up(
            prompt,
            options,
            self._sources.makers(local=local),
            owner_continues=self._owner_continues(options),
            costs=self._chooser.known(self._sources.in_service),
            decoding=bool(self._decoding),
        )
        now_ns = time.monotonic_ns()
        deadline_ns = None
        if options.deadline_s is not None:
            deadline_ns = now_ns + int(options.deadline_s * 1e9)
        try:
            begin = start if found is None else found.positions
            request_id = self._submit(prompt, now_ns, deadline_ns, options, found, reuse, begin)
        except BaseException:
            if found is not None:
                self._keeping.index.unpin(found.prompt)
            raise
        asked = request_id, len(tokens), options, on_token, on_progress
        request = Request(*asked, label=label, reuse=reuse)
        self._take_up(Active(AttemptId(*request_id, 1), request, prompt, found, start))
        self._checked = False
        self._run_commands()
        return request

    def _owner_continues(self, options: RequestOptions) -> bool:
        """Whether this request's remainder may be the owner's: nothing follows if that fails, so
        not where something is asked to.
        """
        asked = options.prefix == "shared" and options.on_failure == "fail"
        return asked and self._sources.local_continues()

    def cancel(self, request: Request) -> None:
        """The caller wants no more of it, wherever it is; a request that is done stays as it is."""
        self._check_open()
        if request.done:
            return
        active = self._of_request.get(request.request)
        if active is not None:
            active.record.cancelled()
        decided = not self._machine.cancel(request.request, time.monotonic_ns())
        if decided and self._machine.state_of(request.request) is HandoffState.PUBLISHED:
            active = self._of_request[request.request]
            reason = "cancelled by the caller"
            self._decoding.finish(active, "cancelled", reason, Cause.CANCELLED)
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
        """One owner turn; waits at most `timeout_s` if there is nothing to do.

        A prefill by the owner's own engine is run to its end in one turn; everything else is taken
        in meanwhile, layer by layer, but nobody decodes.

        Raises:
            LocalProtocolError: it is called from within a turn, by a callback.
        """
        self._check_open()
        with self._in_turn():
            self._take_in(self._wait_s(timeout_s), step_follows=bool(self._decoding))
            self._importing.decode(self._step, decoding=bool(self._decoding))
            self._sources.run_local(self._take_in_meanwhile)
            self._sources.let_go()
            self._check_when_idle()
            self._act_each_turn()

    def _step(self) -> None:
        begun_ns = time.monotonic_ns()
        self._decoding.step()
        self._keeping.stepped(time.monotonic_ns() - begun_ns)

    def fileno(self) -> int:
        """A descriptor that is readable when a turn has something to take in.

        For a caller with an event loop of its own: turn when it is readable, and at least as often
        as `next_turn_s` says.
        """
        return self._watch.fileno()

    def next_turn_s(self) -> float | None:
        """Seconds after which a turn is due although nothing comes in; None = no such time."""
        if self._decoding or self._sources.local_waits:
            return 0.0
        if self._flights:
            return self._importing.look_again_s()
        if self._machine.has_pieces:
            return 0.0
        due = (self._machine.next_deadline_ns(), self._sources.next_due_ns())
        due_ns = min((at_ns for at_ns in due if at_ns is not None), default=None)
        return None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)

    def plan_of(self, request: Request) -> Plan:
        """The plan of a running or held request, once it was leased a slot.

        It is of all positions, also of those that were not prefilled since they were kept.
        """
        active = self._of_request.get(request.request)
        if active is None:
            raise Closed(f"request {request.request} is over")
        return active.the_whole_plan

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

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Turn until idle; False if that took longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.idle:
            if time.monotonic() > deadline_s:
                return False
            self.turn(0.05)
        return True

    def close(self) -> None:
        """End all requests, then the decoder, then the sources. Idempotent.

        Raises:
            LocalProtocolError: it is called from within a turn, by a callback.
        """
        if self._closed:
            return
        if self._turning or self._carrying_out:
            raise LocalProtocolError("an owner was to be closed from within its own turn")
        with ExitStack() as stack:
            stack.callback(self._watch.close)
            stack.callback(self._sources.close)  # and with them the slots that it may still read
            stack.callback(self._decoder.close)
            try:
                for active in list(self._active.values()):
                    self.cancel(active.request)
            finally:
                self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this owner was closed")

    # A turn.

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        if self._turning:
            raise LocalProtocolError("a turn within a turn: a callback must not turn its owner")
        self._turning = True
        try:
            yield
        finally:
            self._turning = False

    def _take_in(self, wait_s: float, *, step_follows: bool) -> None:
        """The part of a turn that computes nothing: what came, what is due, what can move."""
        self._watch.take_in(wait_s)
        now_ns = time.monotonic_ns()
        due_ns = self._machine.next_deadline_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._sources.before_tick(now_ns)
            self._machine.tick(now_ns)
        self._sources.tick(now_ns)
        self._run_commands()
        self._poll_fences()
        self._importing.begin(self._run_commands, self._watch.is_ready, decoding=step_follows)

    def _take_in_meanwhile(self) -> None:
        """While the owner's own engine runs."""
        self._take_in(0.0, step_follows=False)
        self._act_each_turn()

    def _act_each_turn(self) -> None:
        for act in self._each_turn:
            act()

    def _wait_s(self, timeout_s: float) -> float:
        due_s = self.next_turn_s()
        return timeout_s if due_s is None else min(timeout_s, due_s)

    def _check_when_idle(self) -> None:
        """The books are checked once whenever the owner comes to rest."""
        if self._checked or self._active or not self.idle:
            return
        self._checked = True
        try:
            self.check_integrity()
        except LocalProtocolError as exc:
            _log.error("the books of this owner do not add up: %s", exc)
            raise
