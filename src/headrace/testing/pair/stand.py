"""One owner on the lent decoder with its source, taken step by step.

What a source does is decided by gates and seen by events; what the owner has taken in is seen by
turning it until a condition holds. There is no sleep.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from headrace.errors import PeerDied, Refused
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import SourceHandle
from headrace.testing.conformance_decoder import state_counts
from headrace.testing.conformance_engine import require
from headrace.testing.faulty import Point
from headrace.testing.pair.gate import Gate
from headrace.testing.pair.subject import Lent, Pair, PairGone, Result, StartedSource

_TURN_S = 0.05


class Stand:
    """One owner, its sources, and the orders that they were given."""

    def __init__(
        self,
        pair: Pair,
        *,
        num_lanes: int | None = None,
        num_slots: int = 2,
        restart: RestartPolicy | None = None,
        **limits: Any,
    ) -> None:
        """`restart`: of the first source. `limits`: as `DecoderOwner` takes them."""
        self.pair = pair
        self.num_slots = num_slots
        self.sources: list[StartedSource] = []
        self._gates: list[Gate] = []
        self._decoder = Lent(pair.decoder, num_lanes)
        self.owner = DecoderOwner(self._decoder, context=pair.settings.context, **limits)
        self._at_rest = state_counts(pair.decoder)
        try:
            self.attach(restart)
        except BaseException:
            self.close()
            raise

    @property
    def num_lanes(self) -> int:
        return self._decoder.caps.max_lanes

    @property
    def source(self) -> SourceHandle:
        """The source that came into service last: attached, or started again by the owner."""
        known = [each for each in self.owner._handles.values() if isinstance(each, SourceHandle)]
        return known[-1] if known else self.sources[-1].handle

    @property
    def healthy(self) -> bool:
        """Whether the next case can use it: its source lives and nothing is held."""
        return not self.source.died() and self._all_free()

    def attach(self, restart: RestartPolicy | None = None) -> None:
        """Start one more source and take it; `restart`: and another each time that it dies.

        Raises: PairGone: it cannot be had any more.
        """
        living = sum(not source.handle.died() for source in self.sources)
        self.until(  # else the next request may be granted to one that is known to be dead later
            lambda: sum(self.counts("slots").values()) == living * self.num_slots,
            "dead sources are buried",
        )
        try:
            started = self.pair.start_source(self.num_slots)
            self.sources.append(started)
            self.owner.attach(started.handle, restart=restart)
        except (Refused, PeerDied) as exc:
            if self.pair.references:  # there was one before
                raise PairGone(f"no new source can be had: {exc}") from exc
            raise

    # Requests.

    def options(self, **changes: Any) -> RequestOptions:
        """How a request is asked for here: as finely cut as the source emits, unless told."""
        manifest = self.pair.source_manifest
        asked = RequestOptions(
            route="streamed" if manifest.emits else "whole",
            emission=manifest.emits[0] if manifest.emits else "layers",
            max_tokens=self.num_decoded,
            audit=manifest.first == "logits",
        )
        return replace(asked, **changes)

    @property
    def num_decoded(self) -> int:
        """Tokens that a request asks for unless told otherwise."""
        pair = self.pair
        return pair.settings.num_decoded if pair.decodes else pair.num_tokens_chosen

    def submit(
        self,
        tokens: Sequence[int],
        *,
        on_token: Callable[[int], None] | None = None,
        **changes: Any,
    ) -> Request:
        return self.owner.submit(tokens, self.options(**changes), on_token=on_token)

    def hold(self, tokens: Sequence[int], **changes: Any) -> Request:
        """A published entry that is kept, as a neighbour whose bytes must not change."""
        request = self.submit(tokens, hold=True, audit=False, **changes)
        self.until_done(request)
        require(request.outcome == "finished", f"a neighbour {_ended(request)}")
        return request

    def serve(
        self, tokens: Sequence[int], *, within_s: float | None = None, **changes: Any
    ) -> Result:
        """What comes of a request that is alone."""
        request = self.submit(tokens, **changes)
        self.until_done(request, within_s=within_s)
        return self.result(request, tokens)

    def result(self, request: Request, tokens: Sequence[int]) -> Result:
        """What came of a request that must have finished."""
        require(request.outcome == "finished", f"the request {_ended(request)}")
        if request.options.audit:
            return Result(tuple(request.tokens), request.logits_digest, request.kv_digests)
        # A source that gives a token and no logits: its cells are read of an entry that is held.
        same = replace(request.options, hold=True, audit=False)
        held = self.owner.submit(tokens, same)
        self.until_done(held)
        require(held.outcome == "finished", f"the request {_ended(held)}")
        kv = self.kv_of(held)
        self.owner.release(held)
        return Result(tuple(request.tokens), "", kv)

    def kv_of(self, held: Request) -> tuple[str, ...]:
        """Digests of a held entry's cells, layer by layer, as landed."""
        plan = self.owner.plan_of(held)
        digests = []
        for layer in plan.layers:
            digest = hashlib.blake2b(digest_size=16)
            for part in range(len(layer.parts)):
                digest.update(self.owner.read(held, layer.index, part))
            digests.append(digest.hexdigest())
        return tuple(digests)

    def reference(
        self, tokens: Sequence[int], *, num_decoded: int | None = None, prefill_chunk: int = 0
    ) -> Result:
        """What a prompt gives when it is alone and takes the whole route; measured once."""
        wanted = self.num_decoded if num_decoded is None else num_decoded
        key = tuple(tokens), wanted, prefill_chunk
        if key not in self.pair.references:
            require(self.counts("lanes")["free"] > 0, "no lane is free to measure a prompt alone")
            self.pair.references[key] = self.serve(
                tokens, route="whole", max_tokens=wanted, prefill_chunk=prefill_chunk
            )
        return self.pair.references[key]

    def check_exact(self, request: Request, tokens: Sequence[int], what: str) -> None:
        """A request finished with what its prompt gives alone."""
        chunk, wanted = request.options.prefill_chunk, request.options.max_tokens
        alone = self.reference(tokens, num_decoded=wanted, prefill_chunk=chunk)
        difference = alone.difference(self.result(request, tokens))
        require(not difference, f"{what} differs from it alone: {difference}")

    def check_held(self, held: Request, tokens: Sequence[int], what: str) -> None:
        """A held entry still has the bytes that its prompt gives alone."""
        alone = self.reference(tokens)._replace(tokens=(), logits="")
        difference = alone.difference(Result((), "", self.kv_of(held)))
        require(not difference, f"{what} was changed: {difference}")

    def check_exact_now(self) -> None:
        """The next request is exact."""
        tokens = self.pair.prompt(12, seed=10_000)
        self.reference(tokens)
        request = self.submit(tokens)
        self.until_done(request)
        self.check_exact(request, tokens, "the next request")

    def check_next(self) -> None:
        """The next request is exact, and the ledger is back to where it began."""
        self.check_exact_now()
        self.settle()

    # Orders, and how far everyone is.

    def order(self, tokens: Sequence[int], *, source: int = -1, **order: Any) -> Gate:
        """Tell a source, by default the newest, what to do with a prompt; fields of `Order`, and
        `gated`.
        """
        gate = Gate(self.sources[source].control, tokens, **order)
        self._gates.append(gate)
        self.owner.watch(gate.fileno(), gate.take_in)
        return gate

    @contextmanager
    def ordering(self, tokens: Sequence[int], **order: Any) -> Iterator[Gate]:
        """The same for as long as the block runs."""
        gate = self.order(tokens, **order)
        try:
            yield gate
        finally:
            self.withdraw(gate)

    def withdraw(self, gate: Gate) -> None:
        """Take an order back; its events are complete as of now. Once more is harmless."""
        if gate not in self._gates:
            return
        self._gates.remove(gate)
        self.owner.unwatch(gate.fileno())
        gate.take_in()
        gate.close()

    def until(
        self, condition: Callable[[], bool], what: str, within_s: float | None = None
    ) -> float:
        """Turn the owner until `condition` holds; returns the seconds that it took."""
        within_s = within_s or self.pair.settings.within_s
        begun_s = time.monotonic()
        while not condition():
            if time.monotonic() - begun_s > within_s:
                raise AssertionError(
                    f"not within {within_s:.3g} s: {what}; {self.owner.statistics()}"
                )
            self.owner.turn(_TURN_S)
        return time.monotonic() - begun_s

    def until_done(self, *requests: Request, within_s: float | None = None) -> float:
        return self.until(
            lambda: all(request.done for request in requests), "the requests are done", within_s
        )

    def until_at(self, gate: Gate, request: Request, point: Point, number: int = 1) -> None:
        """The source waits at a point, and the owner has taken in all that it told before."""

        self.until(
            lambda: gate.count(point) >= number or _ended_early(request),
            f"{point} {number} of the source",
        )
        require(
            gate.count(point) >= number,
            f"before {point} {number} of its source the request {_ended(request)}",
        )
        self.owner.turn(0.0)  # what was told before the event lies in the channel by now

    def allow_until(self, gate: Gate, request: Request, point: Point, number: int = 1) -> None:
        """Let the source go on to a point, which it then waits at."""
        self.until_at(gate, request, "begin")
        while gate.count(point) < number:
            at = gate.events[-1]
            require(at.point != "return", f"{point} {number} never came")
            gate.allow()
            self.until(lambda at=at: gate.events[-1] is not at or _ended_early(request), "a step")  # type: ignore[misc]
            require(gate.events[-1] is not at, f"after {at.point} the request {_ended(request)}")
        self.owner.turn(0.0)

    def counts(self, what: str) -> dict[str, int]:
        return self.owner.statistics()[what]

    def num_dropped(self) -> int:
        """Messages that were refused or dropped, whatever for."""
        return sum(self.counts("dropped").values())

    def until_free(self) -> float:
        """Every lane and slot is free again; returns the seconds until then."""
        return self.until(self._all_free, "all lanes and slots are free")

    def settle(self) -> None:
        """All is free, adds up, and the decoder's own counts are what they were at first."""
        self.until_free()
        self.owner.check_integrity()
        now = state_counts(self.pair.decoder)
        require(now == self._at_rest, f"the decoder counts {now}, and {self._at_rest} at first")

    def _all_free(self) -> bool:
        slots, lanes = self.counts("slots"), self.counts("lanes")
        return (
            self.owner.idle
            and slots.get("free", 0) == sum(slots.values())
            and lanes["free"] == self.num_lanes
        )

    # What happens to a source.

    def kill(self, source: SourceHandle | None = None) -> None:
        (source or self.source).kill()

    def stop(self) -> None:
        signal.pidfd_send_signal(self.source.death_fd, signal.SIGSTOP)

    def resume(self) -> None:
        signal.pidfd_send_signal(self.source.death_fd, signal.SIGCONT)

    def close(self) -> None:
        """End the owner and its sources; the decoder goes on.

        Sources that wait at a gate hear of the end, so the gates stay as they are until then.
        """
        try:
            self.owner.close()
        finally:
            for gate in self._gates:
                gate.close()
            self._gates.clear()
            for source in self.sources:
                source.handle.close(0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _ended_early(request: Request) -> bool:
    """Whether nothing more can come of its source; one that finished still returns from it."""
    return request.done and request.outcome != "finished"


def _ended(request: Request) -> str:
    """How a request ended, for a text."""
    if not request.done:
        return "is not done"
    return request.outcome + (f": {request.reason}" if request.reason else "")
