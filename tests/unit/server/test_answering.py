"""One terminal for each request, one status for each failure, and nothing sent before a token."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("starlette")

from headrace.errors import HeadraceError
from headrace.protocol.commands import Cause
from headrace.server import answering, responding
from headrace.server.config import HttpConfig, QueueConfig
from headrace.server.encoding import LONG_TEXT
from headrace.server.events import Arrived, Event, Rejected
from headrace.server.models import ServedModel
from headrace.server.terminals import STATUS, Terminal, terminal_of
from tests.server_stand import MODEL, Client, Stand, ended, run
from tests.unit.server.test_encoding import stays

KINDS = ("completions", "chat")
SHAPES = [(kind, stream) for kind in KINDS for stream in (False, True)]
by_shape = pytest.mark.parametrize(("kind", "stream"), SHAPES)

ENDS = [
    *(ended("failed", cause=cause.value, reason="why") for cause in Cause),
    ended("cancelled", cause=Cause.CANCELLED.value, reason="why"),
    ended("failed", cause="a cause of a later version", reason="why"),
    ended("failed", mistake="source", reason="why"),
    ended("failed", mistake="decoder", reason="why"),
    ended("failed", mistake="max_tokens", reason="why"),
]
by_end = pytest.mark.parametrize("how", ENDS, ids=lambda how: f"{how.cause}{how.mistake}")


@by_end
@by_shape
@pytest.mark.parametrize("after_token", [False, True])
def test_a_failure_has_its_status_or_is_an_event_in_the_stream(
    how: Any, kind: str, stream: bool, after_token: bool
) -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(kind, stream=stream)
        await stand.quiet()
        assert client.sent == []
        if after_token:
            stand.decoder.say(choice, "a")
            await stand.quiet()
            assert bool(client.sent) is stream
        stand.decoder.end(choice, how)
        await stand.done(client)
        terminal = terminal_of(how)
        assert client.complete
        if stream and after_token:
            assert client.status == 200
            assert client.chunks[-1]["error"]["code"] == terminal.value
            assert client.chunks[-1]["error"]["message"] == "why"
            assert b"[DONE]" not in client.body
        else:
            assert client.status == STATUS[terminal] != 200
            assert client.error["code"] == terminal.value
            assert client.error["message"] == "why"
        answered = stand.answered
        assert (answered.terminal, answered.status) == (terminal, STATUS[terminal])
        assert answered.in_stream is (stream and after_token)
        await stand.nothing_left()

    run(test)


@by_shape
def test_nothing_is_sent_while_it_waits_and_before_its_first_token(kind: str, stream: bool) -> None:
    async def test() -> None:
        stand = Stand(lanes=1)
        first, (running,) = await stand.asked(kind, stream=stream)
        second = stand.ask(kind, stream=stream)
        await stand.quiet()
        assert (first.sent, second.sent, stand.dispatcher.num_waiting) == ([], [], 1)
        stand.decoder.say(running, "ab")
        stand.decoder.end(running)
        await stand.done(first)
        assert (first.status, second.sent) == (200, [])
        await stand.until(lambda: len(stand.decoder.taken) == 2)
        stand.decoder.end(stand.decoder.taken[1])  # not one token: it has an end, and that is told
        assert (await stand.done(second)).status == 200
        await stand.nothing_left()

    run(test)


STAGES = ("queued", "dispatched", "decoding", "writing")


@by_shape
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_ends_its_request_and_frees_all(
    kind: str, stream: bool, stage: str
) -> None:
    async def test() -> None:
        stand = Stand(lanes=1)
        other, (running,) = (None, (None,))
        if stage == "queued":
            other, (running,) = await stand.asked()
        client = stand.ask(kind, stream=stream)
        await stand.quiet()
        if stage in ("decoding", "writing"):
            client.reads = stage != "writing"
            stand.decoder.say(stand.decoder.taken[-1], "abc")
            await stand.quiet()
        client.leave()
        await stand.done(client)
        assert stand.answered.terminal is Terminal.CLIENT_LEFT
        assert stand.answered.status == 499
        assert not client.sent or (stream and not client.complete)
        if other is not None and running is not None:
            stand.decoder.end(running)
            await stand.done(other)
        else:
            assert len(stand.decoder.withdrawn) == 1
        await stand.nothing_left()

    run(test)


@by_shape
def test_a_task_that_is_cancelled_at_any_await_leaves_one_terminal(kind: str, stream: bool) -> None:
    """Cancelled before each turn of the loop in which it is under way, until it ends by itself."""

    async def one(turns: int) -> bool:
        stand = Stand()
        client = stand.ask(kind, stream=stream, n=2)
        for turn in range(turns + 1):
            if turn == turns:
                client.task.cancel()
            else:
                for choice in list(stand.decoder.running):
                    if choice.num_tokens < 3:
                        stand.decoder.say(choice, "a")
                    else:
                        stand.decoder.end(choice)
            await asyncio.sleep(0)
        await asyncio.wait({client.task})
        cut = client.task.cancelled()
        if not cut:
            assert client.complete
        for arrived in stand.of(Arrived):
            assert arrived.request == 1
            expected = Terminal.SHUTTING_DOWN if cut else Terminal.FINISHED
            assert stand.answered.terminal is expected
        await stand.nothing_left()
        return cut

    turns = 1
    while asyncio.run(one(turns)):
        turns += 1
        assert turns < 100
    assert turns > 5


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_client_that_reads_nothing_and_is_cut_off_has_left(kind: str) -> None:
    async def test() -> None:
        stand = Stand()
        client, choices = await stand.asked(kind, stream=True)
        client.reads = False
        stand.decoder.say(choices[0], "a")
        await stand.quiet()
        assert (client.num_sends, client.task.done()) == (1, False)
        client.leave()  # the connection's own limit, see `server/protocol.py`
        await stand.done(client)
        assert client.sent == []
        assert stand.answered.terminal is Terminal.CLIENT_LEFT
        assert stand.answered.in_stream
        assert len(stand.decoder.withdrawn) == 1
        await stand.nothing_left()

    run(test)


@by_shape
@pytest.mark.parametrize("before", [False, True])
def test_a_client_that_does_not_read_its_error_is_not_told_another(
    kind: str, stream: bool, before: bool
) -> None:
    async def test() -> None:
        stand = Stand()
        client, choices = await stand.asked(kind, stream=stream)
        if not before:
            stand.decoder.say(choices[0], "a")
            await stand.quiet()
        client.reads = False
        stand.decoder.end(choices[0], ended("failed", cause="device", reason="on fire"))
        await stand.quiet()
        client.leave()
        await stand.done(client)
        assert stand.answered.terminal is Terminal.DEVICE
        assert stand.of(Rejected) == []
        await stand.nothing_left()

    run(test)


@by_shape
def test_one_choice_of_three_that_fails_ends_all(kind: str, stream: bool) -> None:
    async def test() -> None:
        stand = Stand(lanes=3)
        client, choices = await stand.asked(kind, stream=stream, n=3)
        for choice in choices:
            stand.decoder.say(choice, "a")
        await stand.quiet()
        stand.decoder.end(choices[0])
        client.reads = stream  # the others are withdrawn before anybody reads of it
        stand.decoder.end(choices[1], ended("failed", cause="source-died", reason="gone"))
        await stand.quiet()
        assert stand.decoder.withdrawn == [choices[2]]
        if not stream:
            client.task.cancel()
            await asyncio.wait({client.task})
        else:
            await stand.done(client)
            assert client.chunks[-1]["error"]["code"] == "source-died"
            assert b"[DONE]" not in client.body
        await stand.nothing_left()

    run(test)


def test_a_bug_on_the_way_is_a_500_and_one_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def boom(self: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(responding.Responding, "run", boom)

    async def test() -> None:
        stand = Stand()
        client = stand.ask()
        await stand.done(client)
        assert client.status == 500
        assert client.error["code"] == "bug"
        assert "ZeroDivisionError" not in client.body.decode()
        assert stand.answered.terminal is Terminal.BUG
        await stand.nothing_left()

    run(test)
    assert "a bug" in caplog.text


def test_a_listener_that_raises_changes_no_outcome(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        stand = Stand()

        def broken(event: Event) -> None:
            raise HeadraceError("the metrics are on fire")

        stand.told.listen(broken)
        client, (choice,) = await stand.asked()
        stand.decoder.say(choice, "abc")
        stand.decoder.end(choice)
        assert (await stand.done(client)).json["choices"][0]["text"] == "abc"
        await stand.nothing_left()

    run(test)
    assert caplog.text.count("a listener failed") == 1


@by_shape
def test_a_full_queue_is_a_429_that_says_when_to_come_again(kind: str, stream: bool) -> None:
    async def test() -> None:
        stand = Stand(lanes=1, queue=QueueConfig(max_requests=1))
        running, (choice,) = await stand.asked()
        waiting = stand.ask()
        await stand.quiet()
        before = stand.queue.statistics()["waiting"]
        client = await stand.done(stand.ask(kind, stream=stream))
        assert (client.status, client.error["code"]) == (429, "queue-full")
        assert int(client.headers["retry-after"]) >= 1
        assert [each.terminal for each in stand.of(Rejected)] == [Terminal.QUEUE_FULL]
        assert stand.queue.statistics()["waiting"] == before == 1
        never = await stand.done(stand.ask(kind, stream=stream, n=2))  # no queue has room for it
        assert (never.status, never.error["code"]) == (413, "too-large")
        stand.decoder.end(choice)
        await stand.until(lambda: len(stand.decoder.taken) == 2)
        stand.decoder.end(stand.decoder.taken[1])
        await stand.done(running)
        await stand.done(waiting)
        await stand.nothing_left()

    run(test)


@by_shape
def test_a_deadline_that_passes_in_the_queue_is_a_408(kind: str, stream: bool) -> None:
    async def test() -> None:
        stand = Stand(lanes=1)
        running, (choice,) = await stand.asked()
        late = stand.ask(kind, stream=stream, deadline_s=0.01)
        await asyncio.wait_for(late.task, 5)
        assert (late.status, late.error["code"]) == (408, "deadline")
        stand.decoder.end(choice)
        await stand.done(running)
        await stand.nothing_left()

    run(test)


def test_a_drain_refuses_what_comes_and_ends_what_runs() -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked()
        stand.dispatcher.draining = True
        idle = asyncio.ensure_future(stand.answering.until_idle())
        new = await stand.done(stand.ask())
        assert (new.status, new.error["code"]) == (503, "shutting-down")
        assert "retry-after" in new.headers
        assert not idle.done()
        assert (await stand.done(stand.get("/ready"))).status == 503
        stand.decoder.say(choice, "ab")
        stand.decoder.end(choice)
        assert (await stand.done(client)).status == 200
        await stand.until(idle.done)
        await stand.nothing_left()

    run(test)


def test_what_waits_when_the_server_closes_is_told() -> None:
    async def test() -> None:
        stand = Stand(lanes=1)
        running, (choice,) = await stand.asked()
        waiting = stand.ask(deadline_s=100.0)
        await stand.quiet()
        stand.dispatcher.close()
        await stand.done(waiting)
        assert (waiting.status, waiting.error["code"]) == (503, "shutting-down")
        stand.decoder.end(choice)
        await stand.done(running)
        await stand.nothing_left()

    run(test)


def test_an_unknown_model_is_a_404_that_names_the_field() -> None:
    async def test() -> None:
        stand = Stand()
        for kind in KINDS:
            client = await stand.done(stand.ask(kind, model="nobody's"))
            assert (client.status, client.error["param"]) == (404, "model")
        assert len(stand.of(Rejected)) == 2
        await stand.nothing_left()

    run(test)


def test_a_decoder_that_is_set_aside_fails_what_waits_for_it() -> None:
    async def test() -> None:
        stand = Stand(lanes=1)
        running, _ = await stand.asked()
        waiting = stand.ask()
        await stand.quiet()
        stand.decoder.state, stand.decoder.reason = "set aside", "it died 5 times"
        stand.decoder.die()
        for client in (running, waiting):
            assert (await stand.done(client)).status == 503
        assert "it died 5 times" in waiting.error["message"]
        assert int(running.headers["retry-after"]) == 1
        refused = await stand.done(stand.ask())
        assert (refused.status, refused.error["code"]) == (503, "not-ready")
        await stand.nothing_left()

    run(test)


def test_ids_of_a_client_are_carried_and_identify_nothing() -> None:
    async def test() -> None:
        stand = Stand()
        good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        clients = []
        for traceparent in (good, good, good[:-1], "00-" + "0" * 32 + good[35:], "x"):
            headers = {"X-Request-Id": "the same", "traceparent": traceparent}
            headers["X-Request-Id"] = "the-same" if traceparent == good else "not valid \x7f"
            clients.append(stand.ask(headers=headers))
            await stand.quiet()
            while stand.decoder.running:
                stand.decoder.say(stand.decoder.running[0], "a")
                stand.decoder.end(stand.decoder.running[0])
        for client in clients:
            assert (await stand.done(client)).status == 200
        arrived = stand.of(Arrived)
        assert [each.traceparent for each in arrived] == [good, good, "", "", ""]
        assert [each.label for each in arrived[:2]] == ["the-same", "the-same"]
        assert len({each.label for each in arrived[2:]}) == 3
        assert [client.headers["x-request-id"] for client in clients] == [
            each.label for each in arrived
        ]
        assert len({each.request for each in arrived}) == 5
        assert len({client.json["id"] for client in clients}) == 5
        await stand.nothing_left()

    run(test)


def test_a_body_is_refused_before_anything_is_admitted() -> None:
    async def test() -> None:
        stand = Stand(http=HttpConfig(max_body_bytes=1024))
        for body, status in ((b"{", 400), (b"x" * 2000, 413), (b"[]", 400)):
            client = await stand.done(Client(stand.app, "/v1/completions", body))
            assert client.status == status
        refused = await stand.done(
            stand.ask("chat", messages=[{"role": "user", "content": "refuse"}])
        )
        assert (refused.status, refused.error["param"]) == (400, "messages")
        assert stand.of(Arrived) == []
        assert len(stand.of(Rejected)) == 4
        await stand.nothing_left()

    run(test)


LONG = "a" * LONG_TEXT


def test_a_full_queue_is_told_before_a_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: ServedModel, text: str, *, add_special: bool = True) -> Any:
        raise AssertionError("it was encoded")

    async def test() -> None:
        stand = Stand(lanes=1, queue=QueueConfig(max_requests=2))
        running, (choice,) = await stand.asked()
        waiting = stand.ask(n=2)
        await stand.quiet()
        monkeypatch.setattr(ServedModel, "encode", encode)
        for n, status in ((1, 429), (3, 413), (9, 400)):
            client = await stand.done(stand.ask(prompt=LONG, n=n))
            assert client.status == status
        waiting.leave()
        stand.decoder.end(choice)
        await stand.done(running)
        await stand.done(waiting)
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_who_leaves_while_another_text_is_encoded_is_not_waited_for(path: str) -> None:
    async def test() -> None:
        stand = Stand()
        gate, begun = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert gate.wait(10)

        encoding = stand.answering.encoding
        first = asyncio.ensure_future(encoding.run(work, LONG_TEXT, "other", stays))
        await begun.wait()
        body = json.dumps({"model": MODEL, "prompt": LONG}).encode()
        client = Client(stand.app, path, body)
        await stand.quiet()
        assert not client.task.done()
        client.leave()
        await stand.done(client)
        assert [each.terminal for each in stand.of(Rejected)][-1] is Terminal.CLIENT_LEFT
        gate.set()
        await first
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_was_made_of_is_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text takes more than the queue counts of its ids."""
    seen: list[Any] = []
    bodies: Any = answering._BODIES
    read = bodies[kind]

    def noted(raw: bytes) -> Any:
        seen.append(read(raw))
        return seen[0]

    monkeypatch.setitem(bodies, kind, noted)

    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(kind, stream=True)
        await stand.quiet()
        kept = sys.getrefcount(seen[0]) - 2  # the list's and the call's own
        assert kept <= 0
        stand.decoder.end(choice)
        assert (await stand.done(client)).status == 200
        await stand.nothing_left()

    run(test)
