"""What happened to one attempt, on both sides: kept as it comes, put into words when it is read.

Recording must not slow down what it records: it appends what is at hand, and the names and the
intervals of a trace are made when somebody asks for them.

What a device did is told by its own events where there are such, in place of the host's readings:
these would tell when it was asked to, and when somebody looked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from headrace.ids import Span
from headrace.messages import DeviceTimes, Interval, IntervalKind, Progress, SourceFinal
from headrace.telemetry.recording import LOCAL_GRANT as LOCAL_GRANT
from headrace.telemetry.recording import REMOTE_GRANT as REMOTE_GRANT
from headrace.telemetry.spans import name_of

Clock: TypeAlias = Literal["host", "device", "fake"]
What: TypeAlias = Span | tuple[Span, ...] | str


@dataclass(slots=True)
class Lanes:
    """The two lanes of one attempt's trace, empty unless the request asked for one.

    source: its messages, each with the bytes that it told. owner: (kind, what, begun ns, ended ns,
    bytes, when a device did it if it told), where `what` is a piece, the spans of a message, or
    words.
    """

    source: list[tuple[Progress | SourceFinal, int]] = field(default_factory=list)
    owner: list[tuple[IntervalKind, What, int, int, int, DeviceTimes | None]] = field(
        default_factory=list
    )

    def clear(self) -> None:
        """Another attempt begins."""
        self.source.clear()
        self.owner.clear()

    def source_intervals(self) -> Iterator[Interval]:
        """Computing, writing and telling of each message, and the final."""
        for message, nbytes in self.source:
            ready_ns = message.ready_ns
            if isinstance(message, SourceFinal):
                yield Interval("final", message.first, ready_ns, ready_ns, 0, "host")
                continue
            name, write_ns = _named(message.spans), message.write_ns
            yield _read("compute", name, message.begun_ns, write_ns, 0, message.computed)
            yield _read("write", name, write_ns, ready_ns, nbytes, message.copied)
            yield Interval("announced", name, ready_ns, ready_ns, nbytes, "host")

    def owner_intervals(self) -> Iterator[Interval]:
        """What the owner did, as it came to its end."""
        for kind, what, begun_ns, ended_ns, nbytes, ran in self.owner:
            yield _read(kind, _named(what), begun_ns, ended_ns, nbytes, ran)


def _read(
    kind: IntervalKind,
    name: str,
    begun_ns: int,
    ended_ns: int,
    nbytes: int,
    ran: DeviceTimes | None,
) -> Interval:
    if ran is None:
        return Interval(kind, name, begun_ns, ended_ns, nbytes, "host")
    clock: Clock = "device" if ran.kind == "real" else "fake"
    return Interval(kind, name, ran.begun_ns, ran.ended_ns, nbytes, clock, ran.error_ns)


def _named(what: What) -> str:
    if isinstance(what, str | Span):
        return str(what)
    return name_of(what)
