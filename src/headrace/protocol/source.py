"""One attempt as its source sees it: what may be announced, and in which order.

An attempt goes IDLE, RUNNING, DONE, or by way of CANCELLING when the owner withdraws it. While it
runs, the engine commits spans: each is checked against the plan and against all earlier ones here,
in the process that made it, so that an engine's bug raises where it is and never reaches the owner.
After such a bug the attempt can only fail: what lies in the slot is no longer what was told.

Announcing never blocks an engine. At most MAX_PROGRESS messages of an attempt may be unread, which
the socket is sized for. How many spans the request's cuts will come to is known, so they are merged
evenly into three quarters of the bound; the rest is kept for an engine that cuts finer than it was
asked to. The last message is `SourceFinal` or
`Failed`; then, when the engine has returned, `Released` gives the write token back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import ClassVar

from headrace.coverage import Coverage
from headrace.errors import Cancelled, LocalProtocolError, RemoteProtocolError
from headrace.ids import Span
from headrace.messages import (
    MAX_PROGRESS,
    MAX_SPANS,
    Computing,
    DeviceTimes,
    Failed,
    Prefill,
    Progress,
    Released,
    SourceFinal,
    travelling_text,
)
from headrace.plan import Plan
from headrace.protocol.machine import Machine


class SourceState(Enum):
    IDLE = auto()
    RUNNING = auto()
    CANCELLING = auto()
    DONE = auto()


class SourceEvent(Enum):
    START = auto()
    COMMIT = auto()
    FINAL = auto()
    FAIL = auto()
    CANCEL = auto()
    RETURN = auto()


_S, _E = SourceState, SourceEvent

_EVEN_MESSAGES = MAX_PROGRESS * 3 // 4
HEARTBEAT_NS = 5 * 10**9  # between two words of an engine that only computes
MOST_SPANS = _EVEN_MESSAGES * MAX_SPANS  # a request that is cut finer is refused before it starts

_CLOSING = 2  # messages of an attempt beside its progress: SourceFinal or Failed, and Released


class SourceAttempt(Machine[SourceState, SourceEvent]):
    """The source's half of one attempt."""

    TABLE: ClassVar = {
        _S.IDLE: {_E.START: _S.RUNNING},
        _S.RUNNING: {
            _E.COMMIT: _S.RUNNING,
            _E.FINAL: _S.RUNNING,
            _E.FAIL: _S.RUNNING,
            _E.CANCEL: _S.CANCELLING,
            _E.RETURN: _S.DONE,
        },
        _S.CANCELLING: {_E.CANCEL: _S.CANCELLING, _E.RETURN: _S.DONE},
        _S.DONE: {_E.CANCEL: _S.DONE},
    }

    def __init__(self, prefill: Prefill, plan: Plan) -> None:
        super().__init__(SourceState.IDLE, f"attempt {prefill.attempt}")
        self.prefill = prefill
        self.plan = plan
        self._coverage = Coverage(plan.windows, plan.num_tokens)
        self._held: list[Span] = []
        self._digests: list[int] = []
        self._begun_ns = 0
        self._write_ns: int | None = None
        self._computed: DeviceTimes | None = None
        self._copied: DeviceTimes | None = None
        self._num_sent = 0
        self._ended = False
        self._broken = ""
        self._last_word_ns = 0
        self.stamps_layers = _spans_by_layer(prefill, plan) > 0
        self._stride = min(MAX_SPANS, -(-expected_spans(prefill, plan) // _EVEN_MESSAGES))

    def start(self, now_ns: int) -> None:
        """The engine begins to compute."""
        self._check(SourceEvent.START)
        self._begun_ns = now_ns
        self._prefill_begun_ns = now_ns
        self._last_word_ns = now_ns
        self._step(SourceEvent.START)

    def cancel(self) -> None:
        """The owner withdrew the attempt; a cancel that comes late changes nothing."""
        self._check(SourceEvent.CANCEL)
        self._held.clear()
        self._digests.clear()
        self._step(SourceEvent.CANCEL)

    def check_running(self) -> None:
        """What every sink call begins with.

        Raises:
            Cancelled: the owner withdrew the attempt.
            LocalProtocolError: the attempt has not started, has given its final, or is over.
        """
        if self.state is SourceState.CANCELLING:
            raise Cancelled(f"{self._name} was cancelled")
        self._check(SourceEvent.COMMIT)
        if self._ended:
            raise LocalProtocolError(f"{self._name}: the final was given already")
        if self._broken:
            raise LocalProtocolError(self._broken)

    def check_writable(self, spans: Sequence[Span]) -> None:
        """Check that cells may be handed out for writing: none of them was told before.

        Raises:
            Cancelled: the attempt was cancelled.
            LocalProtocolError: a cell was told, or is outside the plan; the attempt is broken.
        """
        self.check_running()
        try:
            self._coverage.check(spans)
        except RemoteProtocolError as exc:
            raise self._break(f"the engine would write {exc}") from exc

    def computing(self, now_ns: int) -> list[Computing]:
        """The engine is at work; returns what to send, at most once in HEARTBEAT_NS.

        Raises:
            Cancelled: the attempt was cancelled.
        """
        self.check_running()
        if now_ns - self._last_word_ns < HEARTBEAT_NS:
            return []
        self._last_word_ns = now_ns
        return [Computing(self.prefill.attempt, self.prefill.slot, self.prefill.generation)]

    def commit(
        self,
        spans: Sequence[Span],
        digests: Sequence[int],
        now_ns: int,
        *,
        write_ns: int | None = None,
        computed: DeviceTimes | None = None,
        copied: DeviceTimes | None = None,
    ) -> list[Progress]:
        """The cells of `spans` lie in the slot; returns what to send now, perhaps nothing yet.

        `write_ns`: when the first of them was handed out; by default the writing took no time.
        `computed`, `copied`: when a device with events did both. A message that tells of several
        commits has the time from the first to the last of them, and none if one of them has none.

        Raises:
            Cancelled: the attempt was cancelled.
            LocalProtocolError: a cell twice or outside the plan, too many spans, or digests other
            than the grant asks for.
        """
        self.check_running()
        wanted = len(spans) if self.prefill.digest else 0
        if len(digests) != wanted:
            raise LocalProtocolError(
                f"{self._name}: {len(spans)} spans with {len(digests)} digests, expected {wanted}"
            )
        room = MAX_PROGRESS - _CLOSING - self._num_sent
        if len(self._held) + len(spans) > MAX_SPANS * room:
            raise LocalProtocolError(
                f"{self._name}: {len(self._held) + len(spans)} spans, more than its last {room} "
                f"messages of {MAX_SPANS} can carry; use larger layer groups or chunks"
            )
        try:
            self._coverage.add(spans)
        except RemoteProtocolError as exc:
            raise self._break(f"the engine committed {exc}") from exc
        self._step(SourceEvent.COMMIT)
        first = self._write_ns is None
        if self._write_ns is None:
            self._write_ns = now_ns if write_ns is None else write_ns
        self._computed = computed if first else _joined(self._computed, computed)
        self._copied = copied if first else _joined(self._copied, copied)
        self._held += spans
        self._digests += digests
        rest = len(self._held) % MAX_SPANS  # full messages go at once, the rest when it is due
        count = len(self._held) - (rest if rest < self._spans_to_wait_for() else 0)
        return self._flush(count, now_ns)

    def final(self, token: int | None, ready_ns: int, now_ns: int) -> list[Progress | SourceFinal]:
        """The source-final input is there; returns what to send, held spans first.

        Raises:
            Cancelled: the attempt was cancelled.
            LocalProtocolError: cells are missing, or the final was given before.
        """
        self.check_running()
        missing = self._coverage.first_missing()
        if missing is not None:
            raise LocalProtocolError(f"{self._name}: final, but {missing} is missing")
        out: list[Progress | SourceFinal] = list(self._flush(len(self._held), now_ns))
        out.append(
            SourceFinal(
                self.prefill.attempt,
                self.prefill.slot,
                self.prefill.generation,
                "logits" if token is None else "token",
                token or 0,
                self._prefill_begun_ns,
                ready_ns,
            )
        )
        self._ended = True
        self._step(SourceEvent.FINAL)
        return out

    def fail(self, reason: str) -> list[Failed]:
        """The engine raised; returns what to send. Nothing after a final or a cancel."""
        if self._ended or self.state is SourceState.CANCELLING:
            return []
        self._check(SourceEvent.FAIL)
        self._ended = True
        self._held.clear()
        self._digests.clear()
        self._step(SourceEvent.FAIL)
        prefill = self.prefill
        return [Failed(prefill.attempt, prefill.slot, prefill.generation, travelling_text(reason))]

    def returned(self) -> Released:
        """The engine returned and can write no more; returns the attempt's last message."""
        self._check(SourceEvent.RETURN)
        self._step(SourceEvent.RETURN)
        return Released(self.prefill.attempt, self.prefill.slot, self.prefill.generation)

    def _break(self, text: str) -> LocalProtocolError:
        self._broken = f"{self._name}: {text}"
        return LocalProtocolError(self._broken)

    def _spans_to_wait_for(self) -> int:
        return self._stride if self._num_sent < _EVEN_MESSAGES else MAX_SPANS

    def _flush(self, count: int, now_ns: int) -> list[Progress]:
        """The messages of the first `count` held spans; what is left waits for a full message."""
        out = []
        if any(map(self.plan.span_nbytes, self._held[:count])):  # others hold no deadline off
            self._last_word_ns = now_ns
        for at in range(0, count, MAX_SPANS):
            stop = min(at + MAX_SPANS, count)
            out.append(
                Progress(
                    self.prefill.attempt,
                    self.prefill.slot,
                    self.prefill.generation,
                    tuple(self._held[at:stop]),
                    tuple(self._digests[at:stop]),
                    self._begun_ns,
                    now_ns if self._write_ns is None else max(self._begun_ns, self._write_ns),
                    now_ns,
                    self._computed,
                    self._copied,
                )
            )
        del self._held[:count], self._digests[:count]
        self._num_sent += len(out)
        if out and not self._held:
            self._begun_ns, self._write_ns = now_ns, None
        return out


def _joined(one: DeviceTimes | None, other: DeviceTimes | None) -> DeviceTimes | None:
    """From when the first began until the last ended."""
    if one is None or other is None:
        return None
    return DeviceTimes(
        min(one.begun_ns, other.begun_ns),
        max(one.ended_ns, other.ended_ns),
        max(one.error_ns, other.error_ns),
        "real" if one.kind == other.kind == "real" else "fake",
    )


def expected_spans(prefill: Prefill, plan: Plan) -> int:
    """How many spans are announced of an engine that cuts as it was asked to, at most."""
    return _spans_by_layer(prefill, plan) or _asked_spans(prefill, plan)


def _spans_by_layer(prefill: Prefill, plan: Plan) -> int:
    """How many there are if each layer is stamped for itself; 0 where that is not to be."""
    num_chunks = 1 if prefill.route == "whole" else _num_chunks(prefill, plan)
    num_spans = num_chunks * len(plan.layers)
    return num_spans if prefill.digest and num_spans <= MOST_SPANS else 0


def _asked_spans(prefill: Prefill, plan: Plan) -> int:
    if prefill.route == "whole":
        return 1
    num_chunks = _num_chunks(prefill, plan)
    if prefill.route == "chunked":
        return num_chunks
    return num_chunks * sum(map(len, plan.layer_groups(prefill.group_layers, prefill.emission)))


def _num_chunks(prefill: Prefill, plan: Plan) -> int:
    n, start = plan.num_tokens, plan.start
    marks = sorted({start, *(cut for cut in prefill.cuts if start < cut < n), n})
    count = 0
    for begin, stop in pairwise(marks):
        computed = min(prefill.prefill_chunk or stop - begin, stop - begin)
        moved = prefill.chunk or computed
        num_whole, rest = divmod(stop - begin, computed)
        count += num_whole * -(-computed // moved) + -(-rest // moved)
    return count
