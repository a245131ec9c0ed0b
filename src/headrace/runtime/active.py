"""What the shell keeps of one running request: its storage, its tokens and what was measured."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.backends.base import Decoder, Entry, Fence, Kept, Reservation, SlotView
from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, Span
from headrace.messages import DeviceTimes, RouteChoice
from headrace.plan import Plan
from headrace.protocol.commands import Cause
from headrace.runtime.prefix import Found, KeptPrompt
from headrace.runtime.record import Record
from headrace.runtime.requests import Request, RequestOptions

if TYPE_CHECKING:
    from headrace.engine.sampling import Logprobs, Sampler


class Active:
    """One request from its submission until its storage is free again, attempt by attempt."""

    def __init__(
        self,
        attempt: AttemptId,
        request: Request,
        tokens: Sequence[int],
        found: Found | None = None,
        start: int = 0,
    ) -> None:
        """`found`: the kept prompt that it goes on from, pinned. `start`: see the property."""
        self.request = request
        self.found = found
        self.start = start if found is None else found.positions
        """Positions that its storage holds as soon as it is reserved."""
        self.kept: Kept | None = None  # what is kept of it, once it is published
        self.pinned = found is not None
        self.held: Reservation | Entry | None = None
        self.broken = False  # its storage could not be had; what else was commanded is moot
        self._prompt = array("I", tokens)
        self._sampler: Sampler | None = None
        self._logprobs: Logprobs | None = None  # of the token that was chosen last
        self._logits = hashlib.blake2b(digest_size=16)
        self._submitted_ns = time.monotonic_ns()
        self._begin(attempt)

    def _begin(self, attempt: AttemptId) -> None:
        """What is of one attempt only."""
        self.attempt = attempt
        self.plan: Plan | None = None
        self.whole_plan = None if self.found is None else self.found.prompt.plan
        self.imports_begun = False
        self.callback_error = ""  # what a caller's callback raised
        self.poisoned: Fence | None = None  # of the poison in its storage, before any import
        self.poison_slot: SlotView | None = None  # what it is copied from, until it is fenced
        self.choice: RouteChoice | None = None
        self.expected_ns = 0.0  # by whoever chose
        self.alone = False  # whether it had the owner to itself when it was granted
        self.record = Record(self.request, self._submitted_ns)

    def retry(self, reason: str) -> None:
        """The attempt failed and is quiet: the next one goes on, with its storage if it has any."""
        self.request.attempts.append(reason)
        storage_ns = self.record.storage_ns
        self._begin(self.attempt.next)
        if storage_ns:
            self.record.reserved(storage_ns)

    @property
    def the_plan(self) -> Plan:
        """The plan, which is there once a slot was leased."""
        if self.plan is None:
            raise LocalProtocolError(f"attempt {self.attempt} has no plan yet")
        return self.plan

    @property
    def reservation(self) -> Reservation:
        """The storage while it is invisible."""
        if not isinstance(self.held, Reservation):
            raise LocalProtocolError(f"attempt {self.attempt} holds {self.held}, no reservation")
        return self.held

    @property
    def entry(self) -> Entry:
        """The storage once it is published."""
        if not isinstance(self.held, Entry):
            raise LocalProtocolError(f"attempt {self.attempt} holds {self.held}, no entry")
        return self.held

    def prompt_bytes(self) -> memoryview:
        """The prompt as little-endian u32 ids."""
        return memoryview(self._prompt).cast("B")

    def routed(self, choice: RouteChoice, expected_ns: float) -> None:
        """What `auto` came to for this attempt, and how long it is expected to take."""
        self.choice = self.request.choice = choice
        self.expected_ns = expected_ns

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where its prefill is cut beside its prefill chunk."""
        asked = self.request.options.prefill_cuts
        if not self.start:
            return asked
        made = asked if self.found is None else self.found.prompt.schedule.cuts
        return (*(cut for cut in made if cut < self.start), self.start)

    @property
    def the_whole_plan(self) -> Plan:
        """The plan of all its positions, those that were kept included."""
        if self.whole_plan is None:
            raise LocalProtocolError(f"attempt {self.attempt} has no plan yet")
        return self.whole_plan

    @property
    def prompt_found(self) -> KeptPrompt:
        """The kept prompt that it goes on from. Raises: LocalProtocolError where there is none."""
        if self.found is None:
            raise LocalProtocolError(f"attempt {self.attempt} goes on from no kept prompt")
        return self.found.prompt

    def prompt_tokens(self) -> array[int]:
        """The prompt's ids."""
        return self._prompt

    @property
    def options(self) -> RequestOptions:
        """The request's options, with the route and the cuts that were chosen for it."""
        choice = self.choice
        if choice is None:
            return self.request.options
        return replace(
            self.request.options,
            route=choice.route,
            group_layers=choice.group_layers,
            chunk=choice.chunk,
        )

    @property
    def carried_nbytes(self) -> int:
        """Bytes of KV that came from a source."""
        return 0 if self.plan is None else self.plan.nbytes

    def imported(
        self,
        piece: Span,
        begun_ns: int,
        ended_ns: int,
        nbytes: int,
        ran: DeviceTimes | None = None,
    ) -> None:
        """An import was fenced; `ran`: when it ran, by the device's own events."""
        self.record.imported(piece, begun_ns, ended_ns, nbytes, ran)
        request = self.request
        if request.on_progress is not None:
            arrived = self.record.nbytes_imported
            self._call(request.on_progress, piece, arrived, self.the_plan.nbytes)

    def published(self, entry: Entry) -> None:
        """The entry is visible."""
        self.held = entry
        self.record.publish()

    def choose(self, logits: memoryview) -> int:
        """Sample the next token from a row of float32 logits."""
        from headrace.engine.sampling import Sampler  # torch or numpy only where tokens are chosen

        options = self.request.options
        if self._sampler is None:
            self._sampler = Sampler(options.sampling, options.logprobs)
        if options.audit:
            self._logits.update(logits)
        token, self._logprobs = self._sampler.sample(logits)
        return token

    def take(self, token: int) -> bool:
        """Add a token; True if it was the request's last."""
        request = self.request
        if not request.tokens:
            self.record.first_token()
        request.tokens.append(token)
        if self._logprobs is not None:
            request.logprobs.append(self._logprobs)
        if request.on_token is not None:
            self._call(request.on_token, token)
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether the token taken last was the request's last."""
        request = self.request
        return request.tokens[-1] in request.options.stop_tokens or (
            len(request.tokens) >= request.options.max_tokens
        )

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """A callback that raises ends its own request, and nothing of the owner's turn."""
        try:
            callback(*arguments)
        except Exception as exc:
            self.callback_error = f"its callback raised {type(exc).__name__}: {exc}"

    def audit(self, decoder: Decoder) -> None:
        """Digest the published cells, layer by layer; call it before the first decode step."""
        plan = self.the_whole_plan
        digests = []
        for layer in range(len(plan.layers)):
            digest = hashlib.blake2b(digest_size=16)
            for copy in plan.copies(Span(layer, layer + 1, 0, plan.num_tokens)):
                digest.update(decoder.read(self.entry, plan.layout, copy))
            digests.append(digest.hexdigest())
        self.request.kv_digests = tuple(digests)

    def end(self, outcome: str, reason: str, cause: Cause | None) -> None:
        """Give the request its one terminal; `cause` is None if it finished."""
        request = self.request
        request.reason = reason
        request.cause = "" if cause is None else cause.value
        if request.options.audit and request.tokens:
            request.logits_digest = self._logits.hexdigest()
        if self.record.published:
            request.measured = self.record.measured(self.carried_nbytes)
        request.outcome = outcome
        self.record.ended(outcome, request.cause)

    def drained(self) -> None:
        """What it held is free again, or set apart."""
        self.record.drained()
        self.request.drained = True


def reason_of(exc: BaseException) -> str:
    """What an exception says, or its kind if it says nothing."""
    return str(exc) or type(exc).__name__


def pass_on(exc: BaseException) -> None:
    """Raise what is no fault of the call that it came through, such as an interrupt."""
    if not isinstance(exc, Exception):
        raise exc
