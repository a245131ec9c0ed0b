"""A card's executor on a fake card: what it queues where, what it keeps, and when it says done."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.rngd.card import MAX_IN_FLIGHT, CardExecutor
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.record import Reads
from headrace.engine.rngd.signature import Tensor
from headrace.errors import (
    BackendUnavailable,
    Closed,
    DeviceError,
    HeadraceError,
    LocalProtocolError,
)
from headrace.testing.fake_furiosa import FakeFuriosa
from tests.unit.engine.rngd.test_compiled import kernel_of

BF16 = torch.bfloat16
ROWS = Tensor("rows", (6, 1, 4, 3), (6, 1, 4, 3), "bfloat16")
PADDED = Tensor("rows", (6, 5), (6, 8), "bfloat16")
SPLIT = Tensor("rows", (6, 1, 8, 3), (6, 1, 8, 3), "bfloat16", split=2, chips=4, placed=True)

ways = pytest.mark.parametrize("reads", ["narrow", "whole"])


def open_card(
    tmp_path: Path, reads: Reads = "narrow", chips: int = 1, polls: int = 1
) -> tuple[CardExecutor, FakeFuriosa]:
    fake = FakeFuriosa(polls_per_step=polls)
    cache = CompiledKernels(fake.sdk(), directory=tmp_path)
    return CardExecutor(fake.sdk(), 0, chips=chips, reads=reads, cache=cache), fake


def numbers(tensor: Tensor) -> torch.Tensor:
    count = torch.Size(tensor.shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(tensor.shape).to(BF16)


def old(num_rows: int, tensor: Tensor) -> torch.Tensor:
    """A target with bytes of before."""
    return torch.full((num_rows, *tensor.shape[1:]), -7, dtype=BF16)


@ways
@pytest.mark.parametrize("tensor", [ROWS, PADDED, SPLIT], ids=["rows", "padded", "split"])
def test_rows_come_back_as_they_were_placed(tmp_path: Path, reads: Reads, tensor: Tensor) -> None:
    card, fake = open_card(tmp_path, reads, chips=tensor.chips, polls=3)
    host = numbers(tensor)
    placed = card.place(tensor, host)
    assert placed.inter_chip_axes == [(tensor.split, tensor.chips)]
    target = old(3, tensor)
    ticket = card.read(tensor, placed, 2, 5, target)
    assert torch.equal(target, old(3, tensor))
    looks = 0
    while not ticket.done():
        looks += 1
    assert looks > 2
    assert torch.equal(target, host[2:5])
    assert ticket.done()
    assert fake.card.faults == []


def test_it_takes_the_fusion_of_its_chips_and_one_process_has_one(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path, chips=4)
    assert fake.torch.get_fusion().num_fusion == 32
    cache = CompiledKernels(fake.sdk(), directory=tmp_path)
    with pytest.raises(BackendUnavailable) as told:
        CardExecutor(fake.sdk(), 0, chips=1, reads="whole", cache=cache)
    assert told.value.stage == "device_busy"
    card.close()


def test_a_kernel_runs_when_its_turn_comes_and_changes_its_caches_in_place(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path)
    program = card.load(kernel_of(fake))
    placed = [card.zeros(each) for each in program.signature.arguments[:-1]]
    mask = program.signature.arguments[-1]
    placed.append(card.place(mask, torch.ones(mask.shape, dtype=torch.bool)))
    (mixed,) = program(placed)
    assert fake.card.counts["kernels"] == 0
    result = program.signature.results[0]
    target = old(8, result)
    ticket = card.read(result, mixed, 0, 8, target)
    card.wait()
    assert ticket.done()
    assert target.count_nonzero() == 0
    assert card.statistics() == {
        "kernels_loaded": 1,
        "kernels_compiled": 1,
        "kernels_found": 0,
        "kernels_broken": 0,
        "host_waits": 0,
        "reads": 1,
        "peak_in_flight": 2,
    }


def test_the_host_waits_when_too_much_is_queued(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path, polls=1000)
    for _ in range(MAX_IN_FLIGHT + 2):
        card.zeros(ROWS)
    counts = card.statistics()
    assert (counts["host_waits"], counts["peak_in_flight"]) == (2, MAX_IN_FLIGHT)
    assert fake.card.peak_in_flight <= 32
    card.wait()
    assert fake.card.quiet()


def test_copies_overtake_what_is_computed_later(tmp_path: Path) -> None:
    """A read waits for what was asked for before it, and for nothing that came after."""
    card, _ = open_card(tmp_path)
    placed = card.place(ROWS, numbers(ROWS))
    target = old(6, ROWS)
    ticket = card.read(ROWS, placed, 0, 6, target)
    for _ in range(5):
        card.zeros(ROWS)
    copies, compute = card._copies.stream, card._compute.stream
    while copies.length:
        (copies if copies.can_run() else compute).step()
    assert compute.length
    assert ticket.done()


def test_a_read_with_nothing_queued_before_it_waits_for_nothing(tmp_path: Path) -> None:
    card, _ = open_card(tmp_path)
    placed = card.place(ROWS, numbers(ROWS))
    card.wait()
    target = old(6, ROWS)
    ticket = card.read(ROWS, placed, 0, 6, target)
    assert card._copies.stream.length == 2  # the copy and its event
    while not ticket.done():
        pass
    assert torch.equal(target, numbers(ROWS))


def test_the_stream_of_before_is_the_current_one_again(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path)
    assert fake.card.current is card._compute.stream
    card.read(ROWS, card.zeros(ROWS), 0, 1, old(1, ROWS))
    assert fake.card.current is card._compute.stream
    card.close()
    card.close()
    assert fake.card.current is fake.card.default
    with pytest.raises(Closed):
        card.zeros(ROWS)
    card.wait()


def test_another_thread_is_refused_before_the_vendor_is_called(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path)
    told: list[HeadraceError] = []

    def use() -> None:
        for call in (card.wait, lambda: card.zeros(ROWS)):
            try:
                call()
            except HeadraceError as exc:
                told.append(exc)

    other = threading.Thread(target=use)
    other.start()
    other.join()
    assert [type(each) for each in told] == [LocalProtocolError] * 2
    assert fake.card.faults == []


def test_a_card_that_failed_once_has_failed(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path)
    fake.card.fail_copy = 0
    ticket = card.read(ROWS, card.zeros(ROWS), 0, 2, old(2, ROWS))
    with pytest.raises(DeviceError, match="a copy to the host failed"):
        card.wait()
    for call in (card.wait, ticket.done, lambda: card.zeros(ROWS)):
        with pytest.raises(DeviceError, match="failed before"):
            call()
    card.close()


def test_what_the_host_should_not_ask_for_is_its_own_mistake(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path)
    by_row = Tensor("rows", (8, 2), (8, 2), "bfloat16", split=0, chips=4, placed=True)
    placed = card.zeros(ROWS)
    with pytest.raises(LocalProtocolError, match="cannot be read so"):
        card.read(by_row, placed, 0, 1, torch.zeros(1, 2, dtype=BF16))
    with pytest.raises(LocalProtocolError, match="cannot be read so"):
        card.read(ROWS, placed, 0, 2, torch.zeros(2, 1, 3, 4, dtype=BF16).mT)
    with pytest.raises(LocalProtocolError, match="the kernel takes"):
        card.place(ROWS, torch.zeros(2, 2))
    card.wait()
    assert fake.card.faults == []


def test_a_card_that_cannot_be_opened_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeFuriosa()

    def stream(device: str) -> Any:
        raise RuntimeError("HAL error: no card\nat some place")

    monkeypatch.setattr(fake.torch, "Stream", stream)
    cache = CompiledKernels(fake.sdk(), directory=tmp_path)
    with pytest.raises(DeviceError, match=r"furiosa:0: RuntimeError: HAL error: no card$"):
        CardExecutor(fake.sdk(), 0, chips=1, reads="whole", cache=cache)


def test_a_card_is_not_closed_by_another_thread_and_stays_as_it_was(tmp_path: Path) -> None:
    card, _ = open_card(tmp_path, polls=4)
    placed = card.place(ROWS, numbers(ROWS))
    target = old(3, ROWS)
    ticket = card.read(ROWS, placed, 2, 5, target)
    told: list[BaseException] = []

    def close() -> None:
        try:
            card.close()
        except BaseException as exc:
            told.append(exc)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert [type(exc) for exc in told] == [LocalProtocolError]
    assert torch.equal(target, old(3, ROWS))  # nothing was waited for
    card.wait()
    assert ticket.done()
    assert torch.equal(target, numbers(ROWS)[2:5])
    card.close()
    card.wait()  # it has waited when it was closed


def test_a_card_that_failed_while_it_was_closed_is_never_known_to_be_quiet(tmp_path: Path) -> None:
    card, fake = open_card(tmp_path)
    fake.card.fail_copy = 0
    card.read(ROWS, card.zeros(ROWS), 0, 3, old(3, ROWS))
    with pytest.raises(DeviceError):
        card.close()
    with pytest.raises(DeviceError, match="failed before"):
        card.wait()
