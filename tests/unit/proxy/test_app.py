"""What the proxy answers itself."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from tests.server_stand import run
from tests.unit.proxy.stand import ONE, TWO, ProxyStand


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_it_is_well_while_any_decoder_is_up(path: str) -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO)
        first, second = stand.pool.decoders
        stand.pool.went_down(first, "it died")
        with second.busy():
            well = await stand.done(stand.get(path))
        assert (well.status, well.json["status"]) == (200, "ok")
        assert well.json["decoders"] == [
            {"address": ONE, "up": False, "in_flight": 0, "why": "it died"},
            {"address": TWO, "up": True, "in_flight": 1, "why": ""},
        ]
        stand.pool.went_down(second, "too")
        ill = await stand.done(stand.get(path))
        assert (ill.status, ill.json["status"]) == (503, "no decoder is up")
        assert stand.calls == []

    run(test)


def test_where_keys_are_asked_for_decoders_are_told_to_who_has_one() -> None:
    async def test() -> None:
        stand = ProxyStand(keys=("sk-1",))
        assert (await stand.done(stand.get("/health"))).json == {"status": "ok"}
        known = await stand.done(stand.get("/health", headers={"Authorization": "Bearer sk-1"}))
        assert known.json["decoders"][0]["address"] == ONE
        for path in ("/v1/models", "/metrics"):
            refused = await stand.done(stand.get(path))
            assert (refused.status, refused.error["code"]) == (401, "unauthorized")
        assert stand.calls == []

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/m", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
    ],
)
def test_nothing_else_is_served(method: str, path: str, status: int) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client = await stand.done(stand.get(path, method=method))
        assert client.status == status
        assert path in client.error["message"]
        assert stand.calls == []
        assert stand.count("requests_total", decoder="none", status=str(status)) == 1

    run(test)


def test_what_is_refused_is_counted_by_its_endpoint() -> None:
    async def test() -> None:
        stand = ProxyStand(keys=("sk-1",))
        for name in ("completions", "tokenize", "detokenize"):
            assert (await stand.done(stand.ask(name))).status == 401
            known = {"Authorization": "Bearer sk-1"}
            assert (await stand.done(stand.ask(name, headers=known, raw=b"{"))).status == 400
            for status in ("401", "400"):
                assert stand.count("requests_total", endpoint=name, status=status) == 1
        assert stand.count("requests_total", endpoint="other") == 0

    run(test)


@pytest.mark.parametrize("given", ["", "with a space", "x" * 129])
def test_an_id_that_is_none_is_replaced(given: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        client, call = await stand.asked(headers={"X-Request-Id": given})
        call.answer(b"{}")
        await stand.done(client)
        made = client.headers["x-request-id"]
        assert made not in ("", given)
        assert len(made) == (24 if given else 32)
        assert call.request.headers.get_list("x-request-id") == [made]

    run(test)
