"""The decoders: which are up, what each has in flight, and who gets the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import httpx

from headrace.proxy.upstream import request_to

EVERY_S: Final = 1.0
ANSWERS_WITHIN_S: Final = 5.0
"""A decoder that is busy answers late; one that is stopped does not."""

_log = logging.getLogger("headrace.proxy")


class Decoder:
    """One decoder. why: what is wrong with it; "" while it is up."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.why = "not asked yet"
        self.in_flight = 0

    @property
    def up(self) -> bool:
        """Whether it takes requests."""
        return not self.why

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One request more is in flight in the block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Pool:
    """All decoders, each in one of two states: up, or left out until it answers."""

    def __init__(self, addresses: Sequence[str], transport: httpx.AsyncBaseTransport) -> None:
        self.decoders = tuple(Decoder(address) for address in addresses)
        self._transport = transport
        self._next = 0

    @property
    def any_up(self) -> bool:
        """Whether a request can go anywhere."""
        return any(each.up for each in self.decoders)

    def choose(self) -> Decoder | None:
        """Of those that are up, the one with the least in flight; of several, in turn."""
        count = len(self.decoders)
        turns = [(self._next + at) % count for at in range(count)]
        up = [at for at in turns if self.decoders[at].up]
        if not up:
            return None
        chosen = min(up, key=lambda at: self.decoders[at].in_flight)
        self._next = (chosen + 1) % count
        return self.decoders[chosen]

    def went_down(self, decoder: Decoder, why: str) -> None:
        """Leave it out until it answers again."""
        if decoder.up:
            _log.warning("decoder %s is down: %s", decoder.address, why)
        decoder.why = why

    async def look(self, decoder: Decoder) -> None:
        """Ask it how it is."""
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                request = request_to(decoder.address, "/health")
                reply = await self._transport.handle_async_request(request)
                await reply.aclose()
        except TimeoutError:
            self.went_down(decoder, f"/health is not answered within {ANSWERS_WITHIN_S:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:  # it ends no other's watch
            self.went_down(decoder, reason_of(exc))
        else:
            if not reply.is_success:
                self.went_down(decoder, f"/health is answered {reply.status_code}")
                return
            if not decoder.up:
                _log.info("decoder %s is up", decoder.address)
            decoder.why = ""

    async def look_at_all(self) -> None:
        """Ask each once, all at the same time."""
        await asyncio.gather(*(self.look(each) for each in self.decoders))

    async def watch(self) -> None:
        """Ask each again and again; one that hangs holds up no other. It does not return."""
        async with asyncio.TaskGroup() as group:
            for decoder in self.decoders:
                group.create_task(self._watch(decoder))

    async def _watch(self, decoder: Decoder) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look(decoder)


def reason_of(exc: Exception) -> str:
    """Why a decoder was not reached, in words; httpx has some errors without any."""
    return str(exc) or type(exc).__name__
