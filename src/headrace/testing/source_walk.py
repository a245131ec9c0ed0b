"""Walks every reachable state of a `SourceAttempt` against a table-free statement of its rules.

The bounds on messages and on the spans of one are made tiny for the walk, so that holding and
merging spans is reached with a dozen of them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from headrace.errors import Cancelled, HeadraceError, LocalProtocolError
from headrace.ids import AttemptId, Generation, SlotIndex, Span
from headrace.messages import Computing, Failed, Prefill, Progress, Released, SourceFinal
from headrace.protocol import source as machine
from headrace.protocol.source import SourceAttempt, SourceState
from headrace.testing.facts import Violation, rule
from headrace.testing.instances import EPOCH, Instance

MAX_PROGRESS: Final = 8
MAX_SPANS: Final = 3
NUM_TOKENS: Final = 20
HEARTBEAT_NS: Final = 10
_BOUNDS: Final = {
    "MAX_PROGRESS": MAX_PROGRESS,
    "MAX_SPANS": MAX_SPANS,
    "_EVEN_MESSAGES": MAX_PROGRESS * 3 // 4,
    "HEARTBEAT_NS": HEARTBEAT_NS,
}

Sent: TypeAlias = Computing | Progress | SourceFinal | Failed | Released


class Call(NamedTuple):
    """One call of the engine, the owner's cancel, or a wait; `spans` that are told or to write."""

    name: str
    spans: tuple[Span, ...] = ()
    digests: tuple[int, ...] = ()


@dataclass
class _Facts:
    """What happened, without a table."""

    started: bool = False
    cancelled: bool = False
    final: bool = False
    failed: bool = False
    returned: bool = False
    committed: tuple[Span, ...] = ()
    num_told: int = 0
    num_sent: int = 0
    stamped: bool = False
    broken: bool = False
    now_ns: int = 1
    word_ns: int = 0  # when the engine began or something was last sent

    @property
    def running(self) -> bool:
        return self.started and not (self.final or self.failed or self.returned)

    @property
    def room(self) -> int:
        """Messages left for progress: the bound keeps one for the end and one for the release."""
        return MAX_PROGRESS - 2 - self.num_sent

    @property
    def overdue(self) -> bool:
        """Whether nothing was said for so long that the owner wants a word."""
        return self.started and self.now_ns - self.word_ns >= HEARTBEAT_NS

    def complete(self) -> bool:
        return sum(span.stop - span.start for span in self.committed) == NUM_TOKENS


@dataclass
class SourceWalk:
    """What a walk saw."""

    num_states: int = 0
    num_edges: int = 0
    most_sent: int = 0
    states: set[SourceState] = field(default_factory=set)


def walk_source(*, digest: bool, chunk: int) -> SourceWalk:
    """Visit every state of one attempt and make every call in each; `chunk` is the grant's.

    Raises:
        Violation: at the first broken rule, with the shortest sequence of calls that leads to it.
    """
    instance = Instance("source", (Span(0, 1, 0, NUM_TOKENS),), num_tokens=NUM_TOKENS)
    prefill = Prefill(
        AttemptId(EPOCH, 0, 1),
        SlotIndex(0),
        Generation(0),
        NUM_TOKENS,
        *("streamed", 1, chunk, 0, "layers", digest),
    )
    seen = SourceWalk()
    with _tiny_bounds():
        first = (SourceAttempt(prefill, instance.plan), _Facts(stamped=digest))
        paths: dict[Hashable, tuple[Call, ...]] = {_key(*first): ()}
        frontier = deque([first])
        while frontier:
            attempt, facts = frontier.popleft()
            path = paths[_key(attempt, facts)]
            seen.states.add(attempt.state)
            seen.most_sent = max(seen.most_sent, facts.num_sent)
            for call in _calls(facts):
                seen.num_edges += 1
                memo = {id(attempt.plan): attempt.plan}
                after = (copy.deepcopy(attempt, memo), copy.copy(facts))
                with _blaming((*path, call)):
                    _make(call, *after)
                key = _key(*after)
                if key not in paths:
                    paths[key] = (*path, call)
                    frontier.append(after)
        seen.num_states = len(paths)
    return seen


