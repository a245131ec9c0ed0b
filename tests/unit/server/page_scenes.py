"""What a server may tell, as events, for the tests of its page: a pair of a decoder and sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import replace

from headrace.ids import AttemptId, Span
from headrace.messages import (
    Ended,
    Inspected,
    Interval,
    IntervalKind,
    LaneHeld,
    Measured,
    Quarantined,
    RequestHeld,
    RouteChoice,
    SlotHeld,
    SourceHeld,
)
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
from headrace.server.terminals import STATUS, Terminal

MS: Final = 1_000_000
SECOND: Final = 1_000 * MS
START: Final = 1_000 * SECOND
EPOCH: Final = 0x6F2A

DEAD: Final = "source rngd (pid 4127) died: signal 9; the 5th failure within 60 s"
LOST: Final = "the device did not say that its copy ended: its queue hangs"


def arrived(request: int, at_ns: int = START, **more: Any) -> Arrived:
    """A streamed completion of 512 prompt positions."""
    facts: dict[str, Any] = {
        "at_ns": at_ns,
        "request": request,
        "client": "127.0.0.1",
        "label": f"job-{request}",
        "traceparent": "",
        "endpoint": "completions",
        "model": "gemma3-270m",
        "num_prompt_tokens": 512,
        "max_tokens": 64,
        "choices": 1,
        "route": "streamed",
        "stream": True,
    }
    return Arrived(**facts | more)


def attempt(label: int) -> AttemptId:
    """The attempt of the request with this label at its owner."""
    return AttemptId(EPOCH, label, 1)


def ended(label: int, **more: Any) -> Ended:
    """An end of nothing that was measured."""
    facts: dict[str, Any] = {
        "label": label,
        "outcome": "finished",
        "reason": "",
        "mistake": "",
        "measured": None,
        "logits_digest": "",
        "kv_digests": (),
        "cause": "",
        "attempts": (),
        "choice": None,
    }
    return Ended(**facts | more)


def measured(**more: int) -> Measured:
    """Of a hand-off that hid all but one of eight imports."""
    facts = dict.fromkeys(Measured.__struct_fields__, 0) | {
        "submitted_ns": START,
        "prefill_begun_ns": START + 1 * MS,
        "source_final_ns": START + 81 * MS,
        "published_ns": START + 83 * MS,
        "first_token_ns": START + 84 * MS,
        "kv_nbytes": 8_000_000,
        "nbytes_before_final": 7_000_000,
        "import_ns": 16 * MS,
    }
    return Measured(**facts | more)


def lanes_of(
    begun_ns: int, layers: int = 18, *, compute_ms: float = 6.0, import_ms: float = 2.2
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """The intervals of a source and an owner, a layer group per layer, with steps of neighbours.

    Below 18 layers it is cut short: nothing is published.
    """
    source: list[Interval] = []
    owner = [_interval("granted", "prefill", begun_ns, begun_ns)]
    at, free = begun_ns + MS, begun_ns
    for layer in range(layers):
        name = str(Span(layer, layer + 1, 0, 512))
        computed = at + int(compute_ms * MS * (1 + 0.25 * ((layer * 7) % 5 - 2) / 2))
        wrote = computed + int(0.9 * MS)
        source += [
            _interval("compute", name, at, computed),
            _interval("write", name, computed, wrote, 444_444),
            _interval("announced", name, wrote, wrote, 444_444),
        ]
        heard = wrote + MS // 20
        owner.append(_interval("validated", name, heard, heard, 444_444))
        if layer % 3 == 1:
            step = max(free, heard), max(free, heard) + int(3.4 * MS)
            owner.append(_interval("neighbour", "decode step of others", *step))
            free = step[1]
        begun = max(heard, free)
        free = begun + int(import_ms * MS)
        owner.append(_interval("import", name, begun, free, 444_444))
        at = wrote
    if layers < 18:
        owner.append(_interval("ended", "failed: deadline", free, free))
        return tuple(source), tuple(owner)
    source.append(_interval("final", "logits", at, at))
    published = max(free, at) + MS // 2
    owner += [
        _interval("published", "entry", published, published),
        _interval("first_token", "token", published + MS, published + MS),
        _interval("decode", "first decode step", published + MS, published + 7 * MS),
        _interval("ended", "finished", published + 8 * MS, published + 8 * MS),
    ]
    return tuple(source), tuple(owner)


def whole_lanes(begun_ns: int) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """The same on the whole route: computed and written at once, then imported in three pieces."""
    name = str(Span(0, 18, 0, 96))
    computed, wrote = begun_ns + 22 * MS, begun_ns + 24 * MS
    source = (
        _interval("compute", name, begun_ns + MS, computed),
        _interval("write", name, computed, wrote, 1_500_000),
        _interval("announced", name, wrote, wrote, 1_500_000),
        _interval("final", "logits", computed, computed),
    )
    pieces = [
        _interval("import", str(Span(6 * n, 6 * n + 6, 0, 96)), wrote + n * MS, wrote + n * MS + MS)
        for n in range(3)
    ]
    over = wrote + 4 * MS
    owner = (
        _interval("granted", "prefill", begun_ns, begun_ns),
        _interval("validated", name, wrote, wrote, 1_500_000),
        *pieces,
        _interval("published", "entry", over, over),
        _interval("first_token", "token", over + MS, over + MS),
        _interval("decode", "first decode step", over + MS, over + 7 * MS),
    )
    return source, owner


def _interval(kind: IntervalKind, name: str, begun: int, over: int, nbytes: int = 0) -> Interval:
    return Interval(kind, name=name, begun_ns=begun, ended_ns=over, nbytes=nbytes, clock="host")


def served(
    request: int,
    at_ns: int = START,
    *,
    tokens: int = 4,
    terminal: Terminal = Terminal.FINISHED,
    traced: bool = True,
    reason: str = "",
    choice: RouteChoice | None = None,
    **more: Any,
) -> Iterator[Event]:
    """All events of a request of one choice, from its arrival to its terminal."""
    came = arrived(request, at_ns, **more)
    yield came
    yield Dispatched(at_ns + MS, request, 0, "cpu", request)
    source, owner = _lanes(request, at_ns + 2 * MS, terminal, choice) if traced else ((), ())
    first_ns = next((e.begun_ns for e in owner if e.kind == "first_token"), at_ns + 90 * MS)
    final_ns = next((e.begun_ns for e in source if e.kind == "final"), at_ns + 80 * MS)
    finished = terminal is Terminal.FINISHED
    for index in range(tokens if finished else 0):
        yield Decoded(first_ns + 30 * index * MS + index % 4 * MS, request, 0, index)
    over_ns = first_ns + 30 * tokens * MS
    figures = measured(
        submitted_ns=at_ns, source_final_ns=final_ns, published_ns=first_ns - MS,
        first_token_ns=first_ns, import_ns=3 * MS if choice is not None else 40 * MS,
        nbytes_before_final=0 if choice is not None else 7_600_000,
        kv_nbytes=1_500_000 if choice is not None else 8_000_000,
    )  # fmt: skip
    outcome = "finished" if finished else "failed"
    end = ended(request, outcome=outcome, reason=reason, choice=choice)
    end = replace(end, measured=figures) if finished else end
    num = tokens if finished else 0
    yield ChoiceEnded(over_ns, request, 0, "cpu", num, end, source, owner)
    yield Answered(over_ns, request, terminal, STATUS[terminal], False, reason)


def _lanes(
    request: int, begun_ns: int, terminal: Terminal, choice: RouteChoice | None
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    if choice is not None and choice.route == "whole":
        return whole_lanes(begun_ns)
    layers = 18 if terminal is Terminal.FINISHED else 11
    return lanes_of(begun_ns, layers, compute_ms=4 + request % 4)


def held_request(label: int, phase: str, **more: int) -> RequestHeld:
    """What an owner says of a request."""
    facts = {"num_tokens": 512, "num_generated": 0, "nbytes_imported": 0, "nbytes_total": 8_000_000}
    facts |= {"submitted_ns": START, **more}
    return RequestHeld(label=label, attempt=attempt(label), phase=phase, **facts)


def slot(source: int, number: int, state: str = "free", label: int | None = None) -> SlotHeld:
    """A slot, with a write token out while it is leased."""
    tokens = {"leased": ("write",), "reading": ("read 1",), "quarantined": ("write",)}
    holder = None if label is None else attempt(label)
    for_ns = 41 * SECOND if state == "quarantined" else 0
    return SlotHeld(source, number, 3 + number, state, holder, tokens.get(state, ()), for_ns)


def source(number: int, name: str, **more: Any) -> SourceHeld:
    """A source in service."""
    facts = {"state": "in service", "reason": "", "pid": 4100 + number, "restarts": 0, **more}
    return SourceHeld(source=number, name=name, **facts)


def report(**more: Any) -> Inspected:
    """Of an owner that holds nothing, with two sources of two slots each and four lanes."""
    facts: dict[str, Any] = {
        "statistics": (("ended", "published", 3), ("restarts", "serving", 2)),
        "quarantined": (),
        "context": 2048,
        "lanes_free": 4,
        "lanes": (),
        "slots": (slot(0, 0), slot(0, 1), slot(1, 0), slot(1, 1)),
        "sources": (source(0, "torch"), source(1, "rngd")),
        "requests": (),
    }
    return Inspected(**facts | more)


def ready(at_ns: int = START, name: str = "cpu", incarnation: int = 0) -> DecoderChanged:
    """A decoder whose owner serves."""
    return DecoderChanged(at_ns, name, "ready", "", incarnation, 4090)


def looked(at_ns: int, told: Inspected, incarnation: int = 0) -> Looked:
    """What the owner of the decoder told."""
    return Looked(at_ns, "cpu", incarnation, told)


def empty() -> Iterator[Event]:
    """A server that has just come up."""
    yield DecoderChanged(START, "cpu", "starting", "", 0, 4090)
    yield ready(START + SECOND)
    yield looked(START + 26 * SECOND, report())


def busy() -> Iterator[Event]:
    """Six requests were served, six are open, two were turned away."""
    yield from empty()
    auto = RouteChoice(
        "whole", 1, 0, "short prompt: streaming would save 0.4 ms of 3.1 ms"
    )  # fmt: skip
    for number in range(1, 7):
        more: dict[str, Any] = {}
        if number == 3:
            more = {"choice": auto, "route": "auto", "num_prompt_tokens": 96}
        if number == 5:
            more = {"terminal": Terminal.DEADLINE, "reason": "its deadline of 30 s passed"}
        tokens = 40 + 5 * number
        yield from served(number, START + (10 + 2 * number) * SECOND, tokens=tokens, **more)
    for _ in range(2):
        yield Rejected(START + 24 * SECOND, "chat", Terminal.QUEUE_FULL, 429, "queue full")
    now = START + 26 * SECOND
    for number, label in enumerate(range(11, 17)):
        yield arrived(label, now - (6 - number) * SECOND // 2, label=f"batch/{label}")
        if label < 16:
            yield Dispatched(now - SECOND // 4, label, 0, "cpu", label)
    for step in range(24):
        yield Decoded(now - SECOND // 4 + step * 9 * MS, 11, 0, step)
    yield QueueChanged(now, 1, 2048)
    yield looked(now, busy_report())


def busy_report() -> Inspected:
    """One decodes, two are prefilled, one is parked, one waits."""
    return report(
        statistics=(("dropped", "late", 3), ("retries", "count", 1)),
        lanes_free=1,
        lanes=tuple(
            LaneHeld(attempt(label), state, "", 0)
            for label, state in ((11, "published"), (12, "reserved"), (13, "reserved"))
        ),
        slots=(
            slot(0, 0, "reading", 12), slot(0, 1, "ready", 14), slot(1, 0, "leased", 13),
            slot(1, 1, "draining", 11),
        ),
        requests=(
            held_request(11, "published", num_generated=24, nbytes_imported=8_000_000),
            held_request(12, "streaming", nbytes_imported=5_300_000),
            held_request(13, "reserved", nbytes_imported=900_000),
            held_request(14, "parked"),
            held_request(15, "waiting", nbytes_total=0),
        ),
    )  # fmt: skip


def failed_source() -> Iterator[Event]:
    """The source rngd died again and again, and is set aside; the other serves."""
    yield from busy()
    told = busy_report()
    aside = source(1, "rngd", state="set aside", reason=DEAD, pid=0, restarts=4)
    statistics = (("restarts", "restarted", 4), ("restarts", "set_aside", 1))
    yield from served(
        7, START + 23 * SECOND, terminal=Terminal.SOURCE_DIED, traced=False, reason=DEAD
    )
    yield looked(
        START + 26 * SECOND,
        replace(
            told,
            statistics=statistics,
            sources=(told.sources[0], aside),
            slots=told.slots[:2],
            lanes=told.lanes[:2],
            lanes_free=2,
        ),
    )


def quarantined() -> Iterator[Event]:
    """A slot and a lane are out of service, since a device did not tell that a copy ended."""
    yield from busy()
    told = busy_report()
    reserved = LaneHeld(attempt(7), "quarantined", LOST, 41 * SECOND)
    whole = list(
        served(7, START + 23 * SECOND, terminal=Terminal.DEVICE, traced=False, reason=LOST)
    )
    yield from whole[:2]
    yield looked(START + 23 * SECOND, report(requests=(held_request(7, "streaming"),)))
    yield from whole[2:]
    yield looked(
        START + 26 * SECOND,
        replace(
            told,
            quarantined=(Quarantined(attempt(7), LOST, 41 * SECOND),),
            lanes=(*told.lanes, reserved),
            lanes_free=0,
            slots=(*told.slots[:3], slot(1, 1, "quarantined", 7)),
        ),
    )
