"""What is taken of what the management library says, in the forms in which it says it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from headrace.engine.rngd import cards
from headrace.errors import BackendUnavailable
from headrace.testing.fake_furiosa.smi import CoreStatus, FakeSmi


class SmiError(Exception):
    """As the library's own are plain exceptions."""


class PanicException(BaseException):
    """As the library's native part names its own."""


class Arch(Enum):
    Rngd = 1


class Version:
    def major(self) -> int:
        return 1

    def minor(self) -> int:
        return 2

    def patch(self) -> int:
        return 3


class Bdf:
    def domain(self) -> int:
        return 0

    def bus(self) -> int:
        return 0xA1

    def device(self) -> int:
        return 2

    def function(self) -> int:
        return 10


class Memory:
    def total_bytes(self) -> int:
        return 48 << 30


class Link:
    def pcie_gen_status(self) -> int:
        return 5

    def link_width_status(self) -> int:
        return 16

    def link_speed_status(self) -> float:
        return 32.0

    def max_link_width_capability(self) -> int:
        return 16

    def max_link_speed_capability(self) -> float:
        raise SmiError("it is not told")


class Pcie:
    def link_info(self) -> Link:
        return Link()


class Card:
    """All that is said is said by methods, as in the library."""

    def __init__(self, name: str = "npu0") -> None:
        self._name = name
        self.status: dict[Any, Any] = dict.fromkeys(range(2), CoreStatus.Available)

    def device_name(self) -> str:
        return self._name

    def product_name(self) -> str:
        return "a card"

    def serial(self) -> str:
        return f"serial of {self._name}"

    def uuid(self) -> str:
        raise SmiError("there is none")

    def arch(self) -> Arch:
        return Arch.Rngd

    def numa_node(self) -> int:
        return 1

    def core_num(self) -> None:
        return None

    def liveness(self) -> bool:
        raise PanicException("unwrap on None")

    def bdf(self) -> Bdf:
        return Bdf()

    def firmware_version(self) -> Version:
        return Version()

    def memory_usage(self) -> Memory:
        return Memory()

    def pcie_info(self) -> Pcie:
        return Pcie()

    def core_status(self) -> dict[Any, Any]:
        return self.status


class Smi:
    def __init__(self, *there: Card) -> None:
        self._cards = list(there)

    def list_devices(self) -> list[Card]:
        return self._cards

    def driver_info(self) -> Version:
        return Version()


def test_what_a_card_says_is_bare_values_and_the_rest_is_left_out() -> None:
    facts = cards.describe(Smi(Card()), 0)
    assert facts == {
        "index": 0,
        "device_name": "npu0",
        "product_name": "a card",
        "serial": "serial of npu0",
        "arch": "Arch.Rngd",
        "numa_node": 1,
        "bdf": "0000:a1:02.a",
        "firmware": "1.2.3",
        "driver": "1.2.3",
        "memory_total_nbytes": 48 << 30,
        "pcie_gen": 5,
        "pcie_width": 16,
        "pcie_speed": 32.0,
        "pcie_max_width": 16,
    }
    assert {type(value) for value in facts.values()} <= {int, float, str, bool}


@pytest.mark.parametrize("exc", [SmiError("no"), AttributeError("no"), PanicException("no")])
def test_a_card_of_which_nothing_can_be_asked_is_described_by_its_number(
    exc: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: object) -> None:
        raise exc

    for name in vars(Card):
        if not name.startswith("_") and name != "device_name":
            monkeypatch.setattr(Card, name, refused)
    monkeypatch.setattr(Smi, "driver_info", refused)
    assert cards.describe(Smi(Card()), 0) == {"index": 0, "device_name": "npu0"}


def test_what_ends_the_process_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Card, "serial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cards.describe(Smi(Card()), 0)


def test_a_library_that_has_fewer_calls_says_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serial", "bdf", "pcie_info", "numa_node"):
        monkeypatch.delattr(Card, name)
    told = cards.describe(Smi(Card()), 0)
    assert not {"serial", "bdf", "numa_node", "pcie_gen"} & set(told)
    assert told["product_name"] == "a card"


@pytest.mark.parametrize("names", [("npu0", "npu1", "npu2"), ("npu2", "npu0"), ("npu1", "npu2")])
def test_a_card_is_the_one_of_that_name_whatever_is_listed_before_it(names: list[str]) -> None:
    smi = Smi(*map(Card, names))
    for name in names:
        assert cards.describe(smi, int(name[3:]))["serial"] == f"serial of {name}"


@pytest.mark.parametrize(
    ("names", "index", "listed"),
    [
        ([], 0, "none"),
        (["npu0"], 1, "npu0"),
        (["npu1", "npu2"], 0, "npu1, npu2"),
        (["npu0"], -1, ""),
    ],
)
def test_a_card_that_is_not_listed_is_told(names: list[str], index: int, listed: str) -> None:
    smi = Smi(*map(Card, names))
    for ask in (cards.describe, cards.busy_cores):
        with pytest.raises(BackendUnavailable) as told:
            ask(smi, index)
        assert told.value.stage == "no_device"
        assert listed in told.value.detail
        assert f"npu{index} was asked for" in told.value.detail


@pytest.mark.parametrize("exc", [SmiError("the driver is gone"), PanicException("the driver")])
@pytest.mark.parametrize("call", ["list_devices", "core_status"])
def test_a_library_that_cannot_say_is_told(
    call: str, exc: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: object) -> None:
        raise exc

    monkeypatch.setattr(Smi if call == "list_devices" else Card, call, refused)
    with pytest.raises(BackendUnavailable, match="the driver") as told:
        cards.busy_cores(Smi(Card()), 0)
    assert told.value.stage == "driver_missing"
    assert call in told.value.probe


def test_busy_cores_are_those_that_a_process_holds() -> None:
    """Whether the library's words are an enumeration or strings."""
    card = Card()
    card.status = {0: CoreStatus.Available, 1: CoreStatus.Occupied, 2: "Occupied", 3: "Available"}
    assert cards.busy_cores(Smi(card), 0) == ["1", "2"]


def test_the_fake_says_what_is_asked() -> None:
    told = cards.describe(FakeSmi(2), 1)
    assert (told["device_name"], told["serial"], told["bdf"]) == (
        "npu1",
        "FAKE0001",
        "ffff:01:00.0",
    )
    assert cards.busy_cores(FakeSmi(), 0) == []
    assert cards.busy_cores(FakeSmi(busy=True), 0) == [str(core) for core in range(8)]
