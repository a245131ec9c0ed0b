"""A request's way to a decoder and its answer's way back, step by step."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from headrace.proxy.passing import MAX_HELD
from headrace.server.config import HttpConfig
from headrace.server.http import Message, Receive, Scope, Send
from tests.server_stand import Client, run
from tests.unit.proxy.stand import EVENTS, JSON, ONE, PATHS, TWO, ProxyStand

THREE = "http://three:8003"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def error_of(client: Client) -> tuple[int, str, str]:
    return client.status, client.error["code"], client.error["type"]


def test_a_whole_answer_is_passed_on_with_its_status_and_kind() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked("chat", messages=[{"role": "user", "content": "hi"}])
        assert (call.request.method, str(call.request.url)) == (
            "POST",
            f"{ONE}/v1/chat/completions",
        )
        assert call.json["kv_transfer_params"]["do_remote_prefill"] is True
        assert int(call.headers["content-length"]) == len(call.body)
        assert stand.pool.decoders[0].in_flight == 1
        call.answer(b'{"error":', b" {}}", status=422, kind="application/problem+json", x_some="1")
        await stand.done(client)
        assert (client.status, client.body, client.complete) == (422, b'{"error": {}}', True)
        assert client.headers["content-type"] == "application/problem+json"
        assert (client.headers["x-some"], client.headers["content-length"]) == ("1", "13")
        assert stand.count("requests_total", endpoint="chat", decoder=ONE, status="422") == 1
        assert stand.count("prefills_total", where="remote") == 1
        assert stand.count("first_byte_seconds_count", decoder=ONE, stream="false") == 1
        await stand.nothing_left()

    run(test)


def test_a_stream_is_passed_on_as_it_comes_and_begins_with_its_first_byte() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=True)
        call.answer(kind=EVENTS, end=False)
        await stand.turn()
        assert client.sent == []
        call.send(b"data: 1\n\n")
        await stand.until(lambda: len(client.sent) == 2)
        assert (client.status, client.headers["content-type"]) == (200, EVENTS)
        call.send(b"data: 2\n\nda")
        await stand.until(lambda: len(client.sent) == 3)
        assert client.body == b"data: 1\n\ndata: 2\n\n"
        call.send(b"ta: [DONE]\n\n")
        call.end()
        await stand.done(client)
        assert client.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert client.complete
        assert stand.count("first_byte_seconds_count", decoder=ONE, stream="true") == 1
        await stand.nothing_left()

    run(test)


def test_a_stream_without_any_event_is_passed_on_too() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=True)
        call.answer(kind=EVENTS)
        await stand.done(client)
        assert (client.status, client.body, client.complete) == (200, b"", True)

    run(test)


@pytest.mark.parametrize(
    ("name", "method", "path"),
    [
        ("models", "GET", "/v1/models"),
        ("tokenize", "POST", "/tokenize"),
        ("detokenize", "POST", "/detokenize"),
    ],
)
def test_other_paths_are_passed_on_as_they_are(name: str, method: str, path: str) -> None:
    async def test() -> None:
        stand = ProxyStand(route="whole")
        raw = b'{"prompt":  "x"}'
        client, call = await stand.asked(name, raw=raw)
        assert (call.request.method, call.request.url.path) == (method, path)
        assert call.body == (raw if method == "POST" else b"")
        call.answer(b"{}")
        await stand.done(client)
        assert (client.status, client.json) == (200, {})
        assert stand.count("requests_total", endpoint=name, decoder=ONE, status="200") == 1
        assert stand.count("first_byte_seconds_count") == stand.count("prefills_total") == 0

    run(test)


def test_ids_and_headers_are_passed_on() -> None:
    async def test() -> None:
        stand = ProxyStand()
        headers = {
            "X-Request-Id": "mine-1",
            "traceparent": TRACE,
            "tracestate": "a=b",
            "Authorization": "Bearer sk",
            "Connection": "x-drop",
            "X-Drop": "1",
        }
        client, call = await stand.asked(headers=headers)
        call.answer(b"{}", x_request_id="the decoder's", connection="close")
        await stand.done(client)
        sent = call.headers
        assert (sent["x-request-id"], client.headers["x-request-id"]) == ("mine-1", "mine-1")
        assert (sent["traceparent"], sent["tracestate"]) == (TRACE, "a=b")
        assert sent["authorization"] == "Bearer sk"
        assert sent["host"] == "one:8001"
        assert "x-drop" not in sent
        assert "connection" not in client.headers

    run(test)


def test_a_request_without_an_id_gets_one_of_its_own() -> None:
    async def test() -> None:
        stand = ProxyStand()
        made = []
        for _ in range(2):
            client, call = await stand.asked()
            call.answer(b"{}")
            await stand.done(client)
            assert client.headers["x-request-id"] == call.headers["x-request-id"]
            made.append(call.headers["x-request-id"])
        assert made[0] != made[1]
        assert all(len(each) == 32 and int(each, 16) for each in made)

    run(test)


@pytest.mark.parametrize("stage", ["before", "between", "within"])
def test_a_client_that_leaves_ends_the_decoders_request_at_once(stage: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=True)
        if stage != "before":
            call.answer(kind=EVENTS, end=False)
        if stage == "within":
            call.send(b"data: 1\n\n")
            await stand.until(lambda: len(client.sent) == 2)
        assert not call.closed
        client.leave()
        await stand.until(lambda: call.closed)
        await stand.done(client)
        assert stand.count("client_disconnects_total") == 1
        assert stand.count("requests_total", decoder=ONE, status="499") == 1
        assert stand.count("upstream_failures_total") == 0
        await stand.nothing_left()

    run(test)


def test_a_client_that_reads_nothing_and_leaves_ends_it_too() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=True)
        client.reads = False
        call.answer(b"data: 1\n\n", kind=EVENTS, end=False)
        await stand.until(lambda: client.num_sends == 1)
        client.leave()
        await stand.done(client)
        assert call.closed
        await stand.nothing_left()

    run(test)


class Leaving(Client):
    """Leaves with the last of its answer, before that is said to be sent."""

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.leave()
            for _ in range(20):
                await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [EVENTS, JSON])
def test_a_client_that_leaves_with_its_whole_answer_has_not_left_early(kind: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client = Leaving(stand.app, PATHS["completions"], b"{}")
        await stand.until(lambda: len(stand.calls) == 1)
        stand.calls[0].answer(b"data: 1\n\n", kind=kind)
        await stand.done(client)
        assert (client.body, client.complete) == (b"data: 1\n\n", True)
        assert stand.count("requests_total", decoder=ONE, status="200") == 1
        assert stand.count("client_disconnects_total") == 0
        await stand.nothing_left()

    run(test)


class Slow(Client):
    """Takes nothing of its answer's last message."""

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.num_sends += 1
            await asyncio.Event().wait()
        await super()._send(message)


