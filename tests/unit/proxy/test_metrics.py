"""What `/metrics` says."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from headrace.proxy.metrics import FAULTS, PREFIX, WHERES
from tests.docs.reading import ROOT
from tests.server_stand import run
from tests.unit.proxy.stand import ONE, TWO, ProxyStand


def names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def test_it_tells_who_is_up_and_what_each_has() -> None:
    async def test() -> None:
        stand = ProxyStand(ONE, TWO)
        first, second = stand.pool.decoders
        stand.pool.went_down(second, "it died")
        with first.busy(), first.busy():
            assert stand.count("requests_in_flight", decoder=ONE) == 2
        assert stand.count("requests_in_flight") == 0
        assert stand.count("decoder_up", decoder=ONE) == 1
        assert stand.count("decoder_up", decoder=TWO) == 0

    run(test)


def test_series_of_closed_sets_begin_at_0_and_each_proxy_has_its_own() -> None:
    async def test() -> None:
        stand, other = ProxyStand(), ProxyStand()
        stand.metrics.disconnects.inc()
        assert other.count("client_disconnects_total") == 0
        text = stand.metrics.exposition().decode()
        for reason in FAULTS:
            assert f'upstream_failures_total{{decoder="{ONE}",reason="{reason}"}} 0.0' in text
        for where in WHERES:
            assert f'prefills_total{{where="{where}"}} 0.0' in text

    run(test)


def test_it_says_what_was_asked_and_not_what_was_done() -> None:
    async def test() -> None:
        text = ProxyStand().metrics.exposition().decode()
        assert f"{PREFIX}prefills_total Completions by where they are asked to be" in text
        docs = (ROOT / "docs" / "proxy.md").read_text(encoding="utf-8")
        assert "vllm:headrace_num_local_prefills_total" in docs

    run(test)


def test_the_docs_name_every_metric_and_no_other() -> None:
    async def test() -> None:
        text = ProxyStand().metrics.exposition().decode()
        shown = {each for each in names(text) if not each.endswith("_created")}
        assert all(each.startswith(PREFIX) for each in shown)
        docs = (ROOT / "docs" / "proxy.md").read_text(encoding="utf-8")
        assert set(re.findall(rf"{PREFIX}\w+", docs)) == shown

    run(test)


def test_a_scrape_is_answered_in_prometheus_words() -> None:
    async def test() -> None:
        client = await (stand := ProxyStand()).done(stand.get("/metrics"))
        assert client.status == 200
        assert client.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert names(client.body.decode())

    run(test)
