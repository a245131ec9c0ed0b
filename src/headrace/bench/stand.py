"""One source process, one decoder in this process and the owner between them, for benchmarks."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from typing import Any, Self

from headrace.backends.base import Decoder
from headrace.errors import HeadraceError
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle


class RequestFailed(HeadraceError):
    """A benchmark's request did not finish; the text is its reason."""


class Stand:
    """An owner with its decoder and one source; leaving the block ends all three."""

    def __init__(
        self,
        handle: SourceHandle,
        decoder: Decoder,
        *,
        context: int,
        facts: Mapping[str, Any] | None = None,
        look_s: float = 0.0,
        **limits: Any,
    ) -> None:
        """`handle`: of a source that was started. `facts`: of the pairing, as rows keep them.
        `look_s`: rest between two looks at fences, unless something comes in; a device that copies
        by itself takes no core away from a source that computes. `limits`: as `DecoderOwner` takes
        them.
        """
        self.decoder = decoder
        self.facts = dict(facts or {})
        self._look_s = look_s
        self.handle = handle
        self.owner = DecoderOwner(decoder, context=context, **limits)
        try:
            self.owner.attach(handle)
        except BaseException:
            self.close()
            raise

    def serve(self, tokens: Sequence[int], options: RequestOptions) -> Request:
        """Run one request alone, from an idle owner to an idle owner.

        Raises:
            RequestFailed: it did not finish.
        """
        request = self.owner.submit(tokens, options)
        while not request.done:
            self.owner.turn(1.0)
            if self._look_s and not request.done:
                select.select([self.owner], [], [], self._look_s)
        self.owner.drain()
        return finished(request)

    def close(self) -> None:
        """End the owner, its decoder and its source."""
        try:
            self.owner.close()
        finally:
            self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def finished(request: Request) -> Request:
    """A request that finished. Raises: RequestFailed: it did not."""
    if request.outcome != "finished" or request.measured is None:
        raise RequestFailed(f"a request {request.outcome or 'is not done'}: {request.reason}")
    return request


def choice_of(request: Request) -> dict[str, Any] | None:
    """What `auto` came to, as a row keeps it; None if another route was asked for."""
    choice = request.choice
    if choice is None:
        return None
    return {name: getattr(choice, name) for name in ("route", "group_layers", "chunk", "reason")}


def pairing_facts(decoder: Decoder) -> dict[str, Any]:
    """What the results of a decoder that computes depend on; empty of one that tells nothing."""
    return dict(getattr(decoder, "facts", {}))


def load_1min() -> float:
    """The machine's load average of the last minute."""
    return os.getloadavg()[0]