def _calls(facts: _Facts) -> Iterator[Call]:
    at = facts.committed[-1].stop if facts.committed else 0
    stamps = 1 if facts.stamped else 0
    yield Call("start")
    for count in (1, 2, 3, MAX_SPANS * facts.room, MAX_SPANS * facts.room + 1):
        spans = tuple(Span(0, 1, p, p + 1) for p in range(at, min(at + count, NUM_TOKENS)))
        if spans:
            yield Call("commit", spans, (7,) * len(spans) * stamps)
    if at < NUM_TOKENS:
        yield Call("commit", (Span(0, 1, at, NUM_TOKENS),), (7,) * stamps)
    for odd in (
        (Span(0, 1, 0, 1), Span(0, 1, 0, 1)),
        (Span(0, 2, at, at + 1),),
        (Span(0, 1, at, NUM_TOKENS + 1),),
        (*facts.committed[-1:], Span(0, 1, NUM_TOKENS - 1, NUM_TOKENS)),
    ):
        yield Call("commit", odd, (7,) * len(odd) * stamps)
    yield Call("commit", (Span(0, 1, at, at + 1),), (7,) * (1 - stamps))
    yield Call("write", (Span(0, 1, at, at + 1), Span(0, 1, NUM_TOKENS - 1, NUM_TOKENS)))
    yield Call("write", facts.committed[-1:])
    yield Call("write", (Span(0, 1, at, NUM_TOKENS + 1),))
    if facts.running and not facts.overdue:
        yield Call("wait")
    for name in ("final", "fail", "cancel", "returned", "check_running", "computing"):
        yield Call(name)


def _make(call: Call, attempt: SourceAttempt, facts: _Facts) -> None:
    before = _key(attempt, facts)
    expected = _refusal(call, facts)
    sent: list[Sent] = []
    try:
        sent += _call(call, attempt, facts)
    except HeadraceError as exc:
        rule(type(exc) is expected, f"raised {exc!r}, expected {expected}")
        rule(_key(attempt, facts) == before, "a refused call left a trace")
        facts.broken = facts.broken or _breaks(call, facts)
        rule(bool(attempt._broken) == facts.broken, "broken", attempt._broken, facts.broken)
        return
    rule(not attempt._broken or facts.broken, "broken by a call that was allowed")
    rule(expected is None, "was allowed, expected", expected)
    _note(call, facts)
    _check_sent(call, sent, facts)
    over = facts.returned, facts.cancelled, facts.started
    word = "DONE" if over[0] else "CANCELLING" if over[1] else "RUNNING" if over[2] else "IDLE"
    rule(attempt.state.name == word, "is", attempt.state, "and should be", word)


def _call(call: Call, attempt: SourceAttempt, facts: _Facts) -> list[Sent]:
    match call.name:
        case "start":
            attempt.start(facts.now_ns)
        case "commit":
            return [*attempt.commit(call.spans, call.digests, facts.now_ns)]
        case "final":
            return [*attempt.final(None, facts.now_ns, facts.now_ns)]
        case "fail":
            return [*attempt.fail("engine")]
        case "cancel":
            attempt.cancel()
        case "returned":
            return [attempt.returned()]
        case "computing":
            return [*attempt.computing(facts.now_ns)]
        case "write":
            attempt.check_writable(call.spans)
        case "wait":
            facts.now_ns += HEARTBEAT_NS
        case _:
            attempt.check_running()
    return []


def _refusal(call: Call, facts: _Facts) -> type[HeadraceError] | None:
    """What the call must raise, if anything."""
    legal = facts.running
    match call.name:
        case "start":
            legal = not (facts.started or facts.cancelled)
        case "cancel":
            legal = facts.started
        case "returned":
            legal = facts.started and not facts.returned
        case "fail":
            legal = facts.started and not facts.returned
            legal = legal or facts.final or facts.failed
        case "wait":
            pass
        case _ if facts.cancelled and not facts.returned:
            return Cancelled
        case _ if facts.broken:
            return LocalProtocolError
        case "commit":
            legal = legal and _carried(call, facts) and _fresh(call, facts)
        case "write":
            legal = legal and _fresh(call, facts)
        case "final":
            legal = legal and facts.complete()
    return None if legal else LocalProtocolError


def _breaks(call: Call, facts: _Facts) -> bool:
    """Whether a refused call shows that the engine writes what it must not: no more is told."""
    if not facts.running or facts.cancelled or _fresh(call, facts):
        return False
    return call.name == "write" or (call.name == "commit" and _carried(call, facts))


