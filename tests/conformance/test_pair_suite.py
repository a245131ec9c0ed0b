"""The pair suite bites: one broken engine or decoder for each thing that it checks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Decoder, Entry, Fence, Reservation, SlotView
from headrace.backends.null import NullDecoder, decoder_like
from headrace.errors import DeviceError
from headrace.geometry import Manifest
from headrace.plan import Copy
from headrace.testing.conformance import PairConformance
from headrace.testing.pair import runner
from headrace.testing.pair.cases import CASES
from tests.conformance.broken_engines import GEOMETRY
from tests.conformance.test_decoder_suite import Hashing, ListensToItsNeighbours

pytestmark = pytest.mark.usefixtures("nothing_left")

HASHING = {"layers": 3, "heads": 2, "head_dim": 8, "window": 16, "full_every": 2}
ENGINES = "tests.conformance.broken_engines"


class OffByOneHead(NullDecoder):
    """The rows of the second part are imported from one row further on."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        bent = [
            copy._replace(source=copy.source._replace(offset=copy.source.offset + 4))
            if (copy.layer, copy.part) == (2, 1)
            else copy
            for copy in copies
        ]
        fence = super().begin_import(reservation, slot, copies)
        if bent != list(copies):
            view = self._lanes[reservation.lane].view
            at = bent[-1].source.offset - self._kv_offset
            view[at] = (view[at] + 1) % 256
        return fence


class FreesEarly(NullDecoder):
    """A lane is anybody's once it is published."""

    def publish(self, reservation: Reservation) -> Entry:
        entry = super().publish(reservation)
        self._kept = {**getattr(self, "_kept", {}), entry.serial: entry}
        del self._held[entry.lane]
        return entry

    def _check(self, held: Reservation | Entry) -> None:
        if held not in getattr(self, "_kept", {}).values():
            super()._check(held)

    def free(self, held: Reservation | Entry) -> None:
        self._check(held)
        self._held.pop(held.lane, None)


class Leaks(NullDecoder):
    """Forgets every fourth lane that it is given back."""

    _freed = 0

    def free(self, held: Reservation | Entry) -> None:
        self._freed += 1
        if self._freed % 4:
            super().free(held)


class Burns(NullDecoder):
    """Fails imports of longer prompts."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        if reservation.num_tokens > 16:
            raise DeviceError("the copy engine is on fire")
        return super().begin_import(reservation, slot, copies)


class CountsWork(NullDecoder):
    """Tells how much it imported, and that this only grows."""

    _imports = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.caps = replace(self.caps, work=("imports",))

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        self._imports += 1
        return super().begin_import(reservation, slot, copies)

    def statistics(self) -> dict[str, int]:
        return {**super().statistics(), "imports": self._imports}


class CountsWorkAsState(CountsWork):
    """The same, and does not tell that it only grows."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.caps = replace(self.caps, work=())


class CountsNothing(CountsWork):
    """Names a count that it does not have."""

    def statistics(self) -> dict[str, int]:
        return dict(super(CountsWork, self).statistics())


