"""Who may ask a server that asks for no key: not every web page that a browser here has open.

A page may send a request to any address, and gets to read the answer if its own name has come to
stand for that address (DNS rebinding). Both can be told by what a browser adds: `Host` is the name
that the page's address has, `Origin` the page's own.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import Any, Final
from urllib.parse import urlsplit

from headrace.errors import Refused
from headrace.server.terminals import Ending, Terminal

HOST: Final = re.compile(r"[A-Za-z0-9:.%_-]+")

_OTHERWISE = "use an address of this host, or have the server ask for a key"


def is_loopback(host: str) -> bool:
    """Whether a host's name or address stands for this host whoever resolves it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def address_of(
    host: str, port: int
) -> tuple[socket.AddressFamily, socket.SocketKind, int, tuple[Any, ...]]:
    """What to listen at: the family, kind and protocol of a socket, and its address.

    Raises:
        Refused: the name stands for no address here.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:  # a label that is empty or too long
        raise Refused(f"http.host {host!r} is no address: {exc}", field="http.host") from exc
    family, kind, proto, _, address = found[0]
    return family, kind, proto, address


def check_own(host: str) -> None:
    """Refuse what this host has no address for, by taking one of its ports for a moment.

    Raises:
        Refused: the name stands for no address, or for one of another host.
    """
    family, kind, proto, address = address_of(host, 0)
    try:
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except OSError as exc:
        raise Refused(
            f"http.host {host!r} cannot be listened at: {os.strerror(exc.errno or 0)}; give an "
            "address of this host",
            field="http.host",
        ) from exc


def check_asked(host: str, origin: str, method: str, *, own: str, allow_open: bool) -> None:
    """Look at `Host` and `Origin` of a request, "" where it has none.

    own: the address that is listened at. allow_open: whatever name it is asked by.

    Raises:
        Ending: it is one of a web page of elsewhere.
    """
    name = _name_of(host)
    if host and not allow_open and name != own.lower() and not is_loopback(name):
        text = f"Host is {host[:100]!r}, which is no name of this server; {_OTHERWISE}"
        raise Ending(Terminal.FORBIDDEN, text)
    if origin and method not in ("GET", "HEAD") and origin.partition("://")[2] != host:
        text = f"Origin is {origin[:100]!r}: a web page of elsewhere may not ask; {_OTHERWISE}"
        raise Ending(Terminal.FORBIDDEN, text)


def _name_of(host: str) -> str:
    """Without its port; "" if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""
