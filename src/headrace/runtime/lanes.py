"""What happened to one attempt, on both sides: kept as it comes, put into words when it is read.

Recording must not slow down what it records: it appends what is at hand, and the names and the
intervals of a trace are made when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.ids import Span
from headrace.messages import Interval, IntervalKind, Progress, SourceFinal
from headrace.telemetry.recording import LOCAL_GRANT as LOCAL_GRANT
from headrace.telemetry.recording import REMOTE_GRANT as REMOTE_GRANT
from headrace.telemetry.spans import name_of


@dataclass(slots=True)
class Lanes:
    """The two lanes of one attempt's trace, empty unless the request asked for one.

    source: its messages, each with the bytes that it told. owner: (kind, what, begun ns, ended ns,
    bytes), where `what` is a piece, the spans of a message, or words.
    """

    source: list[tuple[Progress | SourceFinal, int]] = field(default_factory=list)
    owner: list[tuple[IntervalKind, Span | tuple[Span, ...] | str, int, int, int]] = field(
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
            yield Interval("compute", name, message.begun_ns, write_ns, 0, "host")
            yield Interval("write", name, write_ns, ready_ns, nbytes, "host")
            yield Interval("announced", name, ready_ns, ready_ns, nbytes, "host")

    def owner_intervals(self) -> Iterator[Interval]:
        """What the owner did, as it came to its end."""
        for kind, what, begun_ns, ended_ns, nbytes in self.owner:
            yield Interval(kind, _named(what), begun_ns, ended_ns, nbytes, "host")


def _named(what: Span | tuple[Span, ...] | str) -> str:
    if isinstance(what, str | Span):
        return str(what)
    return name_of(what)