@pytest.mark.parametrize("kind", [EVENTS, JSON])
def test_a_drain_that_ends_while_the_last_of_an_answer_is_read_says_no_more(kind: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client = Slow(stand.app, PATHS["completions"], b"{}")
        await stand.until(lambda: len(stand.calls) == 1)
        stand.calls[0].answer(kind=kind)
        await stand.until(lambda: client.num_sends == 2)
        stand.relays.cut()
        await stand.done(client)
        assert client.num_sends == 2
        assert stand.count("requests_total", decoder=ONE, status="200") == 1
        await stand.nothing_left()

    run(test)


def test_a_decoder_that_cannot_be_reached_is_left_out_and_another_one_asked() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO)
        stand.decoders.refuse[ONE] = httpx.ConnectError("connection refused")
        client, call = await stand.asked()
        assert call.address == TWO
        call.answer(b"{}")
        await stand.done(client)
        assert client.status == 200
        first = stand.pool.decoders[0]
        assert (first.up, first.why) == (False, "connection refused")
        assert stand.count("upstream_failures_total", decoder=ONE, reason="refused") == 1
        assert stand.count("requests_total", decoder=TWO, status="200") == 1
        assert stand.count("requests_total") == 1

    run(test)


def test_it_is_sent_on_until_one_takes_it() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO, THREE)
        stand.decoders.refuse = {ONE: httpx.ConnectTimeout(""), TWO: httpx.ConnectError("no")}
        client, call = await stand.asked()
        assert call.address == THREE
        assert call.json["prompt"] == "hello"
        call.answer(b"{}")
        assert (await stand.done(client)).status == 200
        assert [each.up for each in stand.pool.decoders] == [False, False, True]
        assert stand.count("upstream_failures_total", reason="refused") == 2

    run(test)


