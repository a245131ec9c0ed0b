"""Where the server listens; its connections are in test_protocol.py."""

from __future__ import annotations

import errno
import socket

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headrace.errors import Refused
from headrace.server.config import HttpConfig
from headrace.server.wire import _bind_text, bind, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_free_port_is_taken(host: str) -> None:
    http = HttpConfig(host=host, port=0)
    with bind(http) as sock:
        port = sock.getsockname()[1]
        assert port
        with pytest.raises(ConnectionRefusedError):  # nobody waits for a server that checks
            socket.create_connection(("127.0.0.1", port))
        listen(sock, http)
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_refused() -> None:
    with bind(HttpConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        http = HttpConfig(port=port)
        listen(sock, http)
        with pytest.raises(Refused, match="in use by another process") as told:
            bind(http)
    assert told.value.field == "http.port"
    with bind(http) as first, bind(http) as second:  # at once, whatever connections linger
        listen(first, http)
        with pytest.raises(Refused, match="in use by another process") as told:
            listen(second, http)
    assert told.value.field == "http.port"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "127.0.0.1:80"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(Refused) as told:
        bind(HttpConfig(host=host, port=0))
    assert told.value.field == "http.host"


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be listened at"):
        bind(HttpConfig(host="192.0.2.1", port=0))  # of the documentation's network


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EADDRINUSE, "in use"),
        (errno.EACCES, "from 1024 up"),
        (errno.ENOBUFS, "another host or port"),
    ],
)
def test_each_failure_says_what_to_do(number: int, text: str) -> None:
    assert text in _bind_text(HttpConfig(), OSError(number, "x"))
