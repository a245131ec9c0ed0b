"""The requests that have not ended yet, folded from events: what metrics and spans look back at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.server.events import (
    Answered,
    Arrived,
    ChoiceEnded,
    Decoded,
    DecoderChanged,
    Dispatched,
    Event,
)

MAX_LINGERING: Final = 1024
"""Requests that were answered while an owner still had to end a choice of theirs: the client left.
An owner that never does must not fill the memory: the oldest are given up.
"""


@dataclass(slots=True)
class ChoiceRecord:
    """One choice since it was dispatched; times in ns, 0 until there is one."""

    dispatched: Dispatched
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_tokens: int = 0
    ended: ChoiceEnded | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request since it arrived. out: choices that an owner has and has not ended."""

    arrived: Arrived
    choices: dict[int, ChoiceRecord] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)
    first_token_ns: int = 0
    answered: Answered | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that came, of all choices."""
        return sum(choice.num_tokens for choice in self.choices.values())

    @property
    def num_intervals(self) -> int:
        """What was traced of it, of all choices."""
        ended = (choice.ended for choice in self.choices.values())
        return sum(
            len(each.source_intervals) + len(each.owner_intervals)
            for each in ended
            if each is not None
        )

    @property
    def over(self) -> bool:
        """Whether nothing more is to be heard of it."""
        return self.answered is not None and not self.out


class Ongoing:
    """All requests from their arrival until they were answered and each choice has its end."""

    def __init__(self) -> None:
        self._records: dict[int, RequestRecord] = {}
        self._lingering: dict[int, None] = {}  # answered, and not over; oldest first

    def __len__(self) -> int:
        return len(self._records)

    def of(self, request: int) -> RequestRecord | None:
        """What is known of a request; None of one that never arrived, or is over."""
        return self._records.get(request)

    def take(self, event: Event) -> list[RequestRecord]:
        """Fold one event in; the requests that are over with it are returned, and forgotten."""
        match event:
            case Arrived():
                self._records[event.request] = RequestRecord(event)
                return []
            case DecoderChanged():
                return [] if event.state == "ready" else self._lost(event.decoder)
            case Dispatched() | Decoded() | ChoiceEnded() | Answered():
                record = self._records.get(event.request)
                if record is None:
                    return []
                self._fold(record, event)
                return self._settled([record])
            case _:
                return []

    def give_up(self) -> list[RequestRecord]:
        """Forget all; those that were answered are returned."""
        answered = [self._records[request] for request in self._lingering]
        self._records.clear()
        self._lingering.clear()
        return answered

    def _fold(
        self, record: RequestRecord, event: Dispatched | Decoded | ChoiceEnded | Answered
    ) -> None:
        if isinstance(event, Answered):
            record.answered = event
            self._lingering[event.request] = None
        elif isinstance(event, Dispatched):
            record.choices[event.choice] = ChoiceRecord(event)
            record.out.add(event.choice)
        elif event.choice in record.choices:
            choice = record.choices[event.choice]
            if isinstance(event, ChoiceEnded):
                choice.ended = event
                record.out.discard(event.choice)
            else:
                choice.num_tokens += 1
                choice.first_token_ns = choice.first_token_ns or event.at_ns
                choice.last_token_ns = event.at_ns
                record.first_token_ns = record.first_token_ns or event.at_ns

    def _lost(self, decoder: str) -> list[RequestRecord]:
        """The owner of a decoder is gone, and ends nothing any more."""
        touched = []
        for record in self._records.values():
            gone = {n for n in record.out if record.choices[n].dispatched.decoder == decoder}
            if gone:
                record.out -= gone
                touched.append(record)
        return self._settled(touched)

    def _settled(self, touched: list[RequestRecord]) -> list[RequestRecord]:
        over = [record for record in touched if record.over]
        for record in over:
            self._forget(record)
        while len(self._lingering) > MAX_LINGERING:
            oldest = self._records[next(iter(self._lingering))]
            self._forget(oldest)
            over.append(oldest)
        return over

    def _forget(self, record: RequestRecord) -> None:
        del self._records[record.arrived.request]
        self._lingering.pop(record.arrived.request, None)
