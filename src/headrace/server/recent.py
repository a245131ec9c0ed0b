"""What the page shows: a fold over the server's events, bounded in number and in bytes.

It does no I/O and reads no clock. Whatever is told, and whatever is left untold, it keeps at most
`MAX_OPEN` open requests, as many ended ones as it was told to, of these `MAX_CHOICES` choices and
`MAX_TRACED_NBYTES` of intervals, and samples, seconds and reasons of a fixed number. The oldest go
first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from msgspec.structs import replace

from headrace.messages import RequestHeld
from headrace.server.config import PageConfig
from headrace.server.events import (
    Answered,
    Arrived,
    ChoiceEnded,
    Decoded,
    DecoderChanged,
    Dispatched,
    Event,
    Looked,
    QueueChanged,
    Rejected,
)
from headrace.server.page_decoders import OTHER, Decoder, Notes, bounded_add
from headrace.server.page_rates import SECOND_NS, PerSecond, Window
from headrace.server.page_requests import Choice, Past, Request, Undrawn, kept_of, short
from headrace.server.page_state import (
    CLOCK,
    VERSION,
    Drawing,
    Fault,
    PageState,
    QueueState,
    Rates,
)
from headrace.server.terminals import Terminal
from headrace.telemetry.recording import Recording, Stamp

MAX_OPEN: Final = 4096
MAX_CHOICES: Final = 4096
MAX_DECODERS: Final = 256
MAX_SHOWN_OPEN: Final = 200
MAX_DRAWN: Final = 8
MAX_TRACED_NBYTES: Final = 32 << 20
MAX_TRACE_NBYTES: Final = 16 << 20
"""Of the intervals of one request, estimated; a choice that exceeds it is not kept for a trace."""

_RATE_S: Final = 10
_HISTORY_S: Final = 60
_TTFTS, _TOKENS = 1024, 8192  # samples
_MEDIAN_NS: Final = 300 * SECOND_NS

_KINDS: Final = ("quarantined", "ended", "rejected", "restarts", "retries", "dropped")


class Recent:
    """Listens to `Events` and tells what the page shows."""

    def __init__(
        self,
        page: PageConfig,
        *,
        stamp: Stamp | None = None,
        notes: Notes | None = None,
        max_traced_nbytes: int = MAX_TRACED_NBYTES,
    ) -> None:
        """`stamp` goes into trace files. `notes`: see `page_decoders.Notes`."""
        self._kept = page.recent
        self._stamp: Stamp = dict(stamp or {})
        self._notes: Notes = dict(notes or {})
        self._max_traced_nbytes = max_traced_nbytes
        self._traced_nbytes = 0
        self._since_ns: int | None = None
        self._open: OrderedDict[int, Request] = OrderedDict()
        self._past: OrderedDict[int, Past] = OrderedDict()
        self._num_past_choices = 0
        self._labels: dict[tuple[str, int], int] = {}
        self._decoders: dict[str, Decoder] = {}
        self._queue = QueueState(waiting=0, nbytes=0)
        self._failed: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._tokens = PerSecond(_HISTORY_S)
        self._answers = PerSecond(_RATE_S)
        self._ttft = Window(_TTFTS, _MEDIAN_NS)
        self._token = Window(_TOKENS, _MEDIAN_NS)

    def __call__(self, event: Event) -> None:
        """Take an event in; for `Events.listen`."""
        if self._since_ns is None:
            self._since_ns = event.at_ns
        match event:
            case Arrived():
                self._arrived(event)
            case Dispatched():
                self._dispatched(event)
            case Decoded():
                self._decoded(event)
            case ChoiceEnded():
                self._choice_ended(event)
            case Answered():
                self._answered(event)
            case Rejected():
                bounded_add(self._rejected, event.terminal.value)
            case QueueChanged():
                self._queue = QueueState(waiting=event.waiting, nbytes=event.nbytes)
            case DecoderChanged() | Looked():
                self._of_decoder(event)

    @property
    def traced_nbytes(self) -> int:
        """An estimate of what the kept intervals take."""
        return self._traced_nbytes

    def snapshot(self, now_ns: int) -> PageState:
        """What is shown at `now_ns`, on the clock of the events."""
        since_ns = now_ns if self._since_ns is None else self._since_ns
        shown = list(reversed(self._open.values()))[:MAX_SHOWN_OPEN]
        decoders = self._decoders.values()
        return PageState(
            version=VERSION,
            now_ns=now_ns,
            up_s=(now_ns - since_ns) / 1e9,
            clock=CLOCK,
            rates=Rates(
                tokens_per_s=self._tokens.rate(now_ns, _RATE_S, since_ns),
                requests_per_s=self._answers.rate(now_ns, _RATE_S, since_ns),
                window_s=_RATE_S,
                history=self._tokens.history(now_ns),
                ttft=self._ttft.median(now_ns),
                token=self._token.median(now_ns),
            ),
            queue=self._queue,
            decoders=tuple(each.state(now_ns, self._notes) for each in decoders),
            num_open=len(self._open),
            recent=self._kept,
            open=tuple(each.open_state(now_ns, self._held) for each in shown),
            ended=tuple(past.state(now_ns) for past in reversed(self._past.values())),
            drawings=tuple(self._drawings()),
            faults=tuple(self._faults()),
        )

    def recording_of(self, request: int) -> Recording | None:
        """What a trace file of it holds, a run per choice; None if not kept."""
        found = self._find(request)
        runs = () if found is None else tuple(found.runs())
        return Recording(runs=runs, stamp=self._stamp) if runs else None

    def undrawn(self) -> list[Undrawn]:
        """What a snapshot shows and has to draw first: whoever must not wait has it drawn apart."""
        return [
            Undrawn(number, index, choice, choice.run)
            for number, index, choice in self._drawn()
            if choice.run is not None and not choice.is_drawn
        ]

    # Events.

    def _arrived(self, event: Arrived) -> None:
        self._open[event.request] = Request(kept_of(event))
        if len(self._open) > MAX_OPEN:
            self._forget(self._open.popitem(last=False)[1])

    def _dispatched(self, event: Dispatched) -> None:
        choice = self._open_choice(event.request, event.choice)
        if choice is not None:
            self._unlabel(event.request, choice)  # it is tried once more
            choice.decoder, choice.label = event.decoder, event.label
            self._labels[event.decoder, event.label] = event.request

    def _decoded(self, event: Decoded) -> None:
        self._tokens.add(event.at_ns)
        choice = self._open_choice(event.request, event.choice)
        if choice is None:
            return
        request = self._open[event.request]
        if not request.first_token_ns:
            request.first_token_ns = event.at_ns
            self._ttft.add(event.at_ns, event.at_ns - request.arrived.at_ns)
        if choice.num_tokens:
            self._token.add(event.at_ns, event.at_ns - choice.decoded_ns)
        choice.num_tokens, choice.decoded_ns = event.index + 1, event.at_ns

    def _choice_ended(self, event: ChoiceEnded) -> None:
        request = self._find(event.request)
        choice = None if request is None else request.choice(event.choice)
        if request is None or choice is None:
            return
        self._unlabel(event.request, choice)
        self._traced_nbytes -= choice.nbytes
        others = sum(each.nbytes for each in request.choices.values() if each is not choice)
        room = MAX_TRACE_NBYTES - others if self._kept > 0 else 0
        choice.end(request.arrived, event, max_nbytes=room)
        self._traced_nbytes += choice.nbytes
        if self._traced_nbytes > self._max_traced_nbytes:
            self._trim()

    def _answered(self, event: Answered) -> None:
        self._answers.add(event.at_ns)
        if event.terminal is not Terminal.FINISHED:
            bounded_add(self._failed, event.terminal.value)
        request = self._open.pop(event.request, None)
        if request is None:
            return
        self._past[event.request] = Past(request, replace(event, reason=short(event.reason)))
        self._num_past_choices += request.arrived.choices
        while len(self._past) > self._kept or self._num_past_choices > MAX_CHOICES:
            oldest = self._past.popitem(last=False)[1].request
            self._num_past_choices -= oldest.arrived.choices
            self._forget(oldest)

    def _of_decoder(self, event: DecoderChanged | Looked) -> None:
        name = event.decoder
        if name not in self._decoders:
            if len(self._decoders) >= MAX_DECODERS:
                return
            self._decoders[name] = Decoder(name, self._request_of)
        if isinstance(event, Looked):
            self._decoders[name].looked(event)
        else:
            self._decoders[name].changed(replace(event, reason=short(event.reason)))

    # What is kept.

    def _find(self, request: int) -> Request | None:
        past = self._past.get(request)
        return self._open.get(request) if past is None else past.request

    def _open_choice(self, request: int, number: int) -> Choice | None:
        found = self._open.get(request)
        return None if found is None else found.choice(number)

    def _held(self, decoder: str, label: int) -> RequestHeld | None:
        found = self._decoders.get(decoder)
        return None if found is None else found.held(label)

    def _request_of(self, decoder: str, label: int) -> int | None:
        return self._labels.get((decoder, label))

    def _unlabel(self, request: int, choice: Choice) -> None:
        """Its label may be another's by now: an owner that is started again counts anew."""
        if self._labels.get((choice.decoder, choice.label)) == request:
            del self._labels[choice.decoder, choice.label]

    def _forget(self, request: Request) -> None:
        for choice in request.choices.values():
            self._unlabel(request.number, choice)
            self._traced_nbytes -= choice.nbytes

    def _trim(self) -> None:
        """Let go of the intervals of the oldest until the rest is within its bound."""
        past = (each.request for each in self._past.values())
        for request in (*past, *self._open.values()):
            for choice in request.choices.values():
                if self._traced_nbytes <= self._max_traced_nbytes:
                    return
                if choice.run is not None:
                    self._traced_nbytes -= choice.nbytes
                    choice.untrace()

    # What is shown.

    def _drawings(self) -> Iterator[Drawing]:
        for request, number, choice in self._drawn():
            drawing = choice.drawing(request, number)
            if drawing is not None:
                yield drawing

    def _drawn(self) -> Iterator[tuple[int, int, Choice]]:
        """The latest choices that have intervals."""
        traced = (
            (past.request.number, number, choice)
            for past in reversed(self._past.values())
            for number, choice in past.request.numbered()
            if choice.run is not None
        )
        return islice(traced, MAX_DRAWN)

    def _faults(self) -> Iterator[Fault]:
        found = {"ended": Counter(self._failed), "rejected": Counter(self._rejected)}
        for decoder in self._decoders.values():
            for kind, counts in decoder.faults().items():
                into = found.setdefault(kind, Counter())
                for reason, count in counts.items():
                    bounded_add(into, short(reason), count)
        for kind in _KINDS:
            counts = found.get(kind, Counter())
            for reason, count in sorted(counts.items(), key=lambda it: (it[0] == OTHER, -it[1])):
                yield Fault(kind=kind, reason=reason, count=count)
