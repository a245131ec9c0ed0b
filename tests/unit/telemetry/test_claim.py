"""The rule of kernel overlap, as a table."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from headrace.messages import Interval, IntervalKind
from headrace.telemetry.claim import overlap_of
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.times import length_ns, union
from tests.unit.telemetry.scenes import US, at, moved, on, on_devices, streamed


def run_of(source: list[Interval], owner: list[Interval]) -> Run:
    return streamed(source=tuple(source), owner=tuple(owner))


@pytest.mark.parametrize(
    ("clock", "error_us", "together_us", "kernels_us"),
    [
        (("device", "device"), (0, 0), 10, 10),
        (("device", "device"), (4, 5), 10, 10),
        (("device", "device"), (5, 5), 10, None),  # as long as the errors is not longer
        (("device", "device"), (10, 1), 10, None),
        (("device", "device"), (0, 11), 10, None),
        (("device", "device"), (0, 0), 0, None),
        (("fake", "fake"), (0, 0), 10, None),
        (("device", "fake"), (0, 0), 10, None),
        (("fake", "device"), (4, 5), 10, None),
        (("host", "fake"), (0, 0), 10, None),
        (("fake", "host"), (0, 0), 10, None),
        (("host", "device"), (0, 0), 10, None),
        (("device", "host"), (0, 0), 10, None),
        (("host", "host"), (0, 0), 10, None),
    ],
)
def test_the_rule(
    clock: tuple[str, str],
    error_us: tuple[int, int],
    together_us: int,
    kernels_us: int | None,
) -> None:
    """Both from devices, none of them fake, and longer together than the sum of both errors."""
    errors = [each * US for each in error_us]
    source = at("compute", 0, 100, clock=clock[0], error_ns=errors[0])
    owner = at("import", 100 - together_us, 200, clock=clock[1], error_ns=errors[1])
    found = overlap_of(align(run_of([source], [owner])))
    assert found.kernels_ns == (None if kernels_us is None else kernels_us * US)
    assert found.length_ns == together_us * US
    assert (found.source, found.owner) == clock
    assert found.evidence == next(each for each in ("host", "fake", "device") if each in clock)
    both = found.evidence != "host" and together_us > 0
    assert found.error_ns == (sum(error_us) * US if both else 0)


@pytest.mark.parametrize(
    ("kinds", "sides"),
    [
        (("compute", "import"), ("device", "device")),
        (("compute", "write", "import"), ("device", "device")),
        (("compute",), ("device", "host")),
        (("import",), ("host", "device")),
        (("write", "announced", "validated"), ("host", "host")),
        ((), ("host", "host")),
    ],
)
def test_a_side_is_a_device_by_what_it_computed_or_imported(
    kinds: tuple[str, ...], sides: tuple[str, str]
) -> None:
    found = overlap_of(align(on("device", streamed(), *kinds)))
    assert (found.source, found.owner) == sides
    assert (found.kernels_ns is not None) == (sides == ("device", "device"))


@pytest.mark.parametrize("clock", ["host", "fake"])
@pytest.mark.parametrize("lane", ["source", "owner"])
def test_one_weaker_reading_makes_all_of_it_as_weak(lane: str, clock: str) -> None:
    run = on_devices()
    kind = {"source": "compute", "owner": "import"}[lane]
    changed: list[Interval] = list(getattr(run, lane))
    index = next(n for n, each in enumerate(changed) if each.kind == kind)
    changed[index] = replace(changed[index], clock=clock)
    found = overlap_of(align(replace(run, **{lane: tuple(changed)})))
    assert (found.evidence, found.kernels_ns) == (clock, None)


@pytest.mark.parametrize("lane", ["source", "owner"])
def test_an_empty_side_is_no_evidence(lane: str) -> None:
    found = overlap_of(align(on_devices(**{lane: ()})))
    assert (found.evidence, found.length_ns, found.kernels_ns) == ("host", 0, None)


def test_stretches_that_may_not_have_been_are_left_out_one_by_one() -> None:
    """And no instant counts twice, however many imports are in flight."""
    source = [at("compute", 0, 100, clock="device", error_ns=5 * US)]
    owner = [
        at("import", -20, 8, clock="device", error_ns=5 * US),
        at("import", 20, 60, clock="device", error_ns=5 * US),
        at("import", 40, 70, clock="device", error_ns=20 * US),
    ]
    found = overlap_of(align(run_of(source, owner)))
    assert (found.length_ns, found.kernels_ns) == (58 * US, 50 * US)
    assert found.error_ns == 25 * US


def test_copying_out_of_a_device_is_no_computing() -> None:
    run = run_of(
        [at("compute", 0, 100), at("write", 100, 200)],
        [at("import", 50, 150), at("import", 120, 160)],
    )
    assert overlap_of(align(run)).length_ns == 110 * US  # a host tells no more than: at work
    devices = overlap_of(align(on("device", run, "compute", "write", "import")))
    assert (devices.length_ns, devices.kernels_ns) == (50 * US, 50 * US)
    writing_only = overlap_of(align(on("device", run, "compute", "import")))
    assert writing_only == devices


@pytest.mark.parametrize("by_ns", [0, 3_000_000_000])
def test_a_shift_adds_its_error(by_ns: int) -> None:
    """The messages of the scene tell the offset of two clocks to within some 70 us."""
    run = on_devices()
    aligned = align(replace(run, source=moved(run.source, by_ns)))
    found = overlap_of(aligned)
    assert (aligned.clock.shift_ns > 0) == (by_ns > 0)
    error_ns = 10 * US + (aligned.clock.error_ns if by_ns else 0)
    assert found.error_ns == error_ns
    assert found.kernels_ns == 400 * US  # stretches of 200 us
    wide = on("device", run, "compute", "import", error_us=70)
    found = overlap_of(align(replace(wide, source=moved(wide.source, by_ns))))
    assert (found.kernels_ns is None) == (by_ns > 0)


def test_stretches_are_found_as_by_trying_each_pair() -> None:
    """Overlapping, nested, empty, and with errors that leave some of them out."""
    draw = random.Random(7)

    def some(kind: IntervalKind) -> list[Interval]:
        begun = [draw.randrange(60) for _ in range(12)]
        return [
            at(kind, each, each + draw.randrange(12), clock="device", error_ns=draw.randrange(4000))
            for each in begun
        ]

    for _ in range(100):
        computed, imported = some("compute"), some("import")
        kernels, errors = [], [0]
        for one in computed:
            for other in imported:
                begun_ns = max(one.begun_ns, other.begun_ns)
                ended_ns = min(one.ended_ns, other.ended_ns)
                error_ns = one.error_ns + other.error_ns
                if begun_ns < ended_ns:
                    errors.append(error_ns)
                    kernels += [(begun_ns, ended_ns)] * (ended_ns - begun_ns > error_ns)
        found = overlap_of(align(run_of(computed, imported)))
        assert found.error_ns == max(errors)
        assert found.kernels_ns == (length_ns(union(kernels)) or None)
