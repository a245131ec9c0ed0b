"""What every request goes through: ids, keys, limits, bodies, and errors of a known shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from headrace.server import events, http
from headrace.server.budget import Budget
from headrace.server.config import HttpConfig
from headrace.server.events import Rejected
from headrace.server.http import Front, read_body, send_json
from headrace.server.page_routes import PUBLIC
from headrace.server.terminals import Ending, Terminal
from tests.server_stand import COMPLETION, Client, Stand, run

KEYS = ("first-key", "second-key", "third-key")
CLOSED = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/metrics",
    "/nowhere",
)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer wrong", 401),
        ("Bearer first-ke", 401),
        ("Bearer first-keyy", 401),
        ("Basic first-key", 401),
        ("first-key", 401),
        ("Bearer first-key", 200),
        ("bearer first-key", 200),
        ("Bearer third-key", 200),
    ],
)
def test_a_key_of_several_is_asked_for(given: str | None, status: int) -> None:
    async def test() -> None:
        stand = Stand(keys=KEYS)
        headers = {} if given is None else {"Authorization": given}
        client = await stand.done(stand.get("/v1/models", headers=headers))
        assert client.status == status
        if status == 401:
            assert client.error["code"] == "unauthorized"
            assert client.headers["www-authenticate"] == "Bearer"
            assert [each.terminal for each in stand.of(Rejected)] == [Terminal.UNAUTHORIZED]
        await stand.nothing_left()

    run(test)


def test_only_what_tells_nothing_is_open() -> None:
    async def test() -> None:
        stand = Stand(keys=KEYS)
        for path in CLOSED:
            assert (await stand.done(stand.get(path))).status == 401, path
        for path in ("/health", "/ready"):
            assert (await stand.done(stand.get(path))).status == 200, path
        assert sorted(http.OPEN_PATHS) == sorted([*PUBLIC, "/health", "/ready"])

    run(test)


def test_each_key_has_a_share_of_its_own_and_without_keys_each_address_has() -> None:
    async def test() -> None:
        for keys, clients in ((KEYS, ["key-1", "key-3"]), ((), ["10.0.0.1", "10.0.0.1"])):
            stand = Stand(keys=keys)
            for key in (KEYS[0], KEYS[2]):
                client = stand.ask(headers={"Authorization": f"Bearer {key}"})
                await stand.until(lambda s=stand: len(s.decoder.running) == 1)  # type: ignore[misc]
                stand.decoder.end(stand.decoder.running[0])
                await stand.done(client)
            assert [each.client for each in stand.of(events.Arrived)] == clients

    run(test)


def test_a_flood_of_headers_is_a_431() -> None:
    async def test() -> None:
        stand = Stand(http=HttpConfig(max_header_bytes=1024))
        for headers in ({"X-A": "a" * 1024}, {f"X-{at}": "a" for at in range(300)}):
            client = await stand.done(stand.ask(headers=headers))
            assert (client.status, client.error["code"]) == (431, "headers-too-large")
        client = await stand.done(stand.get("/" + "a" * 1024))
        assert client.status == 431
        assert (await stand.done(stand.get("/health"))).status == 200

    run(test)


def rejected(stand: Stand) -> list[Terminal]:
    return [each.terminal for each in stand.of(Rejected)]


GOOD_HOSTS = ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "127.8.0.1", "localhost.")
BAD_HOSTS = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "192.0.2.1",
    "[::1",
    "x@y",
)


def test_a_server_without_keys_is_asked_by_names_of_this_host_only() -> None:
    async def test() -> None:
        for path in ("/v1/models", "/health", "/metrics", "/status"):
            stand = Stand()
            for host in GOOD_HOSTS:
                client = await stand.done(stand.get(path, headers={"Host": host}))
                assert client.status in (200, 404), host  # the stand has no page and no metrics
            for host in BAD_HOSTS:
                client = await stand.done(stand.get(path, headers={"Host": host}))
                assert (client.status, client.error["code"]) == (403, "forbidden"), host
            assert rejected(stand).count(Terminal.FORBIDDEN) == len(BAD_HOSTS)
        named = Stand(http=HttpConfig(host="lab.example"))
        for host in ("lab.example", "lab.example:8000", "localhost"):
            assert (await named.done(named.get("/health", headers={"Host": host}))).status == 200
        for stand in (Stand(keys=KEYS), Stand(http=HttpConfig(allow_open=True))):
            client = await stand.done(stand.get("/health", headers={"Host": "evil.example"}))
            assert client.status == 200

    run(test)


@pytest.mark.parametrize("allow_open", [False, True])
def test_a_page_of_elsewhere_cannot_have_a_server_without_keys_compute(allow_open: bool) -> None:
    async def test() -> None:
        stand = Stand(http=HttpConfig(allow_open=allow_open))
        for origin in ("https://evil.example", "null", "http://localhost:3000", "http://[::1"):
            headers = {"Host": "localhost:8000", "Origin": origin}
            client = await stand.done(stand.ask(headers=headers))
            assert (client.status, client.error["code"]) == (403, "forbidden"), origin
        own = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
        assert (await stand.done(stand.get("/v1/models", headers=own))).status == 200
        client = stand.ask(headers=own)
        await stand.until(lambda: len(stand.decoder.running) == 1)
        stand.decoder.end(stand.decoder.running[0])
        assert (await stand.done(client)).status == 200
        assert rejected(stand) == [Terminal.FORBIDDEN] * 4
        await stand.nothing_left()

    run(test)


def test_a_connection_above_the_limit_is_told_so_and_counted() -> None:
    async def test() -> None:
        stand = Stand(http=HttpConfig(max_connections=7))
        assert (await stand.done(stand.get("/v1/models"))).status == 200
        stand.state = {"above": True}
        for client in (stand.get("/v1/models"), stand.ask(), stand.get("/nowhere")):
            await stand.done(client)
            assert (client.status, client.error["code"]) == (503, "too-many-connections")
            assert client.headers["retry-after"] == "1"
            assert client.headers["connection"] == "close"
            assert client.headers["content-type"] == "application/json"
        for path in ("/health", "/ready"):  # who watches it sees it then too
            assert (await stand.done(stand.get(path))).status == 200
        assert rejected(stand) == [Terminal.TOO_MANY_CONNECTIONS] * 3
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_is_too_large_is_a_413_by_its_length_and_by_its_chunks(path: str) -> None:
    async def test() -> None:
        stand = Stand(http=HttpConfig(max_body_bytes=1024))
        by_length = Client(stand.app, path, [b"{", b"}"], headers={"Content-Length": "1025"})
        await stand.done(by_length)
        by_chunks = Client(stand.app, path, [b" " * 512] * 3)
        await stand.done(by_chunks)
        for client in (by_length, by_chunks):
            assert (client.status, client.error["code"]) == (413, "too-large")
            assert "connection" not in client.headers  # the rest is read, or it could not be seen
        for length in ("9" * 5000, "-1", "x", "\u00b2"):  # a server before this one refuses them
            told = Client(stand.app, path, b"{", headers={"Content-Length": length})
            assert (await stand.done(told)).status in (400, 413)

    run(test)


def test_a_body_that_never_comes_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_WITHIN_S", 0.01)

    async def test() -> None:
        stand = Stand()
        client = Client(stand.app, "/v1/completions", [])
        await asyncio.wait_for(client.task, 5)
        assert (client.status, client.error["code"]) == (408, "deadline")
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_client_that_leaves_with_its_body_is_not_admitted(chunks: int) -> None:
    async def test() -> None:
        stand = Stand()
        client = Client(stand.app, "/v1/completions", [b'{"model"'] * chunks)
        if chunks:
            client._chunks.append(b"")  # so that the first is not the last
        client.leave()
        await stand.done(client)
        assert [each.terminal for each in stand.of(Rejected)] == [Terminal.CLIENT_LEFT]
        assert stand.of(events.Arrived) == []
        await stand.nothing_left()

    run(test)


def test_unknown_paths_and_methods_have_errors_of_the_same_shape() -> None:
    async def test() -> None:
        stand = Stand()
        unknown = await stand.done(stand.get("/v2/models"))
        assert (unknown.status, unknown.error["code"]) == (404, "unknown-path")
        wrong = await stand.done(stand.get("/v1/completions"))
        assert (wrong.status, wrong.error["code"]) == (405, "wrong-method")
        assert wrong.headers["allow"]
        slash = await stand.done(stand.get("/v1/models/", method="POST"))
        assert slash.status in (404, 405)

    run(test)


def front(app: Any, told: events.Events | None = None) -> Front:
    return Front(app, told or events.Events(), HttpConfig(), keys=())


def test_a_bug_is_a_500_that_tells_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("a secret")

    async def test() -> None:
        client = Client(front(broken), "/v1/models", b"")
        await client.task
        assert (client.status, client.error["code"]) == (500, "bug")
        assert b"secret" not in client.body

    run(test)
    assert "a secret" in caplog.text


def test_a_bug_after_the_status_line_sends_no_second_one(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("a secret")

    async def test() -> None:
        client = Client(front(broken), "/v1/models", b"")
        with pytest.raises(KeyError):
            await client.task
        assert client.status == 200

    run(test)
    assert "a secret" in caplog.text


def test_errors_say_in_whole_seconds_when_to_come_again() -> None:
    async def test() -> None:
        for after_s, told in ((0.2, "1"), (1.0, "1"), (1.2, "2")):

            async def full(scope: Any, receive: Any, send: Any, after_s: float = after_s) -> None:
                raise Ending(Terminal.QUEUE_FULL, "full", retry_after_s=after_s)

            client = Client(front(full), "/v1/models", b"")
            await client.task
            assert client.headers["retry-after"] == told

    run(test)


def test_nothing_is_served_but_http() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it is not asked")

    async def test() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message["type"])

        receive: Any = None
        await front(never)({"type": "websocket"}, receive, send)
        await front(never)({"type": "lifespan"}, receive, send)
        assert sent == ["websocket.close"]

    run(test)


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 400), ("br", 400), ("identity", 404)])
def test_a_body_that_is_compressed_is_refused(encoding: str, status: int) -> None:
    async def test() -> None:
        stand = Stand()
        client = stand.ask(model="unknown", headers={"Content-Encoding": encoding})
        await stand.done(client)
        assert client.status == status
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_comes_too_late_for_a_server_that_ends_is_a_503(path: str) -> None:
    async def test() -> None:
        stand = Stand()
        client = Client(stand.app, path, [])
        await stand.quiet()
        client.task.cancel()
        await asyncio.wait({client.task})
        assert client.task.cancelled()
        assert (client.status, client.error["code"]) == (503, "shutting-down")
        assert client.headers["retry-after"] == "5"
        assert client.headers["x-request-id"]
        assert rejected(stand) == [Terminal.SHUTTING_DOWN]
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_whenever_a_server_ends_its_client_is_told_so_and_it_is_counted_once(stream: bool) -> None:
    async def one(turns: int) -> bool:
        stand = Stand()
        body = json.dumps({**COMPLETION, "stream": stream}).encode()
        client = Client(stand.app, "/v1/completions", [body[:9], body[9:]])
        for _ in range(turns):
            for choice in list(stand.decoder.running):
                if choice.num_tokens < 2:
                    stand.decoder.say(choice, "a")
                else:
                    stand.decoder.end(choice)
            await asyncio.sleep(0)
        client.task.cancel()
        await asyncio.wait({client.task})
        answered = stand.of(events.Answered)
        assert len(answered) + len(rejected(stand)) == 1
        if not client.task.cancelled():
            return False
        if not (answered and answered[0].in_stream):
            assert (client.status, client.error["code"]) == (503, "shutting-down")
        await stand.nothing_left()
        return True

    turns = 1
    while asyncio.run(one(turns)):
        turns += 1
        assert turns < 100
    assert turns > 5


def test_a_client_that_reads_nothing_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LAST_WORD_WITHIN_S", 0.01)

    async def test() -> None:
        stand = Stand()
        client = Client(stand.app, "/v1/completions", [])
        client.reads = False
        await stand.quiet()
        client.task.cancel()
        await asyncio.wait({client.task}, timeout=5)
        assert client.task.cancelled()
        assert client.sent == []
        await stand.nothing_left()

    run(test)


@pytest.mark.parametrize(("each", "comes"), [(20, True), (1, False)])
def test_a_body_has_the_more_time_the_more_of_it_has_come(
    each: int, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_WITHIN_S", 0.1)
    monkeypatch.setattr(http, "BODY_RATE", 200)
    pieces = [b"x" * each] * 20

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def test() -> None:
        with Budget(1 << 20).of_one("a") as held:
            reading = read_body({"headers": []}, receive, 1 << 10, held)
            if comes:
                assert len(await reading) == 20 * each
            else:
                with pytest.raises(Ending) as told:
                    await reading
                assert told.value.terminal is Terminal.DEADLINE

    run(test)


@pytest.mark.parametrize("nbytes", [1, 1 << 16, (1 << 16) + 1, 3 << 16])
def test_a_long_response_is_sent_in_pieces(nbytes: int) -> None:
    async def long(scope: Any, receive: Any, send: Any) -> None:
        await send_json(send, 200, b"x" * nbytes)

    async def test() -> None:
        client = Client(front(long), "/v1/models", b"")
        await client.task
        assert client.complete
        assert client.body == b"x" * nbytes
        assert client.headers["content-length"] == str(nbytes)
        assert max(len(each["body"]) for each in client.sent[1:]) <= 1 << 16

    run(test)
