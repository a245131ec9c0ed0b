"""What is odd in a config is said in one sentence, and what is not odd is not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.server.config_file import parse_config
from headrace.server.config_warnings import many, warnings_of

CORES = 8


@pytest.fixture(autouse=True)
def _small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))


def decoder(own: str = "", sources: str = "", *, context: int = 64) -> str:
    return f"[[decoders]]\nmodel = 'm'\ncontext = {context}\n{own}\n{sources}\n"


def warnings(text: str, lanes: int = 4) -> list[str]:
    config = parse_config(text, "f")
    return warnings_of(config, [lanes] * len(config.decoders))


def test_nothing_is_odd_in_a_plain_config() -> None:
    assert warnings(decoder()) == []


def test_more_threads_than_cores() -> None:
    found = warnings(decoder("threads = 5", "[[decoders.sources]]\nthreads = 4"))
    assert found == [
        "decoders and sources have 9 threads in all and this host gives 8 cores: they slow each "
        "other down"
    ]
    assert warnings(decoder("threads = 4", "[[decoders.sources]]\nthreads = 4")) == []


def test_a_decoder_that_decodes_nothing() -> None:
    (found,) = warnings(decoder("decoder = 'null'"))
    assert found.startswith("decoders[0].decoder is null, which decodes nothing")


def test_a_server_that_anybody_may_use() -> None:
    text = decoder() + "[http]\nallow_open = true\nhost = "
    assert warnings(f"{text}'0.0.0.0'") == ["http.host is 0.0.0.0 and anybody may use it"]
    assert warnings(f"{text}'127.0.0.1'") == []


@pytest.mark.parametrize("prefix", ["identical", "shared"])
def test_a_prefix_that_has_no_effect(prefix: str) -> None:
    def found(own: str, sources: str = "", asked: str = prefix) -> list[str]:
        return warnings(f"{decoder(own, sources)}[requests]\nprefix = '{asked}'")

    said = f"requests.prefix is {prefix} and decoders[0] has no keep_bytes: it has no effect"
    assert found("") == [said]
    assert found("", asked="off") == []
    for own in ("keep_bytes = 4096", "options = { keep_nbytes = 4096 }", "decoder = 'x:y'"):
        assert found(own) == []
    assert found("", "[[decoders.sources]]\noptions = { own_cache_nbytes = 4096 }") == []
    assert found("decoder = 'null'")[-1].endswith("decoders[0] keeps no prompts: it has no effect")


def test_a_queue_that_never_has_room() -> None:
    def found(queue: str) -> list[str]:
        return warnings(f"{decoder(context=512)}[queue]\n{queue}\n[requests]\nmax_choices = 4")

    assert found("max_bytes = 2560\nmax_requests = 4") == []
    assert found("max_bytes = 2559") == [
        "queue.max_bytes is 2559 and decoders[0].context is 512: a prompt of more than 511 tokens "
        "is answered 413"
    ]
    assert found("max_requests = 3") == [
        "queue.max_requests is 3 and requests.max_choices is 4: a request of more than 3 choices "
        "is answered 413"
    ]


def test_a_control_socket_of_another_owner(tmp_path: Path) -> None:
    text = decoder(f"control = '{tmp_path}/s'")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        (found,) = warnings(text)
    assert found.startswith(f"decoders[0].control: an owner listens at {tmp_path}/s")
    assert warnings(text) == []


def test_one_name_for_decoders_of_different_contexts() -> None:
    """A request that the larger could hold is refused; nobody else would say why."""
    found = warnings(decoder() + decoder(context=128) + decoder(context=32))
    assert found == [
        "decoders[1].context is 128 and decoders[2].context is 32, and both are served as m: a "
        "request has to fit the smallest"
    ]
    assert warnings(decoder() + decoder()) == []
    other = decoder("served_as = ['other']", context=128)
    assert warnings(decoder() + other) == []


def test_a_batch_that_the_lanes_never_fill() -> None:
    text = decoder("decode_batch = 3")
    assert warnings(text, lanes=2) == [
        "decoders[0].decode_batch is 3 and it has 2 lanes: no more are decoded at once"
    ]
    assert warnings(text, lanes=3) == []


def test_counts_have_their_word() -> None:
    assert (many(1, "lane"), many(2, "lane"), many(0, "slot")) == ("1 lane", "2 lanes", "0 slots")
