"""What is measured of one attempt, and what happened to it if the request asked for a trace.

All figures are of the host's CLOCK_MONOTONIC: the source's readings travel in its messages. Only a
trace has what devices tell by their own events. A record changes nothing of what it records.
"""

from __future__ import annotations

import time
from collections import deque

from headrace.ids import Span
from headrace.messages import DeviceTimes, IntervalKind, Measured, Progress, SourceFinal
from headrace.plan import Plan
from headrace.protocol.books import AttemptMessage
from headrace.runtime.lanes import LOCAL_GRANT, REMOTE_GRANT, What
from headrace.runtime.requests import Request

_KEPT_STEPS = 64  # of others' decode steps, while the final may be under way
_TRACED_STEPS = 1024  # of them in a trace before the final, and four times as many after it


class Record:
    """One attempt's times and bytes; a retry begins a new one."""

    def __init__(self, request: Request, submitted_ns: int) -> None:
        self._request = request
        self._trace = request.options.trace
        self._submitted_ns = submitted_ns
        self._imports: list[tuple[int, int]] = []  # (fenced at ns, bytes)
        self._import_ns = self._imported_ns = 0
        self._prefill_begun_ns = 0
        self._final_ns = 0
        self._published_ns = 0
        self._first_token_ns = 0
        self._decoded = False
        self._ended_ns = 0
        self._last_group_ns = 0
        self._last_group_nbytes = 0
        self._num_spans = 0
        self.num_groups = 0
        self._steps: deque[tuple[int, int]] = deque(maxlen=_KEPT_STEPS)
        self._in_the_way_ns = 0  # steps of others in the tail
        self._storage_ns = 0
        self._parked_since_ns = 0  # while it is parked
        self._parked_ns = 0
        self._num_traced_steps = 0
        self.nbytes_imported = 0
        self._lanes = request.trace
        self._lanes.clear()

    @property
    def submitted_ns(self) -> int:
        """When the request was submitted."""
        return self._submitted_ns

    @property
    def published(self) -> bool:
        """Whether the entry is visible."""
        return bool(self._published_ns)

    def nothing_to_prefill(self) -> None:
        """All of the prompt was kept: the source-final input was there when it was submitted."""
        self._prefill_begun_ns = self._final_ns = self._last_group_ns = self._submitted_ns

    def granted(self, *, local: bool, parked: bool = False) -> None:
        """The prefill was granted to a source, or to the owner's own engine.

        `parked`: it has a slot from now on, and no storage yet.
        """
        self._request.local = local
        self._instant("granted", LOCAL_GRANT if local else REMOTE_GRANT)
        if parked:
            self._parked_since_ns = time.monotonic_ns()

    def reserved(self, at_ns: int | None = None) -> None:
        """It has storage, from now on, or since the attempt before this one had it."""
        self._storage_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._unpark("storage", self._storage_ns)

    @property
    def storage_ns(self) -> int:
        """Since when it has storage; 0 if it has none."""
        return self._storage_ns

    def heard(self, message: AttemptMessage, plan: Plan | None) -> None:
        """The owner took in what the source told."""
        if isinstance(message, Progress) and plan is not None:
            nbytes = sum(plan.span_nbytes(span) for span in message.spans)
            self._num_spans += len(message.spans)
            self.num_groups += 1
            self._last_group_ns = message.ready_ns
            self._last_group_nbytes = nbytes
            if self._trace:
                now_ns = time.monotonic_ns()
                self._lanes.source.append((message, nbytes))
                self._owner("validated", message.spans, now_ns, now_ns, nbytes)
        elif isinstance(message, SourceFinal):
            self._prefill_begun_ns = message.begun_ns
            self._final_ns = message.ready_ns
            if not self._parked_since_ns:
                self._in_the_way_ns = sum(self._in_the_tail_ns(*step) for step in self._steps)
            if self._trace:
                now_ns = time.monotonic_ns()
                self._lanes.source.append((message, 0))
                self._owner("validated", message.first, now_ns, now_ns)

    def imported(
        self,
        piece: Span,
        begun_ns: int,
        ended_ns: int,
        nbytes: int,
        ran: DeviceTimes | None = None,
    ) -> None:
        """An import was fenced; `ran`: when its copy ran, where a device tells."""
        self._imports.append((ended_ns, nbytes))
        self._import_ns += max(0, ended_ns - max(begun_ns, self._imported_ns))
        self._imported_ns = max(ended_ns, self._imported_ns)
        self.nbytes_imported += nbytes
        self._owner("import", piece, begun_ns, ended_ns, nbytes, ran)

    def neighbour_decoded(self, begun_ns: int, ended_ns: int) -> None:
        """The owner decoded for others; what of it lies in the tail stood in the way."""
        if self._published_ns or self._ended_ns:
            return
        self._steps.append((begun_ns, ended_ns))
        if self._final_ns and not self._parked_since_ns:
            self._in_the_way_ns += self._in_the_tail_ns(begun_ns, ended_ns)
        if self._num_traced_steps < _TRACED_STEPS * (4 if self._final_ns else 1):
            self._num_traced_steps += 1
            self._owner("neighbour", "decode step of another", begun_ns, ended_ns)

    def publish(self) -> None:
        """The entry is visible from now on."""
        self._published_ns = time.monotonic_ns()
        self._owner("published", "entry", self._published_ns, self._published_ns)

    def first_token(self) -> None:
        """The first token was chosen."""
        self._first_token_ns = time.monotonic_ns()
        self._owner("first_token", "token", self._first_token_ns, self._first_token_ns)

    def decoded(self, begun_ns: int, ended_ns: int) -> None:
        """A decode step of this request; the first one is kept."""
        if not self._decoded:
            self._decoded = True
            self._owner("decode", "first decode step", begun_ns, ended_ns)

    def cancelled(self) -> None:
        """The caller wants no more of it."""
        self._instant("cancel", "by the caller")

    def ended(self, outcome: str, cause: str) -> None:
        """The request was given its terminal."""
        self._ended_ns = time.monotonic_ns()
        self._unpark("no storage", self._ended_ns)
        name = f"{outcome}: {cause}" if cause else outcome
        self._owner("ended", name, self._ended_ns, self._ended_ns)

    def drained(self) -> None:
        """The storage is free again, or set apart; its slot may still wait for its source."""
        if self._ended_ns:
            self._owner("drain", "storage", self._ended_ns, time.monotonic_ns())

    def measured(self, nbytes: int) -> Measured:
        """The figures of a published attempt whose plan has `nbytes` of KV."""
        final_ns = self._final_ns
        return Measured(
            submitted_ns=self._submitted_ns,
            prefill_begun_ns=self._prefill_begun_ns,
            source_final_ns=final_ns,
            last_group_ns=self._last_group_ns,
            published_ns=self._published_ns,
            first_token_ns=self._first_token_ns,
            ended_ns=time.monotonic_ns(),
            kv_nbytes=nbytes,
            nbytes_before_final=sum(n for at_ns, n in self._imports if at_ns <= final_ns),
            last_group_nbytes=self._last_group_nbytes,
            spans=self._num_spans,
            groups=self.num_groups,
            imports=len(self._imports),
            import_ns=self._import_ns,
            decode_in_the_way_ns=self._in_the_way_ns,
            storage_ns=self._storage_ns,
            parked_ns=self._parked_ns,
        )

    def _unpark(self, what: str, now_ns: int) -> None:
        since_ns, self._parked_since_ns = self._parked_since_ns, 0
        if since_ns:
            self._parked_ns = now_ns - since_ns
            self._owner("parked", what, since_ns, now_ns)

    def _in_the_tail_ns(self, begun_ns: int, ended_ns: int) -> int:
        return max(0, ended_ns - max(begun_ns, self._final_ns, self._storage_ns))

    def _instant(self, kind: IntervalKind, name: str) -> None:
        now_ns = time.monotonic_ns()
        self._owner(kind, name, now_ns, now_ns)

    def _owner(
        self,
        kind: IntervalKind,
        what: What,
        begun_ns: int,
        ended_ns: int,
        nbytes: int = 0,
        ran: DeviceTimes | None = None,
    ) -> None:
        if self._trace:
            self._lanes.owner.append((kind, what, begun_ns, ended_ns, nbytes, ran))