def test_where_nobody_takes_it_none_is_up() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO, THREE)
        stand.decoders.refuse = dict.fromkeys((ONE, TWO, THREE), httpx.ConnectError("no"))
        client = await stand.done(stand.ask())
        assert error_of(client) == (503, "no-decoder", "overloaded_error")
        assert not stand.pool.any_up
        assert stand.calls == []
        await stand.nothing_left()

    run(test)


def test_all_tries_together_have_the_time_of_one() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO, first_byte_timeout_s=600.0)
        first, call = await stand.asked()
        stand.advance(599.0)
        call.die(httpx.ConnectTimeout(""))
        await stand.until(lambda: len(stand.calls) == 2)
        assert not first.task.done()
        stand.advance(2.0)
        await stand.done(first)
        assert error_of(first) == (504, "first-byte-timeout", "timeout_error")
        assert stand.calls[1].closed
        assert stand.relays.num_open == 0

    run(test)


@pytest.mark.parametrize("status", [0, 99, 101, 600, 999])
def test_a_status_that_is_none_is_a_bad_gateway(status: int) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked()
        call.answer(b"{}", status=status)
        await stand.done(client)
        assert error_of(client) == (502, "decoder-died", "server_error")
        assert f"status {status}" in client.error["message"]
        assert stand.count("upstream_failures_total", decoder=ONE, reason="died") == 1
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("location", ["mailto:x", "foo:bar", "//xn--a/", "http://["])
def test_a_redirect_is_passed_on_whatever_it_points_to(location: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked()
        call.answer(status=302, location=location)
        await stand.done(client)
        assert (client.status, client.headers["location"]) == (302, location)
        assert len(stand.calls) == 1
        await stand.nothing_left()

    run(test)


def test_a_body_is_let_go_once_it_was_sent_and_held_until_then() -> None:
    async def test() -> None:
        most = 1024
        stand = ProxyStand(http=HttpConfig(max_body_bytes=most))
        budget: Any = stand.relays._budget
        seen: list[int] = []
        take = stand.decoders.take

        async def taken(request: httpx.Request) -> bytes:
            seen.append(budget.nbytes)
            return await take(request)

        stand.decoders.take = taken  # type: ignore[method-assign]
        raw = json.dumps({"prompt": "x" * 900}).encode()
        client, call = await stand.asked(raw=raw)
        assert (seen, budget.nbytes) == ([len(raw)], 0)
        assert await take(call.request) == b""
        call.answer(b"{}")
        assert (await stand.done(client)).status == 200
        await stand.nothing_left()

    run(test)


def test_while_its_answer_is_made_nothing_of_a_body_is_in_memory() -> None:
    nbytes = 4_000_000

    async def test() -> None:
        stand = ProxyStand()
        take = stand.decoders.take

        async def taken(request: httpx.Request) -> bytes:
            return (await take(request))[:1]

        stand.decoders.take = taken  # type: ignore[method-assign]
        warm, call = await stand.asked()
        call.answer(b"{}")
        await stand.done(warm)
        tracemalloc.start()
        try:
            client, call = await stand.asked(raw=b'{"prompt": "%s"}' % (b"x" * nbytes))
            assert tracemalloc.get_traced_memory()[1] > nbytes
            assert tracemalloc.get_traced_memory()[0] < nbytes / 2
        finally:
            tracemalloc.stop()
        call.answer(b"{}")
        assert (await stand.done(client)).status == 200

    run(test)


def test_a_query_is_passed_on() -> None:
    async def test() -> None:
        stand = ProxyStand()

        async def asking(scope: Scope, receive: Receive, send: Send) -> None:
            await stand.app({**scope, "query_string": b"a=1&b"}, receive, send)

        client = Client(asking, PATHS["completions"], b"{}")
        await stand.until(lambda: len(stand.calls) == 1)
        (call,) = stand.calls
        assert call.request.extensions["target"] == b"/v1/completions?a=1&b"
        call.answer(b"{}")
        assert (await stand.done(client)).status == 200

    run(test)


def test_what_was_not_sent_is_let_go_at_the_end() -> None:
    async def test() -> None:
        stand = ProxyStand()
        budget: Any = stand.relays._budget
        stand.decoders.refuse[ONE] = httpx.ConnectError("no")
        assert (await stand.done(stand.ask())).status == 503
        assert budget.nbytes == 0

    run(test)


def test_an_error_does_not_become_a_part_of_an_event_that_was_cut() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=True)
        long = b"data: " + b"x" * MAX_HELD
        call.answer(long, kind=EVENTS, end=False)
        await stand.until(lambda: len(client.sent) == 2)
        call.die(httpx.ReadError("reset"))
        await stand.done(client)
        cut, error, end = client.body.split(b"\n\n")
        assert (cut, end) == (long, b"")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "decoder-died"

    run(test)


