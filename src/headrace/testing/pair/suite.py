"""What the cases of the pair suite are made of: the pair, the stand, steps, and what they measured.

A case is a method whose name begins with `test_`; its first line of docs says what it proves. It
is made of steps. One that fails is noted, the stand is made anew, and the next step runs. A case
ends with the next request, which must be exact, and with all lanes and slots free.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TypeVar
from unittest import SkipTest

from msgspec import Struct

from headrace.backends.base import Decoder
from headrace.errors import HeadraceError
from headrace.geometry import Manifest
from headrace.runtime.requests import Request
from headrace.testing.conformance_engine import require
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.subject import Pair, PairGone, Settings, open_named

S = TypeVar("S", bound="PairSuite")


class Row(Struct, frozen=True, kw_only=True):
    """One step: whether it held, how long it took, and what it measured (times in s)."""

    step: str
    result: str  # ok, failed, skipped
    seconds: float
    note: str = ""
    measured: dict[str, Any] = {}


class Bench:
    """The one pair of a suite, and the stand that it is on."""

    def __init__(self, make_pair: Callable[[], Pair]) -> None:
        self._make_pair = make_pair
        self._pair: Pair | None = None
        self._stand: Stand | None = None
        self._how: Mapping[str, Any] = {}
        self._opened = False

    @property
    def pair(self) -> Pair:
        """The pair; opened when it is first asked for, and again after a fault that spoiled it.

        Raises: PairGone: it cannot be opened again.
        """
        if self._pair is None:
            try:
                self._pair = self._make_pair()
            except HeadraceError as exc:
                if self._opened:
                    raise PairGone(f"the pair cannot be opened again: {exc}") from exc
                raise
            self._opened = True
        return self._pair

    def stand(self, how: Mapping[str, Any]) -> Stand:
        """A stand at rest, the one that there is if it was made like this and is sound."""
        if self._stand is not None and not (self._how == how and self._stand.healthy):
            self.drop()
        if self._stand is None:
            self._stand, self._how = Stand(self.pair, **how), dict(how)
        return self._stand

    def in_use(self) -> Stand | None:
        """The stand with all that is held on it, unless its source is gone."""
        stand = self._stand
        return None if stand is None or stand.source.died() else stand

    def current(self) -> Stand:
        """The stand as it is if it is sound, else a new one."""
        return self.stand(self._how if self._stand is not None and self._stand.healthy else {})

    def drop(self) -> None:
        """End the stand; and the pair with it, if the decoder does not come to rest."""
        stand, self._stand = self._stand, None
        if stand is None:
            return
        try:
            stand.close()
        except Exception:  # whatever a decoder raises here: it is opened anew
            with suppress(Exception):
                self.close()

    def close(self) -> None:
        """End the stand and the pair."""
        stand, self._stand = self._stand, None
        pair, self._pair = self._pair, None
        try:
            if stand is not None:
                stand.close()
        finally:
            if pair is not None:
                pair.close()


class PairSuite:
    """Attributes say what is checked, as in `Settings`, and within what bounds (seconds).

    cancel_within_s: from a cancel to the caller's terminal. free_within_s: from any end to free
    lanes and slots, of a source that hears. death_within_s: from a source's end to its requests'.
    """

    source: ClassVar[str] = ""
    source_options: ClassVar[Mapping[str, Any]] = {}
    source_python: ClassVar[str | None] = None
    decoder: ClassVar[str] = ""
    decoder_options: ClassVar[Mapping[str, Any]] = {}
    context: ClassVar[int] = 128
    lanes: ClassVar[int] = 3
    num_decoded: ClassVar[int] = 4
    quick: ClassVar[bool] = False
    seed: ClassVar[int] = 0
    share_device: ClassVar[bool] = False
    within_s: ClassVar[float] = 120.0
    cancel_within_s: ClassVar[float] = 1.0
    free_within_s: ClassVar[float] = 10.0
    death_within_s: ClassVar[float] = 10.0

    rows: list[Row]

    def make_decoder(self, source: Manifest | None) -> Decoder:
        """The decoder under test, by default the one that `decoder` names.

        `source` is the source's manifest for a decoder that takes its geometry from there, and None
        where the source takes its own from the decoder.
        """
        return open_named(self.settings, source)

    @property
    def settings(self) -> Settings:
        """The attributes as one."""
        return Settings(
            source=self.source,
            source_options=self.source_options,
            source_python=self.source_python,
            decoder=self.decoder,
            decoder_options=self.decoder_options,
            context=self.context,
            lanes=self.lanes,
            num_decoded=self.num_decoded,
            quick=self.quick,
            seed=self.seed,
            share_device=self.share_device,
            within_s=self.within_s,
        )

    @property
    def bench(self) -> Bench:
        """The one bench of this class."""
        suite = type(self)
        if suite not in _BENCHES:
            _BENCHES[suite] = Bench(lambda: Pair(self.settings, self.make_decoder))
        return _BENCHES[suite]

    @property
    def pair(self) -> Pair:
        """The pair, with prompts of this suite's seed."""
        pair = self.bench.pair
        pair.seed = self.seed
        return pair

    def stand(self, **how: Any) -> Stand:
        """A stand at rest; `how` as `Stand` takes it."""
        return self.bench.stand(how)

    @classmethod
    def teardown_class(cls) -> None:
        """End the pair; pytest calls this by its name."""
        bench = _BENCHES.pop(cls, None)
        if bench is not None:
            bench.close()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """One step of a case; what it puts into the dict is reported as measured."""
        measured: dict[str, Any] = {}
        begun_s = time.monotonic()

        def note(result: str, text: str = "") -> None:
            seconds = time.monotonic() - begun_s
            self.rows.append(
                Row(step=name, result=result, seconds=seconds, note=text, measured=measured)
            )

        try:
            yield measured
        except SkipTest as exc:
            note("skipped", str(exc))
        except PairGone as exc:
            note("failed", str(exc))
            raise
        except Exception as exc:  # whatever an adapter raises fails its step and not the run
            note("failed", _text(exc))
            self.bench.drop()
        else:
            note("ok")

    def check_rows(self) -> None:
        """Raise what the steps found."""
        failed = [f"{row.step}: {row.note}" for row in self.rows if row.result == "failed"]
        if failed:
            raise AssertionError(f"{len(failed)} of {len(self.rows)} steps: " + " | ".join(failed))
        if all(row.result == "skipped" for row in self.rows):
            raise SkipTest("; ".join(sorted({row.note for row in self.rows})))

    def refused_within(self, request: Request, stand: Stand, seconds: float) -> float:
        """A request fails in time, once, with a reason; returns how long it took."""
        took_s = stand.until(lambda: request.done, "the request has failed", seconds)
        require(request.outcome == "failed", f"it {request.outcome}, and should have failed")
        require(bool(request.reason), "it failed without a reason")
        return took_s


_BENCHES: dict[type[PairSuite], Bench] = {}


def case(method: Callable[[S], None]) -> Callable[[S], None]:
    """A case: after its steps the next request is exact, and all that it held is free."""

    @functools.wraps(method)
    def run(self: S) -> None:
        self.rows = []
        self.pair.left_out.clear()
        try:
            method(self)
        except Exception:  # outside of any step: nobody knows what is held
            self.bench.drop()
            raise
        if any(row.result != "skipped" for row in self.rows):
            with self.step("the next request is exact, and all is free"):
                self.bench.current().check_next()
        for what in sorted(self.pair.left_out):
            name, _, why = what.partition(": ")
            self.rows.append(Row(step=name, result="skipped", seconds=0.0, note=why))
        self.check_rows()

    return run


def _text(exc: Exception) -> str:
    named = isinstance(exc, AssertionError | HeadraceError)
    return str(exc) if named else f"{type(exc).__name__}: {exc}"
