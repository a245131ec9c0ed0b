"""Requests as the page keeps them: while they are open, and what they came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from headrace.messages import RequestHeld
from headrace.server import figures
from headrace.server.events import Answered, Arrived, ChoiceEnded
from headrace.server.page_drawing import draw
from headrace.server.page_state import (
    Drawing,
    EndedChoice,
    EndedRequest,
    OpenChoice,
    OpenRequest,
)
from headrace.telemetry.recording import Run

MAX_SHOWN_TEXT: Final = 400

HeldOf: TypeAlias = Callable[[str, int], RequestHeld | None]
"""What the last report of a decoder says of the request with a label."""

_INTERVAL_NBYTES: Final = 320  # of one in memory, but for its name

_PHASES: Final = {
    "waiting": "waiting",
    "parked": "parked",
    "reserved": "prefill",
    "streaming": "prefill",
    "sealed": "prefill",
    "published": "decoding",
    "draining": "draining",
    "ended": "ended",
}


@dataclass(slots=True)
class Choice:
    """A choice of a request: where it went, how far it is, what it came to.

    run: its intervals, while they are kept; nbytes: an estimate of what they take.
    """

    decoder: str = ""
    label: int = -1
    num_tokens: int = 0
    decoded_ns: int = 0
    result: EndedChoice | None = None
    run: Run | None = None
    nbytes: int = 0
    _drawing: Drawing | None = None

    def end(self, arrived: Arrived, event: ChoiceEnded, *, max_nbytes: int) -> None:
        """It ended; its intervals are kept if there are any, and no more than `max_nbytes`."""
        self.untrace()
        self.decoder, self.num_tokens = event.decoder, event.num_tokens
        nbytes = _nbytes(event)
        if 0 < nbytes <= max_nbytes:
            self.run, self.nbytes = _run(arrived, event), nbytes
        self.result = _result(arrived, event, traced=self.run is not None)

    def untrace(self) -> None:
        """Let go of its intervals."""
        self.run, self._drawing, self.nbytes = None, None, 0
        if self.result is not None:
            self.result = replace(self.result, traced=False)

    @property
    def is_drawn(self) -> bool:
        """Whether its swimlanes were made."""
        return self._drawing is not None

    def keep_drawing(self, drawing: Drawing, of: Run) -> None:
        """Keep what was drawn elsewhere, if its intervals are still those."""
        if self.run is of:
            self._drawing = drawing

    def drawing(self, request: int, number: int) -> Drawing | None:
        """Its swimlanes, made once; None without intervals."""
        if self._drawing is None and self.run is not None:
            self._drawing = draw(request, number, self.run)
        return self._drawing

    def open_state(self, number: int, held_of: HeldOf) -> OpenChoice:
        """What is shown of it before its request has a terminal."""
        held = held_of(self.decoder, self.label)
        total = 0 if held is None else held.nbytes_total
        imported = 0 if held is None else held.nbytes_imported
        return OpenChoice(
            choice=number,
            decoder=self.decoder,
            phase=self._phase(held),
            tokens=self.num_tokens,
            bytes_imported=total if self.num_tokens else imported,  # it is published
            bytes_total=total,
            tail_s=None if self.result is None else self.result.tail_s,
        )

    def _phase(self, held: RequestHeld | None) -> str:
        if self.result is not None:
            return "ended"
        if self.num_tokens:
            return "decoding"
        if not self.decoder:
            return "queued"
        return "waiting" if held is None else _PHASES.get(held.phase, held.phase)


class Undrawn(NamedTuple):
    """A choice whose swimlanes are to be made; `draw` is for any thread, `keep` for the loop's."""

    request: int
    number: int
    choice: Choice
    run: Run

    def draw(self) -> Drawing:
        """Its swimlanes."""
        return draw(self.request, self.number, self.run)

    def keep(self, drawing: Drawing) -> None:
        """Let the page have them."""
        self.choice.keep_drawing(drawing, self.run)


