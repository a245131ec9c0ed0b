"""A probe of a card: what its record says at every moment, and its exit status, on a fake card."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import records
from headrace.engine.rngd import probe as probing
from headrace.engine.rngd import record
from headrace.engine.rngd.probe_steps import STEPS, Bench, Step
from headrace.engine.rngd.record import Record
from headrace.engine.rngd.sdk import Sdk
from headrace.errors import BackendUnavailable, DeviceError
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.fake_furiosa.card import FakeTensor
from headrace.testing.fake_furiosa.smi import FakeSmi
from headrace.testing.fake_furiosa.vendor import TclModule

SDK = "headrace.testing.fake_furiosa:open"
MODULE = "tests.unit.engine.rngd.test_probe"
NAMES = [step.name for step in STEPS]
TABLE = (
    Step("first", lambda bench: {"value": 1}, needs_card=False),
    Step("second", lambda bench: {"value": 2}),
    Step("third", lambda bench: {"value": 3}, needs_card=False),
)


def open_eight() -> Sdk:
    """A machine of eight cards."""
    return replace(FakeFuriosa().sdk(), smi=FakeSmi(8))


def open_broken() -> Sdk:
    """A card whose first copy to the host fails, and which has failed from then on."""
    fake = FakeFuriosa()
    fake.card.fail_copy = 0
    return fake.sdk()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "Bench", partial(Bench, link_nbytes=(1 << 20,)))
    return tmp_path / "cache"


@pytest.fixture
def _another_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "python"
    refusing.write_text("#!/bin/sh\necho it is held >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(refusing))


def take(monkeypatch: pytest.MonkeyPatch, *steps: Step) -> None:
    monkeypatch.setattr(probing, "STEPS", steps)


def probe(sdk: Sdk | None = None, **more: Any) -> tuple[Record, Path]:
    asked = {"device": 0, "chips": 1, "say": lambda text: None, **more}
    return probing.probe(sdk or FakeFuriosa().sdk(), asked.pop("device"), **asked)


@pytest.mark.usefixtures("_another_process_is_refused")
def test_every_step_finds_facts_and_a_source_takes_the_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert probing.main(["--sdk", SDK]) == 0
    printed, said = capsys.readouterr()
    made = records.read(Path(printed.strip()), Record)
    assert list(made.findings) == NAMES
    assert [step for step, each in made.findings.items() if each.error or not each.facts] == []
    assert min(each.took_s for each in made.findings.values()) >= 0
    assert made.findings["second process"].facts["said"] == "it is held"
    assert (made.sdk, made.packages, made.chips) == ("fake furiosa", {"fake-furiosa": "1"}, 1)
    assert (made.card["serial"], made.unfinished) == ("FAKE0000", "")
    assert [f"probe: {step}" for step in NAMES] == [
        line for line in said.splitlines() if line.removeprefix("probe: ") in NAMES
    ]
    sdk = FakeFuriosa().sdk()
    assert record.verified_reads(sdk, made.card, 1) == "narrow"


def test_the_record_names_the_step_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies on disk meanwhile is what is left if the process dies."""
    path, seen = tmp_path / "record.json", list[tuple[str, list[str]]]()

    def look(bench: Bench) -> dict[str, Any]:
        there = records.read(path, Record)
        seen.append((there.unfinished, list(there.findings)))
        return {}

    take(monkeypatch, *(Step(name, look) for name in "abc"))
    made, told = probe(out=path)
    assert seen == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]
    assert told == path
    assert records.read(path, Record) == made
    assert (made.unfinished, list(made.findings)) == ("", ["a", "b", "c"])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_probe_that_was_ended_has_named_its_step(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of before is not the source's any more."""
    path = finished(monkeypatch)
    take(monkeypatch, TABLE[0], failing("second", kind()), TABLE[2])
    with pytest.raises(kind):
        probe()
    left = records.read(path, Record)
    assert (left.unfinished, list(left.findings)) == ("second", ["first"])
    with pytest.raises(BackendUnavailable, match="died in its step 'second'"):
        record.verified_reads(FakeFuriosa().sdk(), left.card, 1)


def finished(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The record of a card that was found good."""
    good = {"reads": {"narrow": True}, "prefill by narrow": {"agrees": True}}
    take(monkeypatch, *(Step(name, partial(give, facts)) for name, facts in good.items()))
    made, path = probe()
    assert record.verified_reads(FakeFuriosa().sdk(), made.card, 1) == "narrow"
    return path


def give(facts: dict[str, Any], bench: Bench) -> dict[str, Any]:
    return facts


def failing(name: str, exc: BaseException) -> Step:
    def fail(bench: Bench) -> dict[str, Any]:
        raise exc

    return Step(name, fail)


class PanicException(BaseException):
    """As the vendor's native part names its own."""


@pytest.mark.parametrize(
    ("exc", "error"),
    [
        (RuntimeError("no such thing\nat a place"), "RuntimeError: no such thing"),
        (MemoryError(), "MemoryError: no reason given"),
        (PanicException("unwrap on None"), "PanicException: unwrap on None"),
        (DeviceError("furiosa:0: it fell off the bus"), "furiosa:0: it fell off the bus"),
    ],
)
def test_a_step_that_raises_is_an_error_in_the_record_and_the_others_go_on(
    exc: BaseException, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(monkeypatch, TABLE[0], failing("second", exc), TABLE[2])
    made, path = probe()
    assert records.read(path, Record) == made
    assert {step: (each.facts, each.error) for step, each in made.findings.items()} == {
        "first": ({"value": 1}, ""),
        "second": ({}, error),
        "third": ({"value": 3}, ""),
    }


def test_what_is_no_number_is_kept_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no word for it, and a record must be readable."""
    odd = {"k": float("inf"), "v": float("nan"), "agrees": False}
    take(monkeypatch, Step("prefill by narrow", partial(give, odd)))
    _, path = probe()
    kept = records.read(path, Record).findings["prefill by narrow"].facts
    assert kept == {"k": None, "v": None, "agrees": False}


@pytest.mark.usefixtures("_another_process_is_refused")
def test_a_card_that_fails_is_told_step_by_step_and_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert probing.main(["--sdk", f"{MODULE}:open_broken"]) == 1
    printed, said = capsys.readouterr()
    made = records.read(Path(printed.strip()), Record)
    assert list(made.findings) == NAMES
    assert made.fact("emulation", "agrees") is True
    for step in NAMES[1:]:
        assert "a copy to the host failed" in str(made.findings[step]), step
    last = said.splitlines()[-1]
    assert last.startswith("headrace: furiosa: layout_unverified")


@pytest.mark.usefixtures("_another_process_is_refused")
def test_a_card_that_gives_other_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_to = FakeTensor.copy_to

    def turned(self: FakeTensor, target: Any, *, non_blocking: bool) -> Any:
        memory = self.memory.roll(1, 0)
        return copy_to(FakeTensor(self.card, memory, None), target, non_blocking=non_blocking)

    monkeypatch.setattr(FakeTensor, "copy_to", turned)
    assert probing.main(["--sdk", SDK]) == 1
    printed, said = capsys.readouterr()
    assert "gave the cells that the emulation gives" in said
    made = records.read(Path(printed.strip()), Record)
    assert made.findings["reads"].facts == {"narrow": False, "whole": False}


def test_with_emulate_only_what_needs_no_card_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And the record is good for no card: not for one that gives no number of its own either."""
    out = tmp_path / "not" / "there.json"
    for more, status in (([], 0), (["--out", str(out)], 0)):
        assert probing.main(["--sdk", SDK, "--emulate", *more]) == status
        path = Path(capsys.readouterr().out.strip())
        made = records.read(path, Record)
        assert (list(made.findings), made.card) == (["emulation"], {"emulated": True})
    assert path == out
    for card in (made.card, {"index": 0}):
        with pytest.raises(BackendUnavailable, match="layout_unverified"):
            record.verified_reads(FakeFuriosa().sdk(), card, 1)
    before = FakeFuriosa().torch
    monkeypatch.setattr(TclModule, "__call__", nothing)
    assert probing.main(["--sdk", SDK, "--emulate"]) == 1
    assert before.get_fusion().num_fusion == 1


def nothing(self: TclModule, *inputs: Any) -> list[Any]:
    raise RuntimeError("it cannot be emulated")


def test_an_emulation_claims_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, *TABLE)
    fake = FakeFuriosa()
    made, _ = probe(fake.sdk(), emulate=True)
    assert list(made.findings) == ["first", "third"]
    assert fake.torch._fusion is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--device=1"],
            "no_device: furiosa_smi.list_devices(): it lists npu0, and npu1 was asked",
        ),
        (["--device=-1"], "npu-1 was asked for"),
        (["--chips=2", "--device=1"], "npu2 was asked for"),
        (["--chips=3"], "fusion is 24; choose one of"),
    ],
)
def test_what_cannot_be_probed_leaves_no_record(
    arguments: list[str], said: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probing.main(["--sdk", SDK, *arguments]) == 2
    printed, told = capsys.readouterr()
    assert printed == ""
    assert told.startswith("headrace: ")
    assert said in told
    assert not cache.exists()


def test_a_record_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "record.json"
    assert probing.main(["--sdk", SDK, "--out", str(out)]) == 2
    assert f"{out} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "chips", "first"), [(0, 1, 0), (3, 1, 3), (1, 4, 4)])
def test_the_card_that_is_described_is_the_devices_first(
    device: int, chips: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device spans as many cards as chips, and its memory is asked for under its own number."""
    opened: list[tuple[str, int]] = []

    def look(bench: Bench) -> dict[str, Any]:
        executor = bench.open_card("whole")
        opened.append((bench.where, bench.sdk.torch.get_fusion().num_fusion))
        executor.close()
        return {}

    take(monkeypatch, Step("look", look))
    made, path = probe(open_eight(), device=device, chips=chips)
    assert made.findings["look"].error == ""
    assert (made.card["index"], made.card["serial"]) == (first, f"FAKE{first:04}")
    assert (made.chips, opened) == (chips, [(f"furiosa:{device}", 8 * chips)])
    assert path == record.path_of(open_eight(), made.card, chips)


def test_the_fusion_is_set_before_anything_asks_for_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever asks first would fix it at one PE; a process that has another is told so."""
    take(monkeypatch, Step("look", lambda bench: {"fusion": fusion_of(bench)}))
    made, _ = probe()
    assert made.fact("look", "fusion") == 8
    used = FakeFuriosa()
    used.torch.Stream("furiosa:0")
    with pytest.raises(BackendUnavailable, match="device_busy"):
        probe(used.sdk())


def fusion_of(bench: Bench) -> int:
    asked: Callable[[], Any] = bench.sdk.torch.get_fusion
    return int(asked().num_fusion)
