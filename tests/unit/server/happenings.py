"""Events of a server for the tests of what listens to it, made from a few facts; times in ms."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from headrace.ids import AttemptId
from headrace.messages import (
    Ended,
    Inspected,
    LaneHeld,
    Measured,
    Reuse,
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
    Served,
)
from headrace.server.metrics import Metrics
from headrace.server.terminals import STATUS, Terminal
from tests.unit.telemetry import scenes

MS = 1_000_000
MODEL, DECODER, SOURCE = "smollm2-135m", "left", "torch"
PREDICTED = "streamed by 2 layers: predicted 1.000 ms against 2.000 ms whole"


def metrics() -> Metrics:
    return Metrics([MODEL], {DECODER: [SOURCE, "torch-2"], "right": ["replay"]})


def arrived(request: int = 1, at_ms: float = 0, **more: Any) -> Arrived:
    event = Arrived(
        at_ns=int(at_ms * MS),
        request=request,
        client="127.0.0.1",
        label="",
        traceparent="",
        endpoint="chat",
        model=MODEL,
        num_prompt_tokens=100,
        max_tokens=3,
        choices=1,
        route="streamed",
        stream=True,
    )
    return replace(event, **more)


def dispatched(request: int = 1, at_ms: float = 10, choice: int = 0) -> Dispatched:
    return Dispatched(int(at_ms * MS), request, choice, DECODER, request)


def decoded(at_ms: float, index: int = 0, request: int = 1, choice: int = 0) -> Decoded:
    return Decoded(int(at_ms * MS), request, choice, index)


def measured(**more: int) -> Measured:
    """10 MiB in 10 groups: the tail is 10 ms and the imports take 100 ms; 9 MiB came early."""
    facts = dict.fromkeys(Measured.__struct_fields__, 0) | {
        "prefill_begun_ns": 12 * MS,
        "source_final_ns": 120 * MS,
        "published_ns": 130 * MS,
        "kv_nbytes": 10 << 20,
        "nbytes_before_final": 9 << 20,
        "groups": 10,
        "imports": 10,
        "import_ns": 100 * MS,
    }
    return Measured(**facts | more)


def ended(**more: Any) -> Ended:
    event = Ended(1, "finished", "", "", measured(), "", (), "", (), None)
    return replace(event, **more)


def choice_ended(request: int = 1, at_ms: float = 200, choice: int = 0, **more: Any) -> ChoiceEnded:
    event = ChoiceEnded(int(at_ms * MS), request, choice, DECODER, 3, ended(), (), (), 100)
    return replace(event, **more)


def answered(
    request: int = 1, at_ms: float = 200, terminal: Terminal = Terminal.FINISHED
) -> Answered:
    return Answered(int(at_ms * MS), request, terminal, STATUS[terminal], True, terminal.value)


def decoder_changed(state: Any, incarnation: int = 0, decoder: str = DECODER) -> DecoderChanged:
    return DecoderChanged(0, decoder, state, "", incarnation, 77)


def report(**more: Any) -> Inspected:
    """Two sources; a lane and a slot are out of service."""
    attempt = AttemptId(1, 2, 1)
    statistics = (
        ("lanes", "quarantined", 1),
        ("slots", "quarantined", 1),
        ("dropped", "stale", 2),
        ("dropped", "late", 1),
        ("restarts", "start_failed", 3),
        ("restarts", "restarted", 1),
    )
    found = Inspected(
        statistics=statistics,
        quarantined=(),
        context=2048,
        lanes_free=2,
        lanes=(
            LaneHeld(attempt, "published", "", 0),
            LaneHeld(attempt, "quarantined", "a fence was lost", 5),
        ),
        slots=(
            SlotHeld(7, 0, 1, "reading", attempt, ("read 3",), 0),
            SlotHeld(7, 1, 4, "free", None, (), 0),
            SlotHeld(8, 0, 2, "quarantined", attempt, ("write",), 9),
        ),
        sources=(
            SourceHeld(7, SOURCE, "in service", "", 11, 1),
            SourceHeld(8, "torch-2", "waiting to restart", "it died", 0, 0),
        ),
        requests=(),
    )
    return replace(found, **more)


def looked(incarnation: int = 0, **more: Any) -> Looked:
    return Looked(0, DECODER, incarnation, report(**more))


def finished(request: int = 1, **more: Any) -> list[Event]:
    """A request of three tokens, from its arrival to its terminal."""
    return [
        arrived(request),
        dispatched(request),
        decoded(140, 0, request),
        decoded(160, 1, request),
        decoded(190, 2, request),
        choice_ended(request, **more),
        answered(request),
    ]


def traced(request: int = 1) -> list[Event]:
    """The same with the intervals of three layer groups, at their times in `scenes`."""
    run = scenes.streamed()
    first_ms = scenes.START_US / 1000
    final_ns = int((scenes.START_US + 3_200) * scenes.US)
    figures = measured(
        prefill_begun_ns=final_ns - 3_100_000,
        source_final_ns=final_ns,
        published_ns=final_ns + 800_000,
    )
    choice = RouteChoice("streamed", 2, 0, PREDICTED)
    return [
        arrived(request, first_ms - 2, route="auto"),
        dispatched(request, first_ms - 1),
        decoded(first_ms + 4.2, 0, request),
        decoded(first_ms + 4.5, 1, request),
        choice_ended(
            request,
            first_ms + 4.6,
            ended=ended(measured=figures, choice=choice, reuse=Reuse(20, "source", "kept")),
            source_intervals=run.source,
            owner_intervals=run.owner,
            num_tokens=2,
        ),
        answered(request, first_ms + 5),
    ]


def one_of_each() -> list[Event]:
    """What makes every metric appear: a good request, a failed one, and what owners say."""
    parked = ended(measured=measured(parked_ns=5 * MS), attempts=("its source died",))
    return [
        *(decoder_changed(state) for state in ("starting", "ready")),
        QueueChanged(0, 3, 1200),
        *finished(1, ended=parked),
        *traced(2),
        arrived(3),
        answered(3, terminal=Terminal.CLIENT_LEFT),
        Served(0, "models", 200),
        Rejected(0, "completions", Terminal.QUEUE_FULL, 429, "too many wait"),
        looked(),
    ]
