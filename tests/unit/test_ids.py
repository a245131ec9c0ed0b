"""Ids: an attempt knows its request, two attempts are never equal, texts carry every number."""

from __future__ import annotations

from headrace.ids import AttemptId, RequestId, Span


def test_an_attempt_belongs_to_one_request() -> None:
    assert AttemptId(255, 3, 2).request == RequestId(255, 3)


def test_attempts_of_one_request_differ() -> None:
    assert AttemptId(1, 2, 1) != AttemptId(1, 2, 2)
    assert AttemptId(1, 2, 1) != AttemptId(2, 2, 1)


def test_the_next_attempt_is_of_the_same_request() -> None:
    attempt = AttemptId(255, 3, 2)
    assert attempt.next == AttemptId(255, 3, 3)
    assert attempt.next.request == attempt.request
    assert attempt.next > attempt  # attempts of one request sort in their order


def test_the_texts_carry_epoch_counter_and_attempt() -> None:
    assert str(RequestId(255, 3)) == "ff.3"
    assert str(AttemptId(255, 3, 2)) == "ff.3/2"


def test_a_span_reads_as_half_open_ranges() -> None:
    assert str(Span(0, 2, 3, 9)) == "layers [0, 2) x positions [3, 9)"
