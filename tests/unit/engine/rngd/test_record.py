"""The record of a probe: how it is kept, and that it is good for what was probed alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace as other
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.records import Finding, write
from headrace.engine.rngd.record import RECORD_VERSION, Record, path_of, verified_reads
from headrace.engine.rngd.sdk import Sdk
from headrace.errors import BackendUnavailable

REAL = Sdk("furiosa", None, lambda family: None, None, {"furiosa-torch": "1", "torch": "2"})
FAKE = other(REAL, name="fake furiosa")
NEWER = other(REAL, versions={**REAL.versions, "torch": "3"})
CARD = {"index": 0, "serial": "A1", "bdf": "0000:01:00.0"}

Steps = Mapping[str, Finding]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def finding(**facts: Any) -> Finding:
    return Finding(facts)


def steps(reads: Any = (True, True), agrees: Any = (True, True)) -> Steps:
    """Of narrow and whole: whether rows were read right, and whether a prefill agreed."""
    return {
        "reads": finding(narrow=reads[0], whole=reads[1]),
        "prefill by narrow": finding(agrees=agrees[0]),
        "prefill by whole": finding(agrees=agrees[1]),
    }


def made(findings: Steps | None = None, sdk: Sdk = REAL, **more: Any) -> Record:
    told: dict[str, Any] = {"packages": dict(sdk.versions), "card": CARD, "chips": 1, **more}
    given = dict(steps() if findings is None else findings)
    return Record(sdk=sdk.name, made="now", findings=given, **told)


def refusal(sdk: Sdk = REAL, card: Mapping[str, Any] = CARD, chips: int = 1) -> str:
    with pytest.raises(BackendUnavailable) as told:
        verified_reads(sdk, card, chips)
    exc = told.value
    assert (exc.vendor, exc.stage) == ("furiosa", "layout_unverified")
    assert "headrace rngd probe" in exc.hint
    assert exc.probe == str(path_of(sdk, card, chips))
    return exc.detail


@pytest.mark.parametrize(
    ("findings", "way"),
    [
        (steps(), "narrow"),
        (steps((True, False), (True, False)), "narrow"),
        (steps(reads=(False, True)), "whole"),
        (steps(agrees=(False, True)), "whole"),
        ({**steps(), "prefill by narrow": Finding({"agrees": True}, "it broke")}, "whole"),
    ],
)
def test_narrow_reads_are_taken_before_whole_ones(findings: Steps, way: str) -> None:
    write(made(findings), path_of(REAL, CARD, 1))
    assert verified_reads(REAL, CARD, 1) == way


@pytest.mark.parametrize(
    "findings",
    [
        {},
        {"reads": finding(narrow=True, whole=True)},
        {key: each for key, each in steps().items() if key != "reads"},
        steps(reads=(False, False)),
        steps(agrees=(False, False)),
        steps((True, False), (False, True)),
        steps(agrees=(None, math.nan)),
        steps(agrees=(1, "true")),
        steps(reads=(1, math.nan)),
        {**steps(), "reads": Finding({"narrow": True, "whole": True}, "it broke")},
    ],
)
def test_what_was_not_seen_to_agree_is_refused(findings: Steps) -> None:
    write(made(findings), path_of(REAL, CARD, 1))
    assert "gave the cells that the emulation gives" in refusal()


def test_what_a_probe_died_in_is_told_unless_what_is_needed_was_found_before() -> None:
    write(made(unfinished="overlap"), path_of(REAL, CARD, 1))
    assert verified_reads(REAL, CARD, 1) == "narrow"
    write(made(steps((False, False)), unfinished="overlap"), path_of(REAL, CARD, 1))
    assert refusal() == "the probe died in its step 'overlap'"


@pytest.mark.parametrize("card", [{"index": 0}, {"emulated": True}, {"serial": "", "bdf": ""}])
def test_a_card_that_cannot_be_told_from_others_has_no_record(card: Mapping[str, Any]) -> None:
    write(made(card=dict(card)), path_of(REAL, card, 1))
    with pytest.raises(BackendUnavailable, match="neither a serial nor its address") as told:
        verified_reads(REAL, card, 1)
    assert told.value.stage == "layout_unverified"


ANOTHER: list[tuple[Sdk, Mapping[str, Any], int]] = [
    (NEWER, CARD, 1),
    (FAKE, CARD, 1),
    (REAL, {**CARD, "serial": "A2"}, 1),
    (REAL, {**CARD, "bdf": "0000:02:00.0"}, 1),
    (REAL, {**CARD, "driver": "1.0.1"}, 1),
    (REAL, {**CARD, "firmware": "9.9.9"}, 1),
    (REAL, {**CARD, "emulated": True}, 1),
    (REAL, CARD, 4),
]


@pytest.mark.parametrize(("sdk", "card", "chips"), ANOTHER)
def test_a_record_is_good_for_one_card_its_packages_and_its_chips(
    sdk: Sdk, card: Mapping[str, Any], chips: int
) -> None:
    """Also where one of another was put in its place."""
    assert refusal() == "there is no record for this card and these packages"
    record = made(sdk=sdk, card=dict(card), chips=chips)
    write(record, path_of(sdk, card, chips))
    assert verified_reads(sdk, card, chips) == "narrow"
    assert refusal() == "there is no record for this card and these packages"
    write(record, path_of(REAL, CARD, 1))
    assert refusal() in (
        "the record was made by other packages",
        "the record is of another card, or of other chips",
    )


def test_a_card_that_tells_no_number_is_no_emulation() -> None:
    """Else a probe with --emulate would put its record in place of the card's."""
    assert path_of(REAL, {"index": 0}, 1) != path_of(REAL, {"emulated": True}, 1)


def test_what_else_a_card_says_does_not_matter() -> None:
    write(made(), path_of(REAL, CARD, 1))
    assert verified_reads(REAL, {**CARD, "index": 3, "liveness": False}, 1) == "narrow"


def test_a_record_of_another_form_is_none(cache: Path) -> None:
    path = path_of(REAL, CARD, 1)
    assert path.is_relative_to(cache / "rngd" / "records")
    write(made(version=RECORD_VERSION + 1), path)
    assert refusal() == "the record was made by other packages"
    path.write_text("{}")
    assert "is no record of a probe" in refusal()