def test_where_none_is_up_it_is_told_when_to_come_again() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO, up=False)
        client = await stand.done(stand.ask())
        assert error_of(client) == (503, "no-decoder", "overloaded_error")
        assert client.headers["retry-after"] == "1"
        assert len(client.headers["x-request-id"]) == 32
        assert stand.count("requests_total", decoder="none", status="503") == 1

    run(test)


@pytest.mark.parametrize("stage", ["head", "first byte", "body"])
def test_a_decoder_that_dies_before_its_answer_is_a_bad_gateway(stage: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=stage == "first byte")
        if stage != "head":
            call.answer(kind=EVENTS if stage == "first byte" else JSON, end=False)
        if stage == "body":
            call.send(b'{"half')
        call.die()
        await stand.done(client)
        assert error_of(client) == (502, "decoder-died", "server_error")
        assert ONE in client.error["message"]
        assert stand.count("upstream_failures_total", decoder=ONE, reason="died") == 1
        assert stand.count("requests_total", decoder=ONE, status="502") == 1
        if stage != "head":
            assert call.closed

    run(test)


def test_a_decoder_that_dies_within_a_stream_ends_it_with_an_error_event() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(stream=True)
        call.answer(b'data: {"n": 1}\n\ndata: {"cut o', kind=EVENTS, end=False)
        await stand.until(lambda: len(client.sent) == 2)
        call.die(httpx.ReadError("reset"))
        await stand.done(client)
        assert client.status == 200
        first, last = client.chunks
        assert first == {"n": 1}
        assert last["error"]["code"] == "decoder-died"
        assert client.complete
        assert stand.count("requests_total", decoder=ONE, status="502") == 1
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("stage", ["head", "first byte"])
def test_a_decoder_that_sends_nothing_in_time_is_given_up(stage: str) -> None:
    async def test() -> None:
        stand = ProxyStand(first_byte_timeout_s=600.0)
        client, call = await stand.asked(stream=True)
        if stage == "first byte":
            call.answer(kind=EVENTS, end=False)
        stand.advance(599.0)
        await stand.turn()
        assert not client.task.done()
        stand.advance(2.0)
        await stand.done(client)
        assert error_of(client) == (504, "first-byte-timeout", "timeout_error")
        assert call.closed
        assert stand.count("upstream_failures_total", decoder=ONE, reason="late") == 1
        await stand.nothing_left()

    run(test)


def test_after_the_first_byte_there_is_no_limit() -> None:
    async def test() -> None:
        stand = ProxyStand(first_byte_timeout_s=600.0)
        client, call = await stand.asked(stream=True)
        call.answer(b"data: 1\n\n", kind=EVENTS, end=False)
        await stand.until(lambda: len(client.sent) == 2)
        stand.advance(3600.0)
        await stand.turn()
        call.send(b"data: 2\n\n")
        call.end()
        await stand.done(client)
        assert client.body == b"data: 1\n\ndata: 2\n\n"

    run(test)


