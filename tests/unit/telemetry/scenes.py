"""Traced runs for the tests of telemetry, made from a few times in us."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.ids import Span
from headrace.messages import Interval, IntervalKind, Measured
from headrace.telemetry.recording import LOCAL_GRANT, Run

US = 1_000
START_US = 5_000_000


def at(kind: IntervalKind, begun_us: float, ended_us: float | None = None, **more: Any) -> Interval:
    """An interval, or an instant; times count from START_US."""
    begun_ns = int((START_US + begun_us) * US)
    ended_ns = begun_ns if ended_us is None else int((START_US + ended_us) * US)
    facts = {"name": kind, "nbytes": 0, "clock": "host"} | more
    return Interval(kind, begun_ns=begun_ns, ended_ns=ended_ns, **facts)


def group(number: int, begun_us: float, write_us: float, ended_us: float) -> list[Interval]:
    """What the source records of one layer group of 1,000 bytes."""
    name = str(Span(number, number + 1, 0, 8))
    return [
        at("compute", begun_us, write_us, name=name),
        at("write", write_us, ended_us, name=name, nbytes=1_000),
        at("announced", ended_us, name=name, nbytes=1_000),
    ]


def landed(number: int, heard_us: float, begun_us: float, ended_us: float) -> list[Interval]:
    """What the owner records of it."""
    name = str(Span(number, number + 1, 0, 8))
    return [
        at("validated", heard_us, name=name, nbytes=1_000),
        at("import", begun_us, ended_us, name=name, nbytes=1_000),
    ]


def measured(**times: int) -> Measured:
    """Figures of 3,000 bytes in 3 groups."""
    facts = dict.fromkeys(Measured.__struct_fields__, 0)
    return Measured(**facts | {"kv_nbytes": 3_000, "last_group_nbytes": 1_000} | times)


def streamed(**more: Any) -> Run:
    """Three layer groups; the last one is imported in the tail, after a step of a neighbour.

    The tail is [3200, 4000) us: 10 the source writes, 30 a message is under way, 300 a neighbour
    decodes, 200 importing, 260 the rest.
    """
    source = [
        *group(0, 100, 900, 1_000),
        *group(1, 1_000, 1_900, 2_000),
        *group(2, 2_000, 2_900, 3_210),
        at("final", 3_200, name="logits"),
    ]
    owner = [
        at("granted", 0, name="prefill"),
        *landed(0, 1_040, 1_050, 1_250),
        *landed(1, 2_060, 2_100, 2_300),
        *landed(2, 3_240, 3_640, 3_840),
        at("neighbour", 3_300, 3_600, name="decode step of another"),
        at("published", 4_000, name="entry"),
        at("first_token", 4_100, name="token"),
        at("decode", 4_150, 4_500, name="first decode step"),
        at("ended", 4_600, name="finished"),
        at("drain", 4_600, 4_700, name="storage"),
    ]
    run = Run(
        name="streamed",
        route="streamed",
        num_tokens=8,
        prompt="the prompt",
        outcome="finished",
        source=tuple(source),
        owner=tuple(owner),
        measured=measured(),
    )
    return msgspec.structs.replace(run, **more)


def whole(**more: Any) -> Run:
    """The same cells at once, on a whole route; its tail is [3000, 5000) us."""
    name, spans = str(Span(0, 3, 0, 8)), [str(Span(n, n + 1, 0, 8)) for n in range(3)]
    source = (
        at("compute", 100, 3_000, name=name),
        at("write", 3_000, 3_500, name=name, nbytes=3_000),
        at("announced", 3_500, name=name, nbytes=3_000),
        at("final", 3_000, name="logits"),
    )
    owner = (
        at("granted", 0, name="prefill"),
        at("validated", 3_550, name=name, nbytes=3_000),
        *(
            at("import", 3_600 + 400 * n, 4_000 + 400 * n, name=spans[n], nbytes=1_000)
            for n in range(3)
        ),
        at("published", 5_000, name="entry"),
    )
    kept = measured(last_group_nbytes=3_000)
    run = streamed(name="whole", route="whole", source=source, owner=owner, measured=kept)
    return msgspec.structs.replace(run, **more)


def several(**more: Any) -> Run:
    """Three layers in one message: the source writes one and computes the next, in turn."""
    name = str(Span(0, 3, 0, 8))
    source = (
        at("compute", 100, 300, name=name),
        at("write", 300, 2_900, name=name, nbytes=3_000),
        at("announced", 2_900, name=name, nbytes=3_000),
        at("final", 3_200, name="logits"),
    )
    owner = (
        at("granted", 0, name="prefill"),
        at("validated", 2_950, name=name, nbytes=3_000),
        at("import", 3_000, 3_600, name=name, nbytes=3_000),
        at("published", 4_000, name="entry"),
    )
    return msgspec.structs.replace(streamed(source=source, owner=owner), **more)


def local(**more: Any) -> Run:
    """A streamed run that the owner computed by itself: its imports lie within its computing."""
    run = streamed(**more)
    first = msgspec.structs.replace(run.owner[0], name=LOCAL_GRANT)
    return msgspec.structs.replace(run, owner=(first, *run.owner[1:]))


def parked(**more: Any) -> Run:
    """All three groups lie in the slot while another decodes; they are imported once it is over.

    It is parked in [0, 6000) us, so that its tail is [6000, 6800): 600 importing, 200 the rest.
    """
    run = streamed()
    heard = [each for each in run.owner if each.kind == "validated"]
    names = [each.name for each in heard]
    owner = (
        at("granted", 0, name="prefill"),
        *heard,
        at("neighbour", 3_300, 6_000, name="decode step of another"),
        at("parked", 0, 6_000, name="storage"),
        *(
            at("import", 6_000 + 200 * n, 6_200 + 200 * n, name=names[n], nbytes=1_000)
            for n in range(3)
        ),
        at("published", 6_800, name="entry"),
        at("first_token", 6_900, name="token"),
    )
    return msgspec.structs.replace(run, **{"name": "parked", "owner": owner} | more)


def cancelled(**more: Any) -> Run:
    """Withdrawn in its second layer group: nothing was published."""
    owner = (
        at("granted", 0, name="prefill"),
        *landed(0, 1_040, 1_050, 1_250),
        at("cancel", 1_500, name="by the caller"),
        at("ended", 1_510, name="cancelled: cancelled"),
        at("drain", 1_510, 2_400, name="storage"),
    )
    source = tuple(group(0, 100, 900, 1_000))
    run = streamed(
        source=source,
        owner=owner,
        outcome="cancelled",
        reason="cancelled by the caller",
        measured=None,
    )
    return msgspec.structs.replace(run, **more)


def on_devices(**more: Any) -> Run:
    """The streamed run of two devices with events, each of whose readings is within 5 us."""
    run = on("device", streamed(), "compute", "write", "import", error_us=5)
    return msgspec.structs.replace(run, **more)


def moved(intervals: tuple[Interval, ...], by_ns: int) -> tuple[Interval, ...]:
    """The intervals as another clock reads them."""
    return tuple(
        msgspec.structs.replace(
            each, begun_ns=each.begun_ns + by_ns, ended_ns=each.ended_ns + by_ns
        )
        for each in intervals
    )


def on(clock: str, run: Run, *kinds: str, error_us: float = 0) -> Run:
    """The run with the intervals of these kinds read from `clock`, within `error_us`."""
    facts = {"clock": clock, "error_ns": int(error_us * US)}

    def changed(lane: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return tuple(
            msgspec.structs.replace(each, **facts) if each.kind in kinds else each for each in lane
        )

    return msgspec.structs.replace(run, source=changed(run.source), owner=changed(run.owner))
