"""What the shell keeps of one running request: its storage, its tokens and what was measured."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.backends.base import Decoder, Entry, Fence, Reservation, SlotView
from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, Span
from headrace.messages import Interval, Measured, Progress, SourceFinal
from headrace.plan import Plan
from headrace.protocol.books import AttemptMessage
from headrace.protocol.commands import Cause
from headrace.runtime.requests import Request

if TYPE_CHECKING:
    from headrace.engine.sampling import Sampler


class Active:
    """One request from its submission until its storage is free again, attempt by attempt."""

    def __init__(self, attempt: AttemptId, request: Request, tokens: Sequence[int]) -> None:
        self.request = request
        self.held: Reservation | Entry | None = None
        self.broken = False  # its storage could not be had; what else was commanded is moot
        self._prompt = array("I", tokens)
        self._sampler: Sampler | None = None
        self._logits = hashlib.blake2b(digest_size=16)
        self._submitted_ns = time.monotonic_ns()
        self._begin(attempt)

    def _begin(self, attempt: AttemptId) -> None:
        """What is of one attempt only."""
        self.attempt = attempt
        self.plan: Plan | None = None
        self.callback_error = ""  # what a caller's callback raised
        self.poisoned: Fence | None = None  # of the poison in its storage, before any import
        self.poison_slot: SlotView | None = None  # what it is copied from, until it is fenced
        self._imports: list[tuple[int, int]] = []  # (fenced at ns, bytes)
        self._nbytes_imported = 0
        self._prefill_begun_ns = 0
        self._source_final_ns = 0
        self._published_ns = 0
        self._first_token_ns = 0
        self._last_group_ns = 0
        self._last_group_nbytes = 0
        self._num_spans = 0
        self._num_groups = 0
        self._steps: deque[tuple[int, int]] = deque(maxlen=64)  # of others, the last before publish

    def retry(self, reason: str) -> None:
        """The attempt failed and is quiet: the next one goes on, with its storage if it has any."""
        request = self.request
        request.attempts.append(reason)
        request.source_intervals.clear()
        request.owner_intervals.clear()
        self._begin(self.attempt.next)

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

    def heard(self, message: AttemptMessage) -> None:
        """Note what the source told, for the record only."""
        if isinstance(message, Progress) and self.plan is not None:
            nbytes = sum(self.plan.span_nbytes(span) for span in message.spans)
            self._num_spans += len(message.spans)
            self._num_groups += 1
            self._last_group_ns = message.ready_ns
            self._last_group_nbytes = nbytes
            if self.request.options.trace:
                name = ", ".join(map(str, message.spans[:4]))
                self.request.source_intervals.append(
                    Interval(name, message.begun_ns, message.ready_ns, nbytes)
                )
        elif isinstance(message, SourceFinal):
            self._prefill_begun_ns = message.begun_ns
            self._source_final_ns = message.ready_ns

    def imported(self, piece: Span, begun_ns: int, ended_ns: int, nbytes: int) -> None:
        """An import was fenced."""
        self._imports.append((ended_ns, nbytes))
        self._nbytes_imported += nbytes
        request = self.request
        if request.options.trace:
            request.owner_intervals.append(Interval(str(piece), begun_ns, ended_ns, nbytes))
        if request.on_progress is not None:
            self._call(request.on_progress, piece, self._nbytes_imported, self.the_plan.nbytes)

    def decoded_meanwhile(self, begun_ns: int, ended_ns: int) -> None:
        """The owner decoded for others; what of it stood in the way is known at publishing."""
        if not self._published_ns:
            self._steps.append((begun_ns, ended_ns))

    def published(self, entry: Entry) -> None:
        """The entry is visible."""
        self.held = entry
        self._published_ns = time.monotonic_ns()

    def choose(self, logits: memoryview) -> int:
        """Sample the next token from a row of float32 logits."""
        from headrace.engine.sampling import Sampler  # torch or numpy only where tokens are chosen

        if self._sampler is None:
            self._sampler = Sampler(self.request.options.sampling)
        if self.request.options.audit:
            self._logits.update(logits)
        return int(self._sampler.sample(logits))

    def take(self, token: int) -> bool:
        """Add a token; True if it was the request's last."""
        request = self.request
        if not request.tokens:
            self._first_token_ns = time.monotonic_ns()
        request.tokens.append(token)
        if request.on_token is not None:
            self._call(request.on_token, token)
        return token in request.options.stop_tokens or (
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
        plan = self.the_plan
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
        if self._published_ns:
            request.measured = self._measured()
        request.outcome = outcome

    def _measured(self) -> Measured:
        final_ns = self._source_final_ns
        return Measured(
            submitted_ns=self._submitted_ns,
            prefill_begun_ns=self._prefill_begun_ns,
            source_final_ns=final_ns,
            last_group_ns=self._last_group_ns,
            published_ns=self._published_ns,
            first_token_ns=self._first_token_ns,
            ended_ns=time.monotonic_ns(),
            kv_nbytes=self.the_plan.nbytes,
            nbytes_before_final=sum(n for at_ns, n in self._imports if at_ns <= final_ns),
            last_group_nbytes=self._last_group_nbytes,
            spans=self._num_spans,
            groups=self._num_groups,
            imports=len(self._imports),
            decode_in_the_way_ns=sum(
                max(0, min(ended_ns, self._published_ns) - max(begun_ns, final_ns))
                for begun_ns, ended_ns in self._steps
            ),
        )


def reason_of(exc: BaseException) -> str:
    """What an exception says, or its kind if it says nothing."""
    return str(exc) or type(exc).__name__


def pass_on(exc: BaseException) -> None:
    """Raise what is no fault of the call that it came through, such as an interrupt."""
    if not isinstance(exc, Exception):
        raise exc
