"""Where the server listens; how it starts and ends is in tests/faults/test_serve.py."""

from __future__ import annotations

import errno
import socket

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headrace.errors import Refused
from headrace.server.config import HttpConfig
from headrace.server.serving import _bind_text, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_free_port_is_taken(host: str) -> None:
    with listen(HttpConfig(host=host, port=0)) as sock:
        port = sock.getsockname()[1]
        assert port
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_refused() -> None:
    with listen(HttpConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(Refused, match="in use by another process") as told:
            listen(HttpConfig(port=port))
    assert told.value.field == "http.port"
    with listen(HttpConfig(port=port)):  # at once, whatever connections linger
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "127.0.0.1:80"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(Refused) as told:
        listen(HttpConfig(host=host, port=0))
    assert told.value.field == "http.host"


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be listened at"):
        listen(HttpConfig(host="192.0.2.1", port=0))  # of the documentation's network


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
