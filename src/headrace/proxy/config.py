"""What `headrace proxy` is started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.server.config import HttpConfig
from headrace.server.descriptors import descriptors_needed, raise_descriptors
from headrace.server.hosts import HOST, check_own, is_loopback

Prefill: TypeAlias = Literal["remote", "local", "by-header"]

KEEP_ALIVE_S: Final = 30.0
"""Longer than clients keep an idle connection: who closes first does not meet a request."""

MAX_DECODERS: Final = 256
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """decoders: addresses as `address_of` gives them. keys: whoever sends none of them is refused.

    min_tokens: shorter prompts are not prefilled remotely; 0 = no such rule.
    """

    decoders: tuple[str, ...]
    http: HttpConfig
    keys: tuple[str, ...] = ()
    prefill: Prefill = "remote"
    route: AskedRoute | None = None
    min_tokens: int = 0
    max_in_flight: int = 512
    first_byte_timeout_s: float = 600.0
    log_level: str = "info"

    @property
    def num_descriptors(self) -> int:
        """Connections of clients and to decoders."""
        return self.http.max_connections + self.max_in_flight


def address_of(given: str) -> str:
    """A decoder's address in the form in which two of the same are equal.

    Raises:
        Refused: it is none.
    """
    address = _address_of(given)
    if address is None:
        raise Refused(
            f"--decoder is {given!r}; give the address of a vllm serve: http://HOST:PORT",
            field="decoder",
        )
    parts = urlsplit(given)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise Refused(
            f"--decoder is {given!r}; give {parts.scheme}://{parts.netloc} without a path",
            field="decoder",
        )
    return address


def _address_of(given: str) -> str | None:
    """The part of a URL that names a decoder, if two readers of URLs agree that it does."""
    import httpx  # an extra, which the command looks for first

    try:
        parts, url = urlsplit(given), httpx.URL(given)
        host, port = url.raw_host.decode(), parts.port
        host.encode("idna")  # what no resolver would take is none
        same = host == parts.hostname and url.host != ""
        if ":" in host:
            host = ip_address(host).compressed
    except (ValueError, httpx.InvalidURL):
        return None
    if not given.isascii() or not given.isprintable() or "@" in parts.netloc:
        return None
    if not same or not HOST.fullmatch(host) or ("%" in host and ":" not in host):
        return None
    if parts.scheme not in _PORTS or port == 0:
        return None
    where = f"[{host}]" if ":" in host else host
    own = port is None or port == _PORTS[parts.scheme]
    return f"{parts.scheme}://{where}" + ("" if own else f":{port}")


def addresses_of(given: Sequence[str]) -> tuple[str, ...]:
    """The addresses of all decoders.

    Raises:
        Refused: one is none, is there twice, or there are too many.
    """
    found: list[str] = []
    for each in given:
        address = address_of(each)
        if address in found:
            raise Refused(f"--decoder {address} is given twice; give each once", field="decoder")
        found.append(address)
    if not 1 <= len(found) <= MAX_DECODERS:
        raise Refused(f"{len(found)} decoders; give 1 to {MAX_DECODERS}", field="decoder")
    return tuple(found)


def check_place(config: ProxyConfig) -> None:
    """Look whether it can be served here, and take what open files that needs.

    Raises:
        Refused: the host is none of this one's, nobody would be asked for a key, or too few files
            may be open.
    """
    host = config.http.host
    if not HOST.fullmatch(host):
        raise Refused(
            f"--host is {host!r}; give an address or a name, without a scheme and without a port",
            field="host",
        )
    if not config.keys and not is_loopback(host) and not config.http.allow_open:
        raise Refused(
            f"--host is {host} and nobody would be asked for a key; give --api-key-file, or say "
            "that it may be open with --allow-open",
            field="host",
        )
    check_own(host)
    try:
        raise_descriptors(config.num_descriptors)
    except Refused as exc:
        raise Refused(
            f"--max-in-flight {config.max_in_flight} needs more open files than this process may "
            f"have: set `ulimit -n` to {descriptors_needed(config.num_descriptors)}, or give less",
            field="max_in_flight",
        ) from exc
