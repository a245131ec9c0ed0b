"""The RNGD engine on a card: which record it goes by, and whom it finds there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.backends import rngd
from headrace.engine import records
from headrace.engine.records import Finding
from headrace.engine.rngd import cards, preflight, record
from headrace.engine.rngd.card import CardExecutor
from headrace.engine.rngd.record import Record
from headrace.engine.rngd.sdk import Sdk
from headrace.errors import BackendUnavailable, Refused
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.fake_furiosa.smi import FakeSmi
from tests.unit.engine.rngd.small_kernels import write_checkpoint
from tests.unit.engine.rngd.test_model import EXAONE

MODULE = "tests.unit.backends.test_rngd_record"


def open_three() -> Sdk:
    """A machine of three cards that are free."""
    return replace(FakeFuriosa().sdk(), smi=FakeSmi(3))


def open_busy() -> Sdk:
    """A machine of eight cards, all of them in use."""
    return replace(FakeFuriosa().sdk(), smi=FakeSmi(8, busy=True))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rngd") / "llama", num_hidden_layers=1)


@pytest.fixture
def options(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    sizes = {"token_buckets": [16], "max_positions": 16}
    return {"model": str(directory), "sdk": f"{MODULE}:open_three", **sizes}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How rows are read by each executor that is opened."""
    ways: list[str] = []
    make = CardExecutor.__init__

    def init(self: CardExecutor, *given: Any, **more: Any) -> None:
        ways.append(more["reads"])
        make(self, *given, **more)

    monkeypatch.setattr(CardExecutor, "__init__", init)
    return ways


def write(device: int, narrow: bool = True, whole: bool = True, **more: Any) -> Path:
    """The record of one card of that machine."""
    sdk = open_three()
    card = cards.describe(sdk.smi, device)
    findings = {
        "reads": Finding({"narrow": narrow, "whole": whole}),
        "prefill by narrow": Finding({"agrees": narrow}),
        "prefill by whole": Finding({"agrees": whole}),
    }
    packages = dict(sdk.versions)
    made = Record(
        sdk=sdk.name, packages=packages, card=card, chips=1, made="", findings=findings, **more
    )
    path = record.path_of(sdk, card, 1)
    records.write(made, path)
    return path


def test_rows_are_read_as_the_record_of_this_card_says(
    options: dict[str, Any], opened: list[str]
) -> None:
    write(0, narrow=False)
    write(2)
    for device in (0, 2):
        rngd.open({**options, "device": device}).close()
    assert opened == ["whole", "narrow"]
    with pytest.raises(BackendUnavailable, match="there is no record for this card"):
        rngd.open({**options, "device": 1})
    assert len(opened) == 2


@pytest.mark.parametrize("state", ["none", "dead", "bad", "torn"])
def test_a_card_without_a_good_record_is_used_only_if_asked(
    options: dict[str, Any],
    opened: list[str],
    state: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As asked, rows are read in the way that needs no views of a card's memory."""
    if state == "dead":
        write(0, narrow=False, whole=False, unfinished="reads")
    if state == "bad":
        write(0, narrow=False, whole=False)
    if state == "torn":
        path = write(0)
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BackendUnavailable) as told:
        rngd.open(options)
    assert told.value.stage == "layout_unverified"
    assert opened == []
    rngd.open({**options, "unverified": True}).close()
    assert opened == ["whole"]
    assert f"going on unverified, as asked: {told.value.detail}" in capsys.readouterr().err


def test_what_a_good_record_says_is_taken_also_if_none_is_needed(
    options: dict[str, Any], opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(0)
    rngd.open({**options, "unverified": True}).close()
    assert opened == ["narrow"]
    assert "unverified" not in capsys.readouterr().err


def test_a_card_that_is_not_there_is_no_matter_of_a_record(options: dict[str, Any]) -> None:
    with pytest.raises(BackendUnavailable) as told:
        rngd.open({**options, "device": 3, "unverified": True})
    assert told.value.stage == "no_device"


def test_emulation_asks_for_no_record(options: dict[str, Any], opened: list[str]) -> None:
    rngd.open({**options, "emulate": True}).close()
    assert opened == []


def test_cores_that_are_held_are_told_of_the_devices_own_cards(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A device spans as many cards as its model's kernels have chips."""
    assert rngd.occupants({**options, "device": 2}) == []
    busy = {**options, "sdk": f"{MODULE}:open_busy"}
    cores = range(8)
    assert rngd.occupants(busy | {"device": 2}) == [
        f"core {c} of card 2 is occupied" for c in cores
    ]
    assert rngd.occupants(busy | {"emulate": True}) == []
    four = tmp_path / "four"
    four.mkdir()
    (four / "config.json").write_text(json.dumps(EXAONE))
    spanning = busy | {"model": str(four), "device": 1}
    assert rngd.occupants(spanning) == [
        f"core {core} of card {card} is occupied" for card in (4, 5, 6, 7) for core in cores
    ]


@pytest.mark.parametrize(
    ("more", "kind"),
    [({"device": 3}, BackendUnavailable), ({"device": -1}, Refused), ({"x": 1}, Refused)],
)
def test_nobody_occupies_what_is_not_there(
    options: dict[str, Any], more: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        rngd.occupants({**options, **more})


@pytest.mark.parametrize("share", [False, True])
def test_preflight_is_told_whether_the_device_is_shared(
    options: dict[str, Any], share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of the vendor's is imported into this process."""
    asked: list[dict[str, Any]] = []

    def check(python: str, **more: Any) -> None:
        asked.append(more)
        raise BackendUnavailable("furiosa", "device_busy", "core_status()", "occupied", "")

    monkeypatch.setattr(preflight, "check", check)
    with pytest.raises(BackendUnavailable, match="device_busy"):
        rngd.open({**options, "sdk": None, "device": 1, "share_device": share})
    (given,) = asked
    assert (given["share"], given["device"], given["emulate"]) == (share, 1, False)
    assert (given["fusion"], given["families"]) == (8, ("llama",))


def test_without_the_vendors_packages_nobody_is_told_and_opening_says_what_is_missing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "furiosa_smi", None)
    assert rngd.occupants({**options, "sdk": None}) == []
