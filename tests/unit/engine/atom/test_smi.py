"""What is read of `rbln-smi`, and what is not guessed at. The program is a fake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.engine.atom import smi
from headrace.engine.atom.smi import Card, Context, Memory, Pci, Said
from headrace.errors import BackendUnavailable
from tests.unit.engine.atom.fake_site import SMI, printing, write_fake_smi

FIRST = Card(0, "RBLN-CA25", "rbln0", Pci("0000:51:00.0"), Memory(0, 16877879296))
SECOND = Card(1, "RBLN-CA25", "rbln1", Pci("0000:52:00.0"), Memory(3758096384, 16877879296))
USER = Context(1, 4711, "python3", "3.5GiB")
SAID = Said("3.5.1", (FIRST, SECOND), (USER,))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without cards in /dev, on whose PATH is what a test puts into bin."""
    for name in smi.CHOOSERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(smi, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(smi, "_CLASS", tmp_path / "class")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def nodes(machine: Path, *numbers: int) -> None:
    (machine / "dev").mkdir()
    for name in (*(f"rbln{number}" for number in numbers), "rsd0", "rbln-ctl"):
        (machine / "dev" / name).touch()


def unavailable(**options: float) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        smi.ask(**options)
    assert (caught.value.vendor, caught.value.probe) == ("rebellions", "rbln-smi -j")
    return caught.value


def card(number: int, *, npu: int | None = None) -> Card:
    return Card(
        number if npu is None else npu, "RBLN-CA25", f"rbln{number}", Pci("x"), Memory(0, 1)
    )


def test_what_it_prints_is_read(machine: Path) -> None:
    write_fake_smi(machine / "bin")
    assert smi.ask() == SAID
    assert SAID.driver == "3.5.1"
    assert str(SAID.card(1)) == "rbln1, RBLN-CA25, 0000:52:00.0, 3.5 of 15.7 GiB used"
    assert [str(user) for user in SAID.users(SECOND)] == ["python3 (pid 4711, 3.5GiB)"]
    assert SAID.users(FIRST) == []


def test_numbers_are_quoted_or_not(machine: Path) -> None:
    other = SMI.replace('"npu": 0', '"npu": "0"').replace('"4711"', "4711")
    write_fake_smi(machine / "bin", printing(other))
    assert smi.ask() == SAID


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "nothing"),
        ("\n+----+\n| NPU |\n", "+----+"),
        ("[]", "[]"),
        (SMI.replace('"KMD_version"', '"kmd"'), "{"),
        (SMI.replace('"contexts"', '"processes"'), "{"),
        (SMI.replace('"rbln0"', '"npu0"'), "{"),
        (SMI.replace('"16877879296"', '"15.7GiB"'), "{"),
        (SMI.replace('"npu": 1, "pid"', '"npu": "0,1", "pid"'), "{"),
    ],
)
def test_something_else_is_told_and_not_guessed_at(machine: Path, said: str, line: str) -> None:
    write_fake_smi(machine / "bin", printing(said))
    exc = unavailable()
    assert exc.stage == "api_missing"
    assert exc.detail.startswith(f"rbln-smi printed something else: {line} (")


def test_a_driver_that_is_not_told_is_unknown(machine: Path) -> None:
    write_fake_smi(machine / "bin", printing(SMI.replace("3.5.1", "N/A")))
    said = smi.ask()
    assert (said.driver, said.driver_line) == ("", "driver of no known version")


def test_it_is_not_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    exc = unavailable()
    assert (exc.stage, exc.detail) == ("driver_missing", "rbln-smi is not on PATH")
    nodes(machine, 10, 2)
    detail = "rbln-smi is not on PATH, and there are /dev/rbln2, /dev/rbln10"
    assert unavailable().detail == detail


@pytest.mark.parametrize(
    ("does", "detail"),
    [
        ("echo no driver >&2; exit 3", "it ended with exit status 3: no driver"),
        ("kill -9 $$", "it ended with exit status -9: nothing"),
        ("exec sleep 60", "it did not end within 0.2 s"),
    ],
)
def test_it_fails(machine: Path, does: str, detail: str) -> None:
    write_fake_smi(machine / "bin", does)
    exc = unavailable(timeout_s=0.2 if "sleep" in does else 10.0)
    assert (exc.stage, exc.detail) == ("driver_missing", detail)


def test_it_cannot_be_run(machine: Path) -> None:
    write_fake_smi(machine / "bin").write_text("#!/no/such/shell\n")
    exc = unavailable()
    assert (exc.stage, exc.detail) == (
        "driver_missing",
        "it cannot be run: No such file or directory",
    )


def test_cards_that_the_kernel_has(machine: Path) -> None:
    assert smi.known_to_kernel() == []
    for name in ("rbln1", "rbln0", "rsd0"):
        (machine / "class" / name).mkdir(parents=True)
    assert smi.known_to_kernel() == ["rbln0", "rbln1"]


@pytest.mark.parametrize(
    ("present", "chooser", "chosen", "cards"),
    [
        ((), "", "", ["rbln0", "rbln2", "rbln10"]),
        ((2, 10), "", "", ["rbln2", "rbln10"]),
        ((2, 10), "RBLN_VISIBLE_DEVICES", " ", ["rbln2", "rbln10"]),
        ((2, 10), "RBLN_VISIBLE_DEVICES", "1", ["rbln10"]),
        ((2, 10), "RBLN_DEVICES", "0, 1", ["rbln2", "rbln10"]),
        ((2, 10), "RBLN_DEVICES", "10", ["rbln10"]),
        ((2, 10), "RBLN_DEVICES", "7", []),
        ((), "RBLN_DEVICES", "1 2", ["rbln2", "rbln10"]),
    ],
)
def test_which_card_a_device_is(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    present: tuple[int, ...],
    chooser: str,
    chosen: str,
    cards: list[str],
) -> None:
    """rbln-smi lists cards in no order; /dev has the host's numbers of those that are there."""
    if present:
        nodes(machine, *present)
    if chooser:
        monkeypatch.setenv(chooser, chosen)
    said = Said("3", (card(10), card(0), card(2)), ())
    assert [said.card(device).device for device in range(len(cards))] == cards
    for device in (-1, len(cards)):
        with pytest.raises(BackendUnavailable) as caught:
            said.card(device)
        assert caught.value.stage == "no_device"
        names = ", ".join(cards) or "none"
        assert caught.value.detail == f"device {device} was asked for, and the cards are {names}"


def test_the_first_of_two_choosers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_DEVICES", "1")
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "0")
    assert SAID.card(0) == SECOND


@pytest.mark.parametrize("chosen", ["1,0", "0,0", "all", "0-1", "[0,1]", "-1"])
def test_a_choice_whose_order_is_not_known_is_not_guessed_at(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", chosen)
    with pytest.raises(BackendUnavailable) as caught:
        SAID.card(0)
    assert caught.value.stage == "no_device"
    assert caught.value.detail.startswith(f"RBLN_VISIBLE_DEVICES is '{chosen}'")


def test_a_card_in_dev_that_is_not_listed(machine: Path) -> None:
    nodes(machine, 4)
    with pytest.raises(BackendUnavailable) as caught:
        SAID.card(0)
    assert caught.value.detail == "device 0 is rbln4, and it lists rbln0, rbln1"


def test_cards_that_share_a_number_may_all_be_used() -> None:
    shared = Said("3", (card(0, npu=0), card(4, npu=0)), (Context(0, 1, "x", "1MiB"),))
    assert [shared.users(each) for each in shared.devices] == [[Context(0, 1, "x", "1MiB")]] * 2
