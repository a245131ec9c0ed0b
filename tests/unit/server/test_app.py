"""Which path is answered by what."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from headrace.server.answering import Kind
from headrace.server.events import Rejected, Served
from tests.server_stand import CONTEXT, MODEL, Client, Stand, run, served_model


def test_health_tells_of_the_process_and_ready_of_what_can_take_work() -> None:
    async def test() -> None:
        stand = Stand(num_decoders=2)
        first, second = stand.decoders
        assert (await stand.done(stand.get("/health"))).json == {"status": "ok"}
        ready = await stand.done(stand.get("/ready"))
        assert ready.json == {"status": "ready", "decoders": {"d0": "ready", "d1": "ready"}}
        first.state, first.reason = "waiting", "it died"
        ready = await stand.done(stand.get("/ready"))
        assert (ready.status, ready.json["decoders"]["d0"]) == (200, "waiting: it died")
        second.state = "starting"
        ready = await stand.done(stand.get("/ready"))
        assert (ready.status, ready.json["status"]) == (503, "not ready")
        assert ready.json["decoders"]["d1"] == "starting"
        assert (await stand.done(stand.get("/health"))).status == 200

    run(test)


def test_reasons_are_told_to_who_may_use_the_server() -> None:
    async def test() -> None:
        stand = Stand(keys=("sk-1",))
        stand.decoder.state, stand.decoder.reason = "waiting", "no file /srv/secret"
        ready = await stand.done(stand.get("/ready"))
        assert (ready.status, ready.json["decoders"]) == (503, {"d0": "waiting"})
        known = await stand.done(stand.get("/ready", headers={"Authorization": "Bearer sk-1"}))
        assert known.json["decoders"] == {"d0": "waiting: no file /srv/secret"}

    run(test)


@pytest.mark.parametrize(
    ("lanes", "why"), [(1, "no source is in service"), (0, "no lane is in service")]
)
def test_a_decoder_that_is_up_and_lacks_something_says_what(
    lanes: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        stand = Stand()
        monkeypatch.setattr(type(stand.decoder), "ready", False)
        stand.decoder.lanes = lanes
        ready = await stand.done(stand.get("/ready"))
        assert (ready.status, ready.json["decoders"]) == (503, {"d0": why})

    run(test)


def test_models_are_listed_and_told_by_name() -> None:
    async def test() -> None:
        names = (MODEL, "organisation/model")
        stand = Stand(models={name: served_model(name) for name in names})
        listed = (await stand.done(stand.get("/v1/models"))).json
        assert (listed["object"], [each["id"] for each in listed["data"]]) == ("list", list(names))
        for card in listed["data"]:
            one = (await stand.done(stand.get(f"/v1/models/{card['id']}"))).json
            assert one == card
            assert (one["object"], one["max_model_len"]) == ("model", CONTEXT)
        unknown = await stand.done(stand.get("/v1/models/nobody's"))
        assert (unknown.status, unknown.error["code"]) == (404, "unknown-model")

    run(test)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_an_endpoint_answers_its_kind(kind: Kind) -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(kind)
        stand.decoder.say(choice, "a")
        stand.decoder.end(choice)
        await stand.done(client)
        names = {"completions": "text_completion", "chat": "chat.completion"}
        assert client.json["object"] == names[kind]
        assert client.headers["content-type"] == "application/json"
        assert int(client.headers["content-length"]) == len(client.body)

    run(test)


async def tokenized(stand: Stand, body: bytes) -> Client:
    client = Client(stand.app, "/tokenize", body)
    for _ in range(2000):  # it is done in a thread
        if client.task.done():
            break
        await stand.quiet()
    return await stand.done(client)


def test_tokenize_tells_the_ids_that_a_request_would_have() -> None:
    async def test() -> None:
        stand = Stand()
        said = await tokenized(stand, b'{"prompt": "hi", "return_token_strs": true}')
        assert said.json == {
            "count": 2,
            "max_model_len": CONTEXT,
            "tokens": list(b"hi"),
            "token_strs": ["h", "i"],
        }
        chat = await tokenized(stand, b'{"messages": [{"role": "user", "content": "hi"}]}')
        assert bytes(chat.json["tokens"]) == b"user: hi\nassistant: "
        bare = b'{"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false}'
        assert bytes((await tokenized(stand, bare)).json["tokens"]) == b"user: hi\n"
        refused = await tokenized(stand, b'{"messages": [{"role": "user", "content": "refuse"}]}')
        assert (refused.status, refused.error["param"]) == (400, "messages")

    run(test)


def test_tokenize_asks_for_a_model_where_there_are_several() -> None:
    async def test() -> None:
        stand = Stand(models={name: served_model(name) for name in (MODEL, "other")})
        refused = await tokenized(stand, b'{"prompt": "hi"}')
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert (await tokenized(stand, b'{"prompt": "hi", "model": "other"}')).status == 200
        assert (await tokenized(stand, b'{"prompt": "hi", "model": "none"}')).status == 404

    run(test)


def test_what_asks_nothing_of_an_owner_is_told_of_as_served_or_as_rejected() -> None:
    async def test() -> None:
        stand = Stand()
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ready"):
            await stand.done(stand.get(path))
        await tokenized(stand, b'{"prompt": "hi"}')
        told = [(each.endpoint, each.status) for each in stand.of(Served)]
        assert told == [("models", 200), ("models", 200), ("tokenize", 200)]
        await tokenized(stand, b"{}")
        for path in ("/v1/models/nobody", "/nowhere"):
            await stand.done(stand.get(path))
        assert len(stand.of(Served)) == len(told)
        refused = [(each.endpoint, each.status) for each in stand.of(Rejected)]
        assert refused == [("tokenize", 400), ("models", 404), ("other", 404)]

    run(test)
