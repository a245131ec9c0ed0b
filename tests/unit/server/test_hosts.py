"""Which names stand for this host, and what of a request's headers is a web page of elsewhere."""

from __future__ import annotations

import socket

import pytest

from headrace.errors import Refused
from headrace.server.hosts import address_of, check_asked, check_own, is_loopback
from headrace.server.terminals import Ending, Terminal


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.255.0.1", "::1", "::1%lo"])
def test_a_name_of_this_host(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "127.0.0.1.nip.io", "local", "10.0.0.1"])
def test_a_name_that_may_be_of_another(host: str) -> None:
    assert not is_loopback(host)


def test_where_to_listen() -> None:
    family, kind, _, address = address_of("127.0.0.1", 8000)
    assert (family, kind) == (socket.AF_INET, socket.SOCK_STREAM)
    assert address == ("127.0.0.1", 8000)


@pytest.mark.parametrize("host", ["300.1.1.1", "127.0.0.1:80", "a..b"])
def test_a_name_of_no_address_is_refused(host: str) -> None:
    with pytest.raises(Refused, match=f"^http.host '{host}' is no address: ") as told:
        address_of(host, 8000)
    assert told.value.field == "http.host"


def test_an_address_of_another_host_is_refused() -> None:
    check_own("127.0.0.1")
    check_own("0.0.0.0")
    said = "^http.host '192.0.2.1' cannot be listened at: .*; give an address of this host$"
    with pytest.raises(Refused, match=said) as told:
        check_own("192.0.2.1")  # of the documentation's network
    assert told.value.field == "http.host"


@pytest.mark.parametrize(
    ("host", "origin", "method", "own", "allow_open", "served"),
    [
        ("", "", "POST", "127.0.0.1", False, True),  # HTTP/1.0, which no browser speaks
        ("localhost:8000", "", "POST", "127.0.0.1", False, True),
        ("Lab.Example:8000", "", "POST", "lab.example", False, True),
        ("lab.example", "", "GET", "127.0.0.1", False, False),
        ("lab.example", "", "POST", "0.0.0.0", True, True),
        ("[::1", "", "GET", "127.0.0.1", False, False),
        ("[::1]:1", "http://[::1]:1", "POST", "127.0.0.1", False, True),
        ("[::1]:1", "http://[::1]:2", "POST", "127.0.0.1", False, False),
        ("[::1]:1", "null", "DELETE", "0.0.0.0", True, False),
        ("[::1]:1", "http://evil.example", "GET", "127.0.0.1", False, True),  # it cannot read it
    ],
)
def test_what_a_page_of_elsewhere_asks_is_refused(
    host: str, origin: str, method: str, own: str, allow_open: bool, served: bool
) -> None:
    if served:
        check_asked(host, origin, method, own=own, allow_open=allow_open)
        return
    with pytest.raises(Ending) as refused:
        check_asked(host, origin, method, own=own, allow_open=allow_open)
    assert (refused.value.terminal, refused.value.status) == (Terminal.FORBIDDEN, 403)
