"""Messages that no source may send: real ones with one thing wrong in them.

Left out is what only a hostile source would do: give back a write token that it keeps, or tell of
cells that it did not write as if it had (that is a fault of bytes, which digests show).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.errors import RemoteProtocolError
from headrace.ids import AttemptId, Span
from headrace.messages import (
    Computing,
    Failed,
    FromSource,
    Incompatible,
    Progress,
    Released,
    SourceFinal,
    decode_from_source,
    encode,
)
from headrace.plan import Plan
from headrace.testing.fault_lab.choices import Stream
from headrace.testing.fault_lab.setting import MAX_PROGRESS

Identity = tuple[AttemptId, int, int]  # attempt, slot, generation of a grant

_HUGE: Final = (1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
_NOT_COUNTS: Final[tuple[Any, ...]] = (-1, True, None, 1.5, "1", [])
_NEVER_VALID: Final = b"\xc1"  # a byte that msgpack does not use


def forged(stream: Stream, message: FromSource, grants: Sequence[Identity]) -> bytes:
    """The bytes of `message` with one thing wrong."""
    fields = msgspec.to_builtins(message)
    tag, identity, rest = fields[0], fields[1:4], fields[4:]
    match stream.below(10):
        case 0:
            identity[2] = stream.pick((identity[2] + 1, max(0, identity[2] - 1), *_HUGE))
        case 1:
            identity[1] = stream.pick((identity[1] + 1, 99, *_HUGE))
        case 2:
            identity[0] = _other_attempt(stream, identity[0])
        case 3 | 8 if others := [g for g in grants[-4:] if list(g[0]) != list(identity[0])]:
            attempt, slot, generation = stream.pick(others)
            identity = [list(attempt), slot, generation]
        case 4:
            at = stream.below(3)
            identity[at] = stream.pick(_NOT_COUNTS)
        case 5:
            return encode(Incompatible("manifest", "no such thing"))
        case _:
            rest = _wrong_rest(stream, message, rest)
    return msgspec.msgpack.encode([tag, *identity, *rest])


def flood(message: FromSource, plan: Plan) -> list[Progress]:
    """More progress without cells than an attempt may send, where the plan has such spans."""
    if not isinstance(message, Progress | Computing | SourceFinal | Released):
        return []
    empty = _empty_span(plan)
    identity = message.attempt, message.slot, message.generation
    return [Progress(*identity, (empty,), (), 0, 0, 0)] * MAX_PROGRESS if empty else []


def misplaced(stream: Stream, message: FromSource, plan: Plan) -> FromSource:
    """What may not follow on `message`, or not yet."""
    if not isinstance(message, Computing | Progress | SourceFinal | Failed | Released):
        return message
    identity = message.attempt, message.slot, message.generation
    after: list[FromSource] = [Computing(*identity), message, Failed(*identity, "misplaced")]
    if isinstance(message, SourceFinal):  # before it, cells may still be unwritten
        after.append(Progress(*identity, (_empty_span(plan) or Span(0, 1, 0, 1),), (), 0, 0, 0))
    return stream.pick(after)


def _empty_span(plan: Plan) -> Span | None:
    """A span that holds no cell of the plan."""
    layers = (Span(at, at + 1, 0, 1) for at, (lo, _) in enumerate(plan.windows) if lo > 0)
    return next(layers, None)


def garbled(stream: Stream, payload: bytes) -> bytes:
    """`payload` with one byte changed so that it is no message any more."""
    at = stream.below(len(payload))
    changed = payload[:at] + bytes([stream.below(256)]) + payload[at + 1 :]
    try:
        decode_from_source(changed)
    except RemoteProtocolError:
        return changed
    return _NEVER_VALID + changed[1:]


def _other_attempt(stream: Stream, attempt: list[int]) -> list[int]:
    epoch, counter, number = attempt
    others = (
        [epoch, counter, number + 1],
        [epoch, counter, 0],
        [epoch - 1, counter, number],
        [epoch, counter + 50, number],
        [epoch, counter, 1 << 63],
    )
    return stream.pick(others)


def _wrong_rest(stream: Stream, message: FromSource, rest: list[Any]) -> list[Any]:
    match message:
        case Progress(spans=spans):
            told, digests, *times = rest
            match stream.below(6):
                case 0:
                    told = [*told, _odd_span(stream, spans[-1])]
                    digests = [*digests, *digests[-1:]]
                case 1:
                    told, digests = [*told, told[0]], [*digests, *digests[:1]]
                case 2:
                    told, digests = told * 65, digests * 65
                case 3:
                    digests = digests[1:]
                case 4:
                    digests = [*(digests or [1] * len(told)), stream.pick((0, *_HUGE))]
                case _:
                    digests = [value ^ 1 for value in digests] or [1] * len(told)
            return [told, digests, *times]
        case SourceFinal(first=first):
            _, token, *times = rest
            if stream.below(2):
                return ["token", 1 << 40, *times]
            return ["logits" if first == "token" else "token", token, *times]
        case _:
            return [*rest, stream.pick(_NOT_COUNTS)]


def _odd_span(stream: Stream, span: Span) -> list[Any]:
    a, b, p, q = span
    odd: tuple[list[Any], ...] = (
        [a, b, p, 1 << 40],
        [a, 600, p, q],
        [a, b, q, q],
        [b, a, p, q],
        [a, b, q, p],
        [-1, b, p, q],
        [a, b, -1, q],
        [a, b, 1 << 63, (1 << 63) + 1],
        [True, b, p, q],
        [a, b, p],
    )
    return stream.pick(odd)