@dataclass(slots=True)
class Request:
    """A request and those of its choices of which something was told."""

    arrived: Arrived
    choices: dict[int, Choice] = field(default_factory=dict)
    first_token_ns: int = 0

    @property
    def number(self) -> int:
        return self.arrived.request

    @property
    def ttft_s(self) -> float | None:
        """From its admission to its first token."""
        at_ns = self.first_token_ns
        return (at_ns - self.arrived.at_ns) / 1e9 if at_ns else None

    def choice(self, number: int) -> Choice | None:
        """None for a choice that was never asked for."""
        if not 0 <= number < self.arrived.choices:
            return None
        return self.choices.setdefault(number, Choice())

    def numbered(self) -> list[tuple[int, Choice]]:
        """Its choices in order."""
        return sorted(self.choices.items())

    def runs(self) -> Iterator[Run]:
        """What there is of it for a trace file."""
        for number, choice in self.numbered():
            if choice.run is not None:
                of = f", choice {number}" if self.arrived.choices > 1 else ""
                yield replace(choice.run, name=f"request {self.number}{of}")

    def open_state(self, now_ns: int, held_of: HeldOf) -> OpenRequest:
        """What is shown of it before its terminal."""
        arrived = self.arrived
        never = Choice()
        return OpenRequest(
            request=arrived.request,
            label=arrived.label,
            endpoint=arrived.endpoint,
            model=arrived.model,
            route=arrived.route,
            prompt_tokens=arrived.num_prompt_tokens,
            max_tokens=arrived.max_tokens,
            stream=arrived.stream,
            age_s=_since(arrived.at_ns, now_ns),
            ttft_s=self.ttft_s,
            choices=tuple(
                self.choices.get(number, never).open_state(number, held_of)
                for number in range(arrived.choices)
            ),
        )


@dataclass(slots=True)
class Past:
    """A request that had its terminal."""

    request: Request
    answered: Answered

    def state(self, now_ns: int) -> EndedRequest:
        """What is shown of it."""
        arrived, answered = self.request.arrived, self.answered
        choices = [choice for _, choice in self.request.numbered()]
        return EndedRequest(
            request=arrived.request,
            label=arrived.label,
            endpoint=arrived.endpoint,
            model=arrived.model,
            prompt_tokens=arrived.num_prompt_tokens,
            terminal=answered.terminal.value,
            status=answered.status,
            in_stream=answered.in_stream,
            reason=answered.reason,
            ended_s=_since(answered.at_ns, now_ns),
            took_s=_since(arrived.at_ns, answered.at_ns),
            ttft_s=self.request.ttft_s,
            tokens=sum(choice.num_tokens for choice in choices),
            trace=any(choice.run is not None for choice in choices),
            choices=tuple(each.result for each in choices if each.result is not None),
        )


def short(text: str) -> str:
    """As much of a text as is kept of it."""
    return text if len(text) <= MAX_SHOWN_TEXT else f"{text[: MAX_SHOWN_TEXT - 3]}..."


def kept_of(arrived: Arrived) -> Arrived:
    """What is kept of it, in texts of bounded length."""
    texts = {"label": short(arrived.label), "model": short(arrived.model)}
    return replace(arrived, **texts, client="", traceparent="")


def _result(arrived: Arrived, event: ChoiceEnded, *, traced: bool) -> EndedChoice:
    ended = event.ended
    measured, reuse = ended.measured, ended.reuse
    tail_ns, moved = figures.tail_ns(event), figures.moved(event)
    return EndedChoice(
        choice=event.choice,
        decoder=event.decoder,
        outcome=ended.outcome,
        reason=short(ended.reason),
        cause=short(ended.cause),
        route=arrived.route if ended.choice is None else ended.choice.route,
        why="" if ended.choice is None else short(ended.choice.reason),
        tokens=event.num_tokens,
        cached_tokens=0 if reuse is None else reuse.positions,
        local=figures.computed_by_owner(event),
        tail_s=None if tail_ns is None else tail_ns / 1e9,
        alone_s=None if moved is None else moved.import_ns / 1e9,
        hidden_share=figures.hidden_share(event),
        bytes_before_prefill_end=None if moved is None else moved.nbytes_before_final,
        kv_bytes=None if measured is None else measured.kv_nbytes,
        attempts=1 + len(ended.attempts),
        traced=traced,
    )


def _run(arrived: Arrived, event: ChoiceEnded) -> Run:
    ended = event.ended
    route = arrived.route if ended.choice is None else ended.choice.route
    return Run(
        name=route,
        route=route,
        num_tokens=arrived.num_prompt_tokens,
        outcome=ended.outcome,
        source=event.source_intervals,
        owner=event.owner_intervals,
        measured=ended.measured,
        choice="" if ended.choice is None else ended.choice.reason,
        reason=ended.reason,
    )


def _nbytes(event: ChoiceEnded) -> int:
    intervals = (*event.source_intervals, *event.owner_intervals)
    return sum(_INTERVAL_NBYTES + len(each.name) for each in intervals)


def _since(begun_ns: int, ended_ns: int) -> float:
    return max(0, ended_ns - begun_ns) / 1e9
