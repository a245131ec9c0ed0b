"""Addresses of decoders, and where the proxy may listen."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from headrace.errors import Refused
from headrace.proxy.config import (
    MAX_DECODERS,
    ProxyConfig,
    address_of,
    addresses_of,
    check_place,
)
from headrace.server.config import HttpConfig


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://Host:8001/", "http://host:8001"),
        ("HTTPS://host", "https://host"),
        ("http://[::1]:8001", "http://[::1]:8001"),
        ("http://[0:0::1]:8001", "http://[::1]:8001"),
        ("http://[fe80::1%eth0]:1", "http://[fe80::1%eth0]:1"),
        ("http://host:08001", "http://host:8001"),
        *(("http://host:80", "http://host"), ("http://host:", "http://host")),
        *(("https://host:443", "https://host"), ("https://host:80", "https://host:80")),
        ("http://xn--bcher-kva:1", "http://xn--bcher-kva:1"),
        ("http://a_vllm.svc-1:1", "http://a_vllm.svc-1:1"),
    ],
)
def test_an_address_has_one_form(given: str, address: str) -> None:
    assert address_of(given) == address


@pytest.mark.parametrize(
    "given",
    [
        *("", "127.0.0.1:8001", "ftp://host", "http://", "http://:8001", "http://host:0"),
        *(
            "http://host:99999",
            "http://host:x",
            "http://u:p@host",
            "http://h\u00e9",
            "http://h\x7f",
        ),
        *("http://[::1", "http://a..b", f"http://{'a' * 64}"),
        *("http://256.1.1.1:1", "http://[::1]x:8001", "http://[::x]:1", "http://xn--a:1"),
        *("http://a b:1", "http://h\\x:1", "http://ho<st:1", "http://a%20b:1", "http://h,i:1"),
    ],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(Refused, match="give the address of a vllm serve") as refused:
        address_of(given)
    assert refused.value.field == "decoder"


@pytest.mark.parametrize("more", ["/v1", "/v1/", "?a", "#a"])
def test_an_address_has_no_path(more: str) -> None:
    with pytest.raises(Refused, match="give http://host:1 without a path"):
        address_of(f"http://host:1{more}")


def test_decoders_are_given_once() -> None:
    assert addresses_of(["http://a", "http://b/"]) == ("http://a", "http://b")
    with pytest.raises(Refused, match="http://a is given twice"):
        addresses_of(["http://a", "http://A:80/"])
    with pytest.raises(Refused, match="http://a:8001 is given twice"):
        addresses_of(["http://a:8001", "http://a:08001"])
    for given in ([], [f"http://h{at}" for at in range(MAX_DECODERS + 1)]):
        with pytest.raises(Refused, match=f"{len(given)} decoders"):
            addresses_of(given)


def config(host: str = "127.0.0.1", **more: Any) -> ProxyConfig:
    http = HttpConfig(host=host, allow_open=more.pop("allow_open", False))
    return ProxyConfig(decoders=("http://a",), http=http, **more)


def test_this_host_needs_no_key_and_others_do() -> None:
    check_place(config())
    check_place(config("0.0.0.0", keys=("k",)))
    check_place(config("0.0.0.0", allow_open=True))
    with pytest.raises(Refused, match="nobody would be asked for a key"):
        check_place(config("0.0.0.0"))


@pytest.mark.parametrize("host", ["", "http://host", "a b"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="--host is"):
        check_place(config(host, keys=("k",)))


def test_more_open_files_than_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(Refused, match="set `ulimit -n` to 6536, or give less") as refused:
        check_place(config(max_in_flight=5000))
    assert refused.value.field == "max_in_flight"
