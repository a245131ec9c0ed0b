"""What is measured of one attempt, and its intervals."""

from __future__ import annotations

import pytest

from headrace.ids import AttemptId, RequestId, Span
from headrace.messages import Computing, DeviceTimes, Interval, Progress, SourceFinal
from headrace.runtime.record import Record
from headrace.runtime.requests import Request, RequestOptions
from tests.unit.runtime.test_routing import plan_of

ATTEMPT = AttemptId(1, 2, 1)
PLAN = plan_of(4, layers=2)


def recorded(*, trace: bool) -> tuple[Request, Record]:
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=trace))
    record = Record(request, 5)
    record.granted(local=False)
    spans = (Span(0, 1, 0, 4), Span(1, 2, 0, 2))
    record.heard(Progress(ATTEMPT, 0, 0, spans, (), 10, 30, 40), PLAN)
    record.heard(Computing(ATTEMPT, 0, 0), PLAN)
    record.imported(Span(0, 1, 0, 4), 50, 60, 100)
    record.imported(Span(1, 2, 0, 2), 55, 70, 50)
    record.neighbour_decoded(62, 69)
    record.heard(Progress(ATTEMPT, 0, 0, (Span(1, 2, 2, 4),), (), 40, 50, 60), PLAN)
    record.heard(SourceFinal(ATTEMPT, 0, 0, "logits", 0, 8, 65), PLAN)
    record.publish()
    record.neighbour_decoded(100, 110)  # it stood in nobody's way
    record.first_token()
    record.decoded(200, 210)
    record.decoded(210, 220)
    record.cancelled()
    record.ended("cancelled", "cancelled")
    record.drained()
    return request, record


def kinds(intervals: list[Interval]) -> list[str]:
    return [each.kind for each in intervals]


def test_every_kind_of_interval_is_recorded_once() -> None:
    request, _ = recorded(trace=True)
    assert kinds(request.source_intervals) == [
        *("compute", "write", "announced") * 2,
        "final",
    ]
    assert kinds(request.owner_intervals) == [
        "granted",
        "validated",
        "import",
        "import",
        "neighbour",
        "validated",
        "validated",
        "published",
        "first_token",
        "decode",
        "cancel",
        "ended",
        "drain",
    ]
    compute, write, announced, *_ = request.source_intervals
    assert (compute.begun_ns, compute.ended_ns, compute.nbytes) == (10, 30, 0)
    assert (write.begun_ns, write.ended_ns) == (30, 40)
    assert (announced.begun_ns, announced.ended_ns) == (40, 40)
    assert write.nbytes == announced.nbytes == request.owner_intervals[1].nbytes > 0
    assert write.name == "layers [0, 1) x positions [0, 4), layers [1, 2) x positions [0, 2)"
    assert {each.clock for each in request.source_intervals + request.owner_intervals} == {"host"}
    assert request.owner_intervals[-2].name == "cancelled: cancelled"


def test_what_a_device_tells_stands_for_what_the_host_read() -> None:
    """And the figures, which are the host's, are the same."""
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 5)
    span = Span(0, 1, 0, 4)
    computed, copied, ran = (
        DeviceTimes(*times) for times in ((9, 21, 2), (22, 33, 3), (51, 58, 4))
    )
    record.heard(Progress(ATTEMPT, 0, 0, (span,), (), 10, 30, 40, computed, copied), PLAN)
    record.heard(Progress(ATTEMPT, 0, 0, (Span(1, 2, 0, 4),), (), 40, 50, 60), PLAN)
    record.imported(span, 50, 60, 100, ran)
    record.imported(Span(1, 2, 0, 4), 60, 70, 100)
    nbytes = PLAN.span_nbytes(span)
    assert request.source_intervals[:3] == [
        Interval("compute", str(span), 9, 21, 0, "device", 2),
        Interval("write", str(span), 22, 33, nbytes, "device", 3),
        Interval("announced", str(span), 40, 40, nbytes, "host"),
    ]
    assert [each.clock for each in request.source_intervals[3:]] == ["host"] * 3
    imports = [each for each in request.owner_intervals if each.kind == "import"]
    assert imports == [
        Interval("import", str(span), 51, 58, 100, "device", 4),
        Interval("import", "layers [1, 2) x positions [0, 4)", 60, 70, 100, "host"),
    ]
    measured = record.measured(1000)
    assert (measured.import_ns, measured.last_group_ns) == (20, 60)


def test_what_a_fake_device_tells_is_told_as_fake() -> None:
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 5)
    real, fake = DeviceTimes(1, 2, 0), DeviceTimes(3, 4, 0, "fake")
    record.heard(Progress(ATTEMPT, 0, 0, (Span(0, 1, 0, 4),), (), 10, 30, 40, real, fake), PLAN)
    record.imported(Span(0, 1, 0, 4), 50, 60, 100, fake)
    assert [each.clock for each in request.source_intervals] == ["device", "fake", "host"]
    assert request.owner_intervals[-1].clock == "fake"


