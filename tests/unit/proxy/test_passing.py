"""What of headers and streams is passed on."""

from __future__ import annotations

import pytest

from headrace.proxy.passing import MAX_HELD, WholeEvents, answer_headers, request_headers


def test_a_request_keeps_what_is_not_of_its_connection() -> None:
    kept = [
        (b"authorization", b"Bearer k"),
        (b"content-type", b"application/json"),
        (b"traceparent", b"00-1-2-03"),
        (b"tracestate", b"a=b"),
        (b"x-data-parallel-rank", b"1"),
    ]
    dropped = [
        (b"host", b"proxy"),
        (b"connection", b"keep-alive, X-Mine"),
        (b"x-mine", b"1"),
        (b"keep-alive", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"proxy-authorization", b"secret"),
        (b"content-length", b"3"),
        (b"accept-encoding", b"gzip"),
        (b"expect", b"100-continue"),
        (b"x-request-id", b"other"),
        (b"x-prefiller-host-port", b"h:1"),
    ]
    passed = request_headers([*dropped, *kept], "mine")
    assert passed == [*kept, (b"x-request-id", b"mine"), (b"accept-encoding", b"identity")]


def test_an_answer_keeps_what_its_server_here_does_not_say() -> None:
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Retry-After", b"1"),
        (b"Content-Length", b"5"),
        (b"Date", b"today"),
        (b"Server", b"uvicorn"),
        (b"X-Request-Id", b"its own"),
        (b"Connection", b"close"),
        (b"Transfer-Encoding", b"chunked"),
    ]
    kept = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    assert answer_headers(headers) == kept


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_passed_on_whole(end: bytes) -> None:
    events = WholeEvents()
    assert events.push(b"data: 1" + end) == b"data: 1" + end
    assert events.push(b"data: 2" + end[:-1]) == b""
    assert events.push(end[-1:] + b"data: 3" + end + b"da") == b"data: 2" + end + b"data: 3" + end
    assert events.push(b"ta") == b""
    assert events.rest() == b"data"
    assert events.rest() == b""


def test_whatever_the_pieces_the_bytes_are_the_same() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"b": 2}\r\n\r\n: comment\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        events = WholeEvents()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert b"".join(map(events.push, pieces)) + events.rest() == stream


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    events = WholeEvents()
    assert events.push(b"x" * MAX_HELD) == b""
    assert not events.cut
    assert events.push(b"x") == b"x" * (MAX_HELD + 1)
    assert events.push(b"y") == b""
    assert events.cut
    assert events.push(b"\n\nz") == b"y\n\n"
    assert not events.cut
    assert events.rest() == b"z"
