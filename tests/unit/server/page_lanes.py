"""The intervals of a source and an owner for the tests of the page, and the figures that follow."""

from __future__ import annotations

from typing import Final, TypeAlias

from headrace.ids import Span
from headrace.messages import Interval, IntervalKind, Measured
from headrace.telemetry.times import length_ns, union_of

MS: Final = 1_000_000
LAYERS: Final = 18
LAYER_NBYTES: Final = 444_444
PARKED_MS: Final = 24  # after the end of the prefill

Lanes: TypeAlias = tuple[tuple[Interval, ...], tuple[Interval, ...]]


def streamed(begun_ns: int, *, compute_ms: float = 6.0, until: int = LAYERS) -> Lanes:
    """A layer group per layer, with steps of neighbours; cut short in layer `until`, if that is."""
    source, final_ns = _computed(begun_ns, compute_ms, until)
    owner, free_ns = [_interval("granted", "prefill", begun_ns, begun_ns)], begun_ns
    for number, told in enumerate(each for each in source if each.kind == "announced"):
        heard_ns = told.ended_ns + MS // 20
        owner.append(_interval("validated", told.name, heard_ns, heard_ns, LAYER_NBYTES))
        free_ns = max(free_ns, heard_ns)
        if number % 3 == 1:
            stepped_ns = free_ns + int(3.4 * MS)
            owner.append(_interval("neighbour", "decode step of others", free_ns, stepped_ns))
            free_ns = stepped_ns
        owner.append(_interval("import", told.name, free_ns, free_ns + 2 * MS, LAYER_NBYTES))
        free_ns += 2 * MS
    if until < LAYERS:
        owner.append(_interval("ended", "failed: deadline", free_ns, free_ns))
        return tuple(source), tuple(owner)
    source.append(_interval("final", "logits", final_ns, final_ns))
    return tuple(source), (*owner, *_published(max(free_ns, final_ns) + MS // 2))


def parked(begun_ns: int) -> Lanes:
    """The same, imported only when a lane is free, long after its prefill."""
    source, final_ns = _computed(begun_ns, 6.0, LAYERS)
    free_ns = final_ns + PARKED_MS * MS
    steps = range(begun_ns + MS, free_ns - 3 * MS, 4 * MS)
    owner = [
        _interval("granted", "prefill", begun_ns, begun_ns),
        *(_interval("neighbour", "decode step of others", at, at + 3 * MS) for at in steps),
        _interval("parked", "storage", begun_ns + MS, free_ns),
    ]
    for layer in range(0, LAYERS, 6):
        name = str(Span(layer, layer + 6, 0, 512))
        owner.append(_interval("import", name, free_ns, free_ns + 4 * MS, 6 * LAYER_NBYTES))
        free_ns += 4 * MS
    final = _interval("final", "logits", final_ns, final_ns)
    return (*source, final), (*owner, *_published(free_ns + MS // 2))


def whole(begun_ns: int) -> Lanes:
    """On the whole route: computed and written at once, then imported in three pieces."""
    name = str(Span(0, LAYERS, 0, 96))
    final_ns, wrote_ns = begun_ns + 22 * MS, begun_ns + 24 * MS
    source = (
        _interval("compute", name, begun_ns + MS, final_ns),
        _interval("write", name, final_ns, wrote_ns, 1_500_000),
        _interval("announced", name, wrote_ns, wrote_ns, 1_500_000),
        _interval("final", "logits", final_ns, final_ns),
    )
    owner = [
        _interval("granted", "prefill", begun_ns, begun_ns),
        _interval("validated", name, wrote_ns, wrote_ns, 1_500_000),
    ]
    for number in range(3):
        piece, at = str(Span(6 * number, 6 * number + 6, 0, 96)), wrote_ns + number * MS
        owner.append(_interval("import", piece, at, at + MS, 500_000))
    return source, (*owner, *_published(wrote_ns + 4 * MS))


def figures_of(submitted_ns: int, lanes: Lanes) -> Measured:
    """What is measured of a request with these intervals."""
    source, owner = lanes
    imports = [each for each in owner if each.kind == "import"]
    final_ns = _at(source, "final")
    facts = dict.fromkeys(Measured.__struct_fields__, 0) | {
        "submitted_ns": submitted_ns,
        "source_final_ns": final_ns,
        "published_ns": _at(owner, "published"),
        "first_token_ns": _at(owner, "first_token"),
        "storage_ns": max((each.ended_ns for each in owner if each.kind == "parked"), default=0),
        "kv_nbytes": sum(each.nbytes for each in imports),
        "nbytes_before_final": sum(e.nbytes for e in imports if e.ended_ns <= final_ns),
        "imports": len(imports),
        "import_ns": length_ns(union_of(imports)),
    }
    return Measured(**facts)


def _computed(begun_ns: int, compute_ms: float, until: int) -> tuple[list[Interval], int]:
    """Layer groups of unequal length, and when the last one was written."""
    found: list[Interval] = []
    at = begun_ns + MS
    for layer in range(until):
        name = str(Span(layer, layer + 1, 0, 512))
        computed = at + int(compute_ms * MS * (1 + (layer * 7 % 5 - 2) / 8))
        wrote = computed + int(0.9 * MS)
        found += [
            _interval("compute", name, at, computed),
            _interval("write", name, computed, wrote, LAYER_NBYTES),
            _interval("announced", name, wrote, wrote, LAYER_NBYTES),
        ]
        at = wrote
    return found, at


def _published(at: int) -> list[Interval]:
    return [
        _interval("published", "entry", at, at),
        _interval("first_token", "token", at + MS, at + MS),
        _interval("decode", "first decode step", at + MS, at + 7 * MS),
        _interval("ended", "finished", at + 8 * MS, at + 8 * MS),
    ]


def _at(intervals: tuple[Interval, ...], kind: IntervalKind) -> int:
    return next(each.begun_ns for each in intervals if each.kind == kind)


def _interval(kind: IntervalKind, name: str, begun: int, over: int, nbytes: int = 0) -> Interval:
    return Interval(kind, name=name, begun_ns=begun, ended_ns=over, nbytes=nbytes, clock="host")