class KeepsOtherNumbers(NullDecoder):
    """Its cells are not compared with what was sent."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.caps = replace(self.caps, reads_back=False)


class LateCopies(NullDecoder):
    """Says that a copy is done and makes it when it is asked for something else."""

    _late: list[Any]

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        self._late = [*getattr(self, "_late", []), (reservation, slot, copies)]
        return super().begin_import(reservation, slot, [])

    def reserve(self, num_tokens: int) -> Reservation:
        self._catch_up()
        return super().reserve(num_tokens)

    def _catch_up(self) -> None:
        late, self._late = getattr(self, "_late", []), []
        for reservation, slot, copies in late:
            if self._held.get(reservation.lane) == reservation:
                super().begin_import(reservation, slot, copies)


def suite_of(
    engine: str = "replay",
    decoder: type[NullDecoder] = NullDecoder,
    **attributes: Any,
) -> type[PairConformance]:
    class Suite(PairConformance):
        source = engine if engine == "replay" else f"{ENGINES}:{engine}"
        source_options = attributes.get("options", GEOMETRY if engine == "replay" else {})
        decoder = "null"
        quick = True
        context = 64
        within_s = 10.0

        def make_decoder(self, source: Manifest | None) -> Decoder:
            assert source is not None
            if issubclass(decoder, Hashing):
                made: Decoder = decoder(self.lanes)
                return made
            return decoder(decoder_like(source), context=self.context, lanes=self.lanes)

    return Suite


def run(suite: type[PairConformance], *only: str) -> dict[str, dict[str, Any]]:
    """What the runner says of each case."""
    report = runner.run({}, only=only, suite=suite)
    return {case["case"]: case for case in report["cases"]}


FAULTY_ENGINES: list[tuple[str, str, str]] = [
    ("open_early", "engine-alone", "was never written|changed after"),
    ("open_early", "exactness-with-digests", "not written|digest of"),
    ("open_deaf", "engine-alone", "went on after a call said Cancelled"),
    ("open_deaf", "cancel-while-streaming", "calls of the sink said so"),
    ("open_other_bytes_when_streamed", "exactness", r"other KV bytes in layers \[2\]"),
    ("open_other_bytes_when_streamed", "engine-alone", "differs from"),
    ("open_forgetful", "slot-reuse", r"other KV bytes in layers \[4\]"),
    ("open_another_each_time", "source-death", "the next request differs"),
    ("open_another_each_time", "retry", "the second attempt differs"),
    ("open_mortal", "exactness", "died: exit status 1"),
]
FAULTY_DECODERS: list[tuple[type[NullDecoder], str, str]] = [
    (OffByOneHead, "decoder-alone", "other bytes landed"),
    (OffByOneHead, "exactness-with-digests", "digest of"),
    (FreesEarly, "two-at-once", "was changed|differs from|not what lane"),
    (FreesEarly, "malformed-progress", "was changed|differs from|not what lane"),
    (Leaks, "slot-reuse", "at first|no lane free"),
    (CountsWorkAsState, "exactness", "'imports': .* at first"),
    (CountsNothing, "decoder-alone", r"caps\.work is \('imports',\)"),
    (Burns, "exactness", "on fire"),
    (LateCopies, "exactness-with-digests", "digest of"),
    (ListensToItsNeighbours, "two-at-once", "differs from it alone"),
]


@pytest.mark.parametrize(("engine", "name", "why"), FAULTY_ENGINES)
def test_a_broken_engine_is_found(engine: str, name: str, why: str) -> None:
    case = run(suite_of(engine), name)[name]
    assert case["result"] == "failed", case
    assert re.search(why, case["note"]), case["note"]


@pytest.mark.parametrize(("decoder", "name", "why"), FAULTY_DECODERS)
def test_a_broken_decoder_is_found(decoder: type[NullDecoder], name: str, why: str) -> None:
    options: dict[str, Any] = {"options": HASHING} if issubclass(decoder, Hashing) else {}
    case = run(suite_of(decoder=decoder, **options), name)[name]
    assert case["result"] == "failed", case
    assert re.search(why, case["note"]), case["note"]


def test_what_only_grows_is_no_state() -> None:
    assert run(suite_of(decoder=CountsWork), "exactness")["exactness"]["result"] == "ok"


def test_what_one_lane_cannot_show_is_told() -> None:
    """By name and with the reason, in a case that holds otherwise."""
    suite = type("OneLane", (suite_of(),), {"lanes": 1})
    names = ("decoder-alone", "cancel-while-streaming", "cancel-while-it-waits", "exactness")
    cases = run(suite, *names)
    assert {case["result"] for case in cases.values()} == {"ok"}
    left_out = {
        "decoder-alone": "neighbours do not touch each other",
        "cancel-while-streaming": "neighbours beside it",
        "cancel-while-it-waits": "2 holding storage, waiting for a slot",
    }
    for name, what in left_out.items():
        assert f"without {what}: the decoder has one lane" in cases[name]["note"]
    assert cases["exactness"]["note"] == ""


def test_digests_are_left_out_where_other_numbers_are_kept() -> None:
    cases = run(suite_of(decoder=KeepsOtherNumbers), "exactness-with-digests", "spans-not-as-told")
    for case in cases.values():
        assert case["result"] == "skipped"
        assert "keeps other numbers than were sent" in case["note"]


def test_a_failing_case_stops_no_other() -> None:
    cases = run(suite_of(decoder=Burns), "exactness", "malformed-progress", "drain")
    assert [case["result"] for case in cases.values()] == ["failed", "ok", "ok"]


def test_what_cannot_run_once_the_pair_is_gone_says_so(tmp_path: Path) -> None:
    suite = suite_of("open_once", options={"mark": str(tmp_path / "mark")})
    cases = run(suite, "facts", "source-death", "retry", "drain")
    assert cases["facts"]["result"] == "ok"
    assert cases["source-death"]["result"] == "failed"
    assert "no new source can be had" in cases["source-death"]["note"]
    for name in ("retry", "drain"):
        assert cases[name]["result"] == "not run"
        assert "the pair is gone: no new source" in cases[name]["note"]


HANGS = """
import time
from headrace.backends.null import NullDecoder
from headrace.testing.pair import runner
from tests.conformance.test_pair_suite import suite_of

class Hangs(NullDecoder):
    def reserve(self, num_tokens):
        if num_tokens > 16:
            time.sleep(1000)
        return super().reserve(num_tokens)

runner.HANG_S = 1.0
told = lambda report: print(report["cases"][-1]["note"], report["verdict"], flush=True)
runner.run({}, only=["facts", "exactness"], suite=suite_of(decoder=Hangs), hung=told)
"""


def test_a_call_that_never_comes_back_is_told() -> None:
    """The process ends by itself, and its sources with it."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "did not come back within 1 s" in done.stdout
    assert "1 of 2 cases failed: exactness" in done.stdout


@pytest.mark.full_matrix
def test_an_engine_without_logits_is_checked_as_well() -> None:
    cases = run(suite_of("open_token_only"))
    assert {case["result"] for case in cases.values()} == {"ok"}, cases


def test_the_list_of_cases_is_complete() -> None:
    methods = {name for name in dir(PairConformance) if name.startswith("test_")}
    assert set(CASES) == methods
    for method in CASES:
        assert getattr(PairConformance, method).__doc__
