"""What a server may tell, as events, for the tests of its page: a pair of a decoder and sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import replace

from headrace.ids import AttemptId
from headrace.messages import (
    Ended,
    Inspected,
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
from tests.unit.server.page_lanes import MS, Lanes, figures_of, parked, streamed, whole

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


def measured(at_ns: int = START, **more: int) -> Measured:
    """Of a hand-off that hid all but one of eight imports; its tail is 2 ms and T 16 ms."""
    facts = dict.fromkeys(Measured.__struct_fields__, 0) | {
        "submitted_ns": at_ns,
        "prefill_begun_ns": at_ns + 1 * MS,
        "source_final_ns": at_ns + 81 * MS,
        "published_ns": at_ns + 83 * MS,
        "first_token_ns": at_ns + 84 * MS,
        "kv_nbytes": 8_000_000,
        "nbytes_before_final": 7_000_000,
        "imports": 8,
        "import_ns": 16 * MS,
    }
    return Measured(**facts | more)


def served(
    request: int,
    at_ns: int = START,
    *,
    tokens: int = 4,
    lanes: Lanes | None = None,
    terminal: Terminal = Terminal.FINISHED,
    reason: str = "",
    choice: RouteChoice | None = None,
    **more: Any,
) -> Iterator[Event]:
    """All events of a request of one choice; without `lanes` it was not traced."""
    came = arrived(request, at_ns, **more)
    yield came
    yield Dispatched(at_ns + MS, request, 0, "cpu", request)
    finished = terminal is Terminal.FINISHED
    end = ended(request, outcome="finished" if finished else "failed", reason=reason, choice=choice)
    over_ns, num = at_ns + 90 * MS, 0
    if finished:
        figures = measured(at_ns) if lanes is None else figures_of(at_ns, lanes)
        end, num = replace(end, measured=figures), tokens
        first_ns = figures.first_token_ns
        for index in range(tokens):
            yield Decoded(first_ns + 30 * index * MS + index % 4 * MS, request, 0, index)
        over_ns = first_ns + 30 * tokens * MS
    source, owner = lanes or ((), ())
    yield ChoiceEnded(over_ns, request, 0, "cpu", num, end, source, owner)
    yield Answered(over_ns, request, terminal, STATUS[terminal], False, reason)


def traced(request: int, at_ns: int = START, **more: Any) -> Iterator[Event]:
    """The same of a streamed request with its intervals."""
    lanes = streamed(at_ns + 2 * MS, compute_ms=4 + request % 4)
    return served(request, at_ns, **{"lanes": lanes} | more)


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
    at = [START + (10 + 2 * number) * SECOND for number in range(7)]
    auto = RouteChoice("whole", 1, 0, "short prompt: streaming would save 0.4 ms of 3.1 ms")
    short: dict[str, Any] = {"choice": auto, "route": "auto", "num_prompt_tokens": 96}
    late: dict[str, Any] = {"terminal": Terminal.DEADLINE, "reason": "its deadline of 30 s passed"}
    yield from traced(1, at[1], tokens=45)
    yield from served(2, at[2], tokens=50, lanes=parked(at[2] + 2 * MS))
    yield from served(3, at[3], tokens=55, lanes=whole(at[3] + 2 * MS), **short)
    yield from traced(4, at[4], tokens=60)
    yield from served(5, at[5], lanes=streamed(at[5] + 2 * MS, until=11), **late)
    yield from traced(6, at[6], tokens=70)
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
    yield from served(7, START + 23 * SECOND, terminal=Terminal.SOURCE_DIED, reason=DEAD)
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
    whole = list(served(7, START + 23 * SECOND, terminal=Terminal.DEVICE, reason=LOST))
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
