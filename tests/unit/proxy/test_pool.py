"""Who gets the next request, and who is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from headrace.proxy import pool as pools
from headrace.proxy.pool import Decoder, Pool
from tests.server_stand import run
from tests.unit.proxy.stand import ONE, TWO, ProxyStand

THREE = "http://three:8003"


def chosen(pool: Pool) -> str:
    found = pool.choose()
    assert found is not None
    return found.address


def test_of_several_with_the_same_load_each_has_its_turn() -> None:
    async def test() -> None:
        pool = ProxyStand(ONE, TWO, THREE).pool
        assert [chosen(pool) for _ in range(4)] == [ONE, TWO, THREE, ONE]

    run(test)


def test_the_one_with_the_least_in_flight_is_chosen() -> None:
    async def test() -> None:
        pool = ProxyStand(ONE, TWO, THREE).pool
        first, second, third = pool.decoders
        with first.busy(), second.busy(), second.busy(), third.busy():
            assert [chosen(pool) for _ in range(3)] == [ONE, THREE, ONE]
            with first.busy(), third.busy(), third.busy():
                assert [chosen(pool) for _ in range(2)] == [TWO, ONE]
        assert [each.in_flight for each in pool.decoders] == [0, 0, 0]

    run(test)


def test_one_that_is_down_is_left_out_until_it_answers() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO)
        first, second = stand.pool.decoders
        stand.pool.went_down(first, "why not")
        assert [chosen(stand.pool) for _ in range(2)] == [TWO, TWO]
        stand.pool.went_down(second, "it too")
        assert stand.pool.choose() is None
        assert not stand.pool.any_up
        await stand.pool.look(first)
        assert (first.up, first.why, chosen(stand.pool)) == (True, "", ONE)

    run(test)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (httpx.ConnectError("refused"), "refused"),
        (httpx.ReadError(""), "ReadError"),
        (httpx.InvalidURL("no"), "no"),
        (UnicodeError("label too long"), "label too long"),
        (500, "/health is answered 500"),
        (None, "/health is not answered within 0.01 s"),
    ],
)
def test_what_its_health_comes_to(
    failure: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        stand = ProxyStand(up=False)
        (decoder,) = stand.pool.decoders
        with caplog.at_level("INFO", "headrace.proxy"):
            await stand.pool.look_at_all()
            assert decoder.up
            await stand.pool.look_at_all()
            if isinstance(failure, Exception):
                stand.decoders.refuse[ONE] = failure
            elif failure is None:
                monkeypatch.setattr(pools, "ANSWERS_WITHIN_S", 0.01)
                name = "handle_async_request"
                monkeypatch.setattr(stand.decoders, name, lambda request: asyncio.Event().wait())
            else:
                stand.decoders.health[ONE] = failure
            await stand.pool.look_at_all()
            await stand.pool.look_at_all()
        assert (decoder.up, decoder.why) == (False, why)
        up, down = f"decoder {ONE} is up", f"decoder {ONE} is down: {why}"
        assert [each.message for each in caplog.records] == [up, down]

    run(test)


@pytest.mark.parametrize("location", ["mailto:x", "foo:bar", "//xn--a/", "http://[", "/ok"])
def test_where_its_health_points_to_is_not_looked_at(location: str) -> None:
    async def test() -> None:
        stand = ProxyStand()
        stand.decoders.health[ONE], stand.decoders.location = 302, location
        await stand.pool.look_at_all()
        assert stand.pool.decoders[0].why == "/health is answered 302"
        assert stand.decoders.looks == [ONE]

    run(test)


def test_each_is_asked_again_and_again_and_one_that_hangs_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO)
        looked: list[str] = []

        async def look(decoder: Decoder) -> None:
            looked.append(decoder.address)
            if decoder.address == ONE:
                await asyncio.Event().wait()

        monkeypatch.setattr(pools, "EVERY_S", 0)
        monkeypatch.setattr(stand.pool, "look", look)
        watching = asyncio.ensure_future(stand.pool.watch())
        await stand.until(lambda: looked.count(TWO) > 3)
        assert looked.count(ONE) == 1
        watching.cancel()
        await asyncio.wait({watching})
        assert watching.cancelled()

    run(test)