def _carried(call: Call, facts: _Facts) -> bool:
    """Whether the messages that are left can carry a commit."""
    if len(call.digests) != (len(call.spans) if facts.stamped else 0):
        return False
    held = len(facts.committed) - facts.num_told + len(call.spans)
    return -(-held // MAX_SPANS) <= facts.room


def _fresh(call: Call, facts: _Facts) -> bool:
    """Whether all cells are in the plan, none told before."""
    cells: set[int] = {p for span in facts.committed for p in range(span.start, span.stop)}
    for span in call.spans:
        new = set(range(span.start, span.stop))
        inside = span.layer_stop == 1 and new and max(new) < NUM_TOKENS
        if not inside or cells & new:
            return False
        cells |= new
    return True


def _note(call: Call, facts: _Facts) -> None:
    match call.name:
        case "start":
            facts.started, facts.word_ns = True, facts.now_ns
        case "commit":
            facts.committed += call.spans
        case "final":
            facts.final = True
        case "fail":
            facts.failed = facts.failed or not (facts.final or facts.cancelled)
        case "cancel":
            facts.cancelled = True
        case "returned":
            facts.returned = True


def _check_sent(call: Call, sent: list[Sent], facts: _Facts) -> None:
    progress = [message for message in sent if isinstance(message, Progress)]
    rule(all(message.slot == 0 and message.generation == 0 for message in sent), "not its lease")
    for message in progress:
        rule(call.name in ("commit", "final"), "progress was sent by", call.name)
        rule(1 <= len(message.spans) <= MAX_SPANS, len(message.spans), "spans in one message")
        due = facts.committed[facts.num_told :][: len(message.spans)]
        rule(message.spans == due, "told", message.spans, "and next was", due)
        stamps = len(message.spans) if facts.stamped else 0
        rule(len(message.digests) == stamps, len(message.digests), "digests, expected", stamps)
        facts.num_told += len(message.spans)
    rest = [type(message) for message in sent if not isinstance(message, Progress)]
    facts.num_sent += len(progress)
    match call.name:
        case "final":
            rule(rest == [SourceFinal] and isinstance(sent[-1], SourceFinal), "ended by", rest)
            rule(facts.num_told == len(facts.committed), "spans are held at the final")
        case "fail":
            withdrawn = facts.cancelled or facts.final
            rule(len(rest) <= 1 and set(rest) <= {Failed}, "ended by", rest)
            rule(not (withdrawn and rest), "a failure after the end")
        case "returned":
            rule(rest == [Released], "ended by", rest)
        case "computing":
            rule(len(rest) == facts.overdue, rest, "were sent, overdue:", facts.overdue)
            rule(set(rest) <= {Computing}, "sent", rest)
        case _:
            rule(not rest, call.name, "sent", rest)
    facts.word_ns = facts.now_ns if sent else facts.word_ns  # every span of this walk has cells
    rule(facts.num_sent <= MAX_PROGRESS - 2, facts.num_sent, "progress messages")
    held = len(facts.committed) - facts.num_told
    rule(held < MAX_SPANS or facts.room <= 1, held, "spans are held, enough for a message")
    rule(held <= MAX_SPANS * facts.room, held, "spans are held, with room for", facts.room)


def _key(attempt: SourceAttempt, facts: _Facts) -> Hashable:
    """Of a clock only whether a word is due; of a break, the facts tell what the attempt must."""
    return (
        attempt.state,
        tuple(attempt._coverage._have),
        tuple(attempt._held),
        tuple(attempt._digests),
        attempt._num_sent,
        attempt._ended,
        facts.now_ns - attempt._last_word_ns >= HEARTBEAT_NS,
        *(facts.started, facts.cancelled, facts.final, facts.failed, facts.returned),
        *(facts.committed, facts.num_told, facts.num_sent, facts.broken, facts.overdue),
    )


@contextmanager
def _tiny_bounds() -> Iterator[None]:
    kept = {name: getattr(machine, name) for name in _BOUNDS}
    for name, bound in _BOUNDS.items():
        setattr(machine, name, bound)
    try:
        yield
    finally:
        for name, bound in kept.items():
            setattr(machine, name, bound)


@contextmanager
def _blaming(path: tuple[Call, ...]) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # whatever a machine raises where it must not is a finding
        steps = "".join(
            f"\n  {at}. {call.name} {'; '.join(map(str, call.spans))} {call.digests or ''}".rstrip()
            for at, call in enumerate(path, 1)
        )
        raise Violation(f"source attempt: {exc}\nafter{steps}") from exc