def test_nothing_is_recorded_unless_asked_for() -> None:
    request, _ = recorded(trace=False)
    assert request.source_intervals == request.owner_intervals == []


@pytest.mark.parametrize("trace", [False, True])
def test_the_figures_are_the_same_with_and_without_a_trace(trace: bool) -> None:
    _, record = recorded(trace=trace)
    measured = record.measured(1000)
    assert measured.submitted_ns == 5
    assert (measured.prefill_begun_ns, measured.source_final_ns) == (8, 65)
    assert (measured.spans, measured.groups, measured.imports) == (3, 2, 2)
    assert measured.import_ns == 20  # two imports that overlap, from 50 to 70
    assert measured.nbytes_before_final == 100
    assert measured.decode_in_the_way_ns == 4  # of 62 to 69 what lies after 65
    assert measured.published_ns <= measured.first_token_ns


def test_a_request_that_goes_on_has_no_drain() -> None:
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 5)
    record.drained()
    assert request.owner_intervals == []


def test_all_steps_in_the_way_count_however_many_there_are() -> None:
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 0)
    record.heard(SourceFinal(ATTEMPT, 0, 0, "logits", 0, 0, 1000), PLAN)
    for at in range(500):
        record.neighbour_decoded(1000 + 10 * at, 1010 + 10 * at)
    record.publish()
    assert record.measured(1).decode_in_the_way_ns == 5000


def test_a_trace_keeps_a_bounded_number_of_others_steps_and_none_after_the_end() -> None:
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 0)
    for at in range(5000):
        record.neighbour_decoded(at, at + 1)
    waited = len(request.owner_intervals)
    record.heard(SourceFinal(ATTEMPT, 0, 0, "logits", 0, 0, 9000), PLAN)
    record.neighbour_decoded(9000, 9001)  # after the final there is room again
    record.ended("cancelled", "cancelled")
    record.neighbour_decoded(9001, 9002)
    steps = [each for each in request.owner_intervals if each.kind == "neighbour"]
    assert (waited, len(steps)) == (1024, 1025)
    assert record.measured(1).decode_in_the_way_ns == 1


def parked(*, reserved: bool) -> tuple[Request, Record]:
    """Granted without storage, all told, and one step of another before and after the final."""
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 5)
    record.granted(local=False, parked=True)
    record.neighbour_decoded(50, 60)
    record.heard(SourceFinal(ATTEMPT, 0, 0, "logits", 0, 8, 55), PLAN)
    record.neighbour_decoded(60, 70)
    if reserved:
        record.reserved()
    return request, record


def test_a_parked_attempt_s_tail_begins_with_its_storage() -> None:
    request, record = parked(reserved=True)
    (parking,) = [each for each in request.owner_intervals if each.kind == "parked"]
    begun_ns, ended_ns = parking.begun_ns, parking.ended_ns
    record.neighbour_decoded(ended_ns - 1, ended_ns + 4)
    record.publish()
    measured = record.measured(1)
    assert measured.storage_ns == measured.tail_begun_ns == ended_ns > measured.source_final_ns
    assert measured.parked_ns == ended_ns - begun_ns > 0
    assert measured.tail_ns == measured.published_ns - ended_ns
    assert measured.tail_from_last_group_ns == measured.tail_ns
    assert measured.decode_in_the_way_ns == 4  # what others decoded before was waited for anyhow


def test_who_has_storage_first_is_never_parked() -> None:
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    record = Record(request, 5)
    record.reserved()
    record.granted(local=False)
    record.publish()
    measured = record.measured(1)
    assert measured.parked_ns == 0 < measured.storage_ns
    assert "parked" not in kinds(request.owner_intervals)


def test_parking_ends_with_a_terminal_too() -> None:
    request, record = parked(reserved=False)
    record.ended("failed", "deadline")
    assert kinds(request.owner_intervals)[-2:] == ["parked", "ended"]
    ended, parking = request.owner_intervals[-1], request.owner_intervals[-2]
    assert (parking.name, parking.ended_ns) == ("no storage", ended.ended_ns)


def test_an_attempt_that_goes_on_with_storage_has_it_since_then() -> None:
    request = Request(RequestId(1, 2), 4, RequestOptions())
    record = Record(request, 5)
    record.reserved(9)
    record.heard(SourceFinal(ATTEMPT, 0, 0, "logits", 0, 8, 65), PLAN)
    assert (record.storage_ns, record.measured(1).tail_begun_ns) == (9, 65)
