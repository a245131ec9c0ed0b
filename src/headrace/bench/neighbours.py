"""Token time of requests that decode while others are imported beside them, in three arms.

`real`: a source prefills request after request, and each is imported. `discarded`: the same source,
prompt, messages and arrivals, and the decoder accepts each import and copies nothing. `none`: no
prefill at all. The first two are there once with arrivals that are streamed and once with arrivals
that come whole; both are compared with the same `none`. Every arrival is withdrawn when its last
byte is in, before it could be published, so that the arms differ in the copying alone.

Arrivals keep a period that an owner with real imports can carry, or the control arm, whose imports
take no time, would have more of them. Token time is the gap between two tokens of one neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, Literal

from headrace.bench.discarding import DiscardingDecoder
from headrace.bench.families import random_prompt
from headrace.bench.stand import RequestFailed, Stand
from headrace.errors import LocalProtocolError
from headrace.ids import Span
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions

Arm = Literal["real", "discarded", "none"]
ArrivalRoute = Literal["streamed", "whole"]
ARRIVAL_ROUTES: Final[tuple[ArrivalRoute, ...]] = ("streamed", "whole")
ARMS: Final[tuple[tuple[Arm, ArrivalRoute | None], ...]] = (
    ("real", "streamed"),
    ("discarded", "streamed"),
    ("none", None),
    ("real", "whole"),
    ("discarded", "whole"),
)

NEIGHBOUR_PROMPT: Final = 32
LEAST_TOKENS: Final = 4  # of each neighbour in one arm of a block,
TOKENS_SHARE: Final = 12  # and this part of all its tokens at most, so that they last for a round
LEAD_TOKENS: Final = 2  # that each neighbour decodes before an arm is looked at
SLACK: Final = 1.25  # of the period over what real imports were seen to take
DRAIN_S: Final = 60.0
_TURN_S: Final = 0.05


def arms_of() -> list[tuple[int, Arm, ArrivalRoute | None]]:
    """A round: block 0 with each arm once, block 1 with each in the reverse order."""
    return [(0, *arm) for arm in ARMS] + [(1, *arm) for arm in reversed(ARMS)]


class Neighbourhood:
    """Neighbours that decode on a stand, and what is imported beside them."""

    def __init__(
        self,
        stand: Stand,
        decoder: DiscardingDecoder,
        prompt: Sequence[int],
        *,
        context: int,
        block_s: float,
    ) -> None:
        """`decoder`: the stand's. `prompt`: of what is imported. `context`: positions of a lane."""
        self._owner = stand.owner
        self._decoder = decoder
        self._prompt = prompt
        self._max_tokens = context - NEIGHBOUR_PROMPT
        self._block_ns = round(block_s * 1e9)
        self._requests: list[Request] = []
        self._times: list[list[int]] = []

    @contextmanager
    def decoding(self, number: int) -> Iterator[None]:
        """For as long as the block runs, this many neighbours decode."""
        vocab_size = self._decoder.manifest().vocab_size
        options = RequestOptions(max_tokens=self._max_tokens)
        self._times = [[] for _ in range(number)]
        self._requests = [
            self._owner.submit(
                random_prompt(NEIGHBOUR_PROMPT, vocab_size), options, on_token=_clock(times)
            )
            for times in self._times
        ]
        try:
            self._turn_until(lambda: all(self._times))
            yield
        finally:
            for request in self._requests:
                self._owner.cancel(request)
            self._owner.drain(DRAIN_S)

    def carried_period_ns(self, nominal_ns: int, route: ArrivalRoute = "streamed") -> int:
        """The period at which the owner can import request after request beside them."""
        arrivals = Arrivals(self._owner, self._prompt, 0, route)
        begun_ns = time.monotonic_ns()
        most = self._most_tokens()
        marks = self._marks()
        self._turn_until(
            lambda: (
                arrivals.completed >= 2
                and (time.monotonic_ns() - begun_ns >= self._block_ns or self._given(marks) >= most)
            ),
            arrivals,
        )
        each_ns = (time.monotonic_ns() - begun_ns) / arrivals.completed
        self._stop(arrivals)
        return max(nominal_ns, round(SLACK * each_ns))

    def block(
        self, arm: Arm, period_ns: int, route: ArrivalRoute | None = "streamed"
    ) -> dict[str, Any]:
        """One arm of one block: the gaps of all neighbours, and what was imported meanwhile.

        `period_ns`, `route`: of the arrivals; without a route nothing arrives.

        Raises:
            RequestFailed: a neighbour came to its end. LocalProtocolError: something was published
            that must not be.
        """
        self._decoder.discarding = arm == "discarded"
        arrivals = None
        if arm != "none" and route is not None:
            arrivals = Arrivals(self._owner, self._prompt, period_ns, route)
        try:
            marks = self._marks()
            self._turn_until(lambda: self._given(marks) >= LEAD_TOKENS, arrivals)
            marks, most = self._marks(), self._most_tokens()
            before = arrivals.counts() if arrivals else {}
            begun_ns = time.monotonic_ns()
            self._turn_until(
                lambda: (
                    self._given(marks) >= LEAST_TOKENS
                    and (
                        time.monotonic_ns() - begun_ns >= self._block_ns
                        or self._given(marks) >= most
                    )
                ),
                arrivals,
            )
            span_ns = time.monotonic_ns() - begun_ns
            after = arrivals.counts() if arrivals else {}
            if arrivals:
                self._stop(arrivals)
        finally:
            self._decoder.discarding = False
        gaps = [
            b - a
            for times, mark in zip(self._times, marks, strict=True)
            for a, b in pairwise(times[mark - 1 :])
        ]
        seen = {name: after[name] - before[name] for name in after}
        return {"span_ns": span_ns, "gaps_ns": gaps, **(seen or _NOTHING)}

    def _stop(self, arrivals: Arrivals) -> None:
        """Nothing more arrives, and only the neighbours hold anything."""
        arrivals.stop()
        self._turn_until(lambda: self._num_open() == len(self._requests))
        arrivals.check()
        if self._decoder.num_hollow:
            raise LocalProtocolError(f"{self._decoder.num_hollow} discarded imports are still held")

    def _turn_until(self, condition: Callable[[], bool], arrivals: Arrivals | None = None) -> None:
        while not condition():
            if arrivals is not None:
                arrivals.act()
            self._owner.turn(_TURN_S)
            for request in self._requests:
                if request.done:
                    raise RequestFailed(f"a neighbour {request.outcome} early: {request.reason}")

    def _marks(self) -> list[int]:
        return [len(times) for times in self._times]

    def _given(self, marks: Sequence[int]) -> int:
        """Tokens that each neighbour gave since the marks were made."""
        return min(now - then for now, then in zip(self._marks(), marks, strict=True))

    def _most_tokens(self) -> int:
        return max(LEAST_TOKENS, self._max_tokens // TOKENS_SHARE)

    def _num_open(self) -> int:
        return self._owner.statistics()["requests"]["open"]


_NOTHING = {"requests": 0, "imported_nbytes": 0, "chunks": 0, "late": 0}


class Arrivals:
    """Requests at a steady period, each withdrawn with its last byte; one at a time."""

    def __init__(
        self,
        owner: DecoderOwner,
        prompt: Sequence[int],
        period_ns: int,
        route: ArrivalRoute = "streamed",
    ) -> None:
        self.completed = 0
        self._owner = owner
        self._prompt = prompt
        self._period_ns = period_ns
        self._options = RequestOptions(route=route, max_tokens=1)
        self._due_ns = time.monotonic_ns()
        self._current: Request | None = None
        self._stopped = False
        self._all: list[Request] = []
        self._nbytes = 0
        self._of_current = 0
        self._chunks = 0
        self._late = 0
        self._waits = False

    def counts(self) -> dict[str, int]:
        """What has happened so far; `late`: arrivals that waited for the one before."""
        return {
            "requests": self.completed,
            "imported_nbytes": self._nbytes,
            "chunks": self._chunks,
            "late": self._late,
        }

    def act(self) -> None:
        """Submit the next one if it is due."""
        if self._current is not None and self._current.done:
            self._current = None
        now_ns = time.monotonic_ns()
        if now_ns < self._due_ns:
            return
        if self._current is not None:
            self._waits = True
            return
        self._late += self._waits
        self._waits = False
        self._due_ns = max(self._due_ns + self._period_ns, now_ns)
        self._of_current = 0
        self._current = self._owner.submit(self._prompt, self._options, on_progress=self._progress)
        self._all.append(self._current)

    def stop(self) -> None:
        """Withdraw what is on its way."""
        self._stopped = True
        if self._current is not None:
            self._owner.cancel(self._current)

    def check(self) -> None:
        """Raise LocalProtocolError unless each was withdrawn and never published."""
        for request in self._all:
            if request.outcome != "cancelled" or request.tokens or request.measured is not None:
                raise LocalProtocolError(f"a request that must not be published {request.outcome}")

    def _progress(self, _: Span, imported: int, total: int) -> None:
        self._nbytes += imported - self._of_current
        self._of_current = imported
        self._chunks += 1
        if imported >= total and self._current is not None and not self._stopped:
            self.completed += 1
            self._owner.cancel(self._current)


def _clock(times: list[int]) -> Callable[[int], None]:
    def note(_: int) -> None:
        times.append(time.monotonic_ns())

    return note