def test_above_the_limit_it_is_told_when_to_come_again() -> None:
    async def test() -> None:
        stand = ProxyStand(max_in_flight=1)
        first, call = await stand.asked()
        second = await stand.done(stand.ask())
        assert error_of(second) == (503, "too-many-requests", "overloaded_error")
        assert second.headers["retry-after"] == "1"
        assert (await stand.done(stand.get("/health"))).status == 200
        call.answer(b"{}")
        await stand.done(first)
        third, call = await stand.asked()
        call.answer(b"{}")
        assert (await stand.done(third)).status == 200
        assert stand.count("requests_total", decoder="none", status="503") == 1
        assert stand.count("requests_total", decoder=ONE, status="200") == 2
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("name", ["completions", "chat", "tokenize", "detokenize"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]"])
def test_a_body_that_is_no_json_object_goes_to_no_decoder(name: str, raw: bytes) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client = await stand.done(stand.ask(name, raw=raw))
        assert error_of(client) == (400, "invalid", "invalid_request_error")
        assert client.error["message"].startswith("the body is ")
        assert stand.calls == []
        assert stand.count("requests_total", decoder="none", status="400") == 1
        await stand.nothing_left()

    run(test)


def test_a_body_that_is_too_large_is_refused() -> None:
    async def test() -> None:
        stand = ProxyStand(http=HttpConfig(max_body_bytes=1024))
        client = await stand.done(stand.ask(prompt="x" * 1024))
        assert error_of(client) == (413, "too-large", "invalid_request_error")
        assert stand.calls == []

    run(test)


def test_a_client_that_leaves_before_its_body_is_here_is_counted() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client = Client(stand.app, "/v1/completions", b"")
        client.leave()
        await asyncio.wait_for(client.task, 30)
        assert stand.count("client_disconnects_total") == 1
        assert stand.count("requests_total", decoder="none", status="499") == 1

    run(test)


def test_at_the_end_of_a_drain_what_is_open_is_told_so() -> None:
    async def test() -> None:
        stand = ProxyStand()
        waiting, first = await stand.asked()
        streaming, second = await stand.asked(stream=True)
        second.answer(b"data: 1\n\n", kind=EVENTS, end=False)
        await stand.until(lambda: len(streaming.sent) == 2)
        stand.relays.cut()
        for client in (waiting, streaming):
            await stand.done(client)
        assert error_of(waiting) == (503, "shutting-down", "overloaded_error")
        event = streaming.body.removeprefix(b"data: 1\n\ndata: ")
        assert json.loads(event)["error"]["code"] == "shutting-down"
        assert first.closed
        assert second.closed
        assert stand.count("requests_total", decoder=ONE, status="503") == 2
        await stand.nothing_left()

    run(test)


def test_a_request_that_is_cut_off_is_counted_once() -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked()
        client.task.cancel()
        await asyncio.wait({client.task})
        assert (client.status, call.closed) == (503, True)
        assert stand.count("requests_total") == 1
        assert stand.count("requests_total", decoder=ONE, status="503") == 1
        await stand.nothing_left()

    run(test)


def test_a_fault_of_the_proxy_itself_is_told_as_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked()
        call.die(KeyError("what"))
        await stand.done(client)
        assert error_of(client) == (500, "bug", "server_error")
        assert "what" not in client.error["message"]
        assert stand.count("requests_total", decoder=ONE, status="500") == 1

    with caplog.at_level(logging.ERROR, "headrace.proxy"):
        run(test)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.exc_info is not None


def test_each_request_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        stand = ProxyStand(prefill="by-header")
        for headers in (
            {"X-Request-Id": "a", "x-prefiller-host-port": "p:1"},
            {"X-Request-Id": "b"},
        ):
            client, call = await stand.asked(headers=headers)
            call.answer(b"{}")
            await stand.done(client)
        client, call = await stand.asked("models", headers={"X-Request-Id": "c"})
        call.answer(b"{}")
        await stand.done(client)

    with caplog.at_level("INFO", "headrace.proxy"):
        run(test)
    assert [each.getMessage() for each in caplog.records] == [
        f"a: completions 200 by {ONE}, prefill asked: remote",
        f"b: completions 200 by {ONE}, prefill asked: local",
        f"c: models 200 by {ONE}",
    ]
