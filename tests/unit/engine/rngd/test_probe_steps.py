"""What a probe of a card finds: each step on a fake card, and on one that does something wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.rngd import probe_steps
from headrace.engine.rngd.card import CardExecutor
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.furiosa import set_fusion_once
from headrace.engine.rngd.probe_steps import STEPS, Bench
from headrace.engine.rngd.record import Reads
from headrace.errors import DeviceError
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.fake_furiosa import vendor as fake_vendor
from headrace.testing.fake_furiosa.card import FakeTensor
from headrace.testing.fake_furiosa.kernels import compute
from headrace.testing.fake_furiosa.vendor import FakeTorch, TclModule

Memory = torch.Tensor
Kernel = Callable[[str, Sequence[Memory]], list[Memory]]

BY_NAME = {step.name: step.take for step in STEPS}
PREFILLS = ("prefill by narrow", "prefill by whole")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def bench(kernels: Path) -> Bench:
    return make(kernels)


def make(kernels: Path, chips: int = 1, polls: int = 3) -> Bench:
    fake = FakeFuriosa(seed=5, polls_per_step=polls)
    sdk = fake.sdk()
    set_fusion_once(sdk.torch, 8 * chips)

    def open_card(reads: Reads) -> CardExecutor:
        cache = CompiledKernels(sdk, directory=kernels)
        return CardExecutor(sdk, 0, chips=chips, reads=reads, cache=cache)

    return Bench(sdk, 0, chips, open_card, lambda text: None, link_nbytes=(1 << 20,))


def found(bench: Bench, step: str) -> dict[str, Any]:
    return BY_NAME[step](bench)


def test_the_steps_are_in_the_order_in_which_they_need_each_other() -> None:
    names = [step.name for step in STEPS]
    assert [step.name for step in STEPS if not step.needs_card] == ["emulation"] == names[:1]
    assert len(set(names)) == len(names)
    assert set(PREFILLS) < set(names[names.index("reads") :])


@pytest.mark.parametrize("chips", [1, 4])
def test_what_a_card_that_does_all_right_gives(
    kernels: Path, chips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(kernels, chips)
    axes: list[Any] = []
    empty = FakeTorch.empty_sharded

    def recorded(self: FakeTorch, size: Sequence[int], **more: Any) -> FakeTensor:
        axes.append(more["shard_axes"])
        return empty(self, size, **more)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTorch, "empty_sharded", recorded)
        found(bench, "reads")
    assert axes == [[(2, 4)] if chips == 4 else [(None, 1)]]
    assert found(bench, "reads") == {"narrow": True, "whole": True}
    for step in PREFILLS:
        facts = found(bench, step)
        assert facts["agrees"] is True
        assert max(facts["k"], facts["v"], facts["logits"]) == 0.0
        assert min(facts["took_ms"], facts["emulated_ms"]) > 0
    assert bench.sdk.torch.card.faults == []


def test_times_are_of_work_that_is_done(bench: Bench) -> None:
    """The host's loop goes on before a card is done; what is measured waits for it."""
    facts = found(bench, "link")
    assert set(facts) == {"to card, 1 MiB, GB/s", "to host, 1 MiB, GB/s"}
    assert min(facts.values()) > 0
    facts = found(bench, "overlap")
    assert set(facts) == {"kernels_ms", "copy_ms", "both_ms", "overlap_share"}
    shorter = min(facts["kernels_ms"], facts["copy_ms"])
    saved = facts["kernels_ms"] + facts["copy_ms"] - facts["both_ms"]
    assert facts["overlap_share"] == pytest.approx(saved / shorter)
    card = bench.sdk.torch.card
    assert card.quiet()
    assert card.faults == []


def test_the_emulation_is_the_same_twice_and_is_something(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(bench, "emulation")["agrees"] is True
    calls: list[str] = []

    def drifting(self: TclModule, *inputs: Memory) -> list[Memory]:
        calls.append(self.dsl)
        return [each + len(calls) * 1e-4 for each in compute(self.dsl, inputs)]

    def hardly(self: TclModule, *inputs: Memory) -> list[Memory]:
        """Another cell, by less than its square can be told from 0."""
        calls.append(self.dsl)
        results = compute(self.dsl, inputs)
        if "first" in self.dsl:
            next(each for each in inputs if is_cache(each))[1, 0, 0, 0] = len(calls) * 1e-30
        return results

    for wrong in (drifting, hardly, on_host(nan), on_host(zeros)):
        monkeypatch.setattr(TclModule, "__call__", wrong)
        assert found(bench, "emulation")["agrees"] is False


def is_cache(argument: Memory) -> bool:
    return argument.dim() == 4 and argument.shape[1] == 1


def lost(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    """What a kernel changes in place is changed in a copy."""
    return compute(dsl, [each.clone() for each in given])


def unseen(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    """Attention does not see what the kernel before it changed, though the host does."""
    if "full_attention" not in dsl:
        return compute(dsl, given)
    return compute(dsl, [torch.zeros_like(each) if is_cache(each) else each for each in given])


def late(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    """Attention sees the prompt's first chunk only."""
    if "full_attention" not in dsl:
        return compute(dsl, given)
    seen = [each.clone() if is_cache(each) else each for each in given]
    for each in seen:
        if is_cache(each):
            each[17:] = 0
    return compute(dsl, seen)


def off(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    return [each * 1.1 for each in compute(dsl, given)]


def nan(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    return [torch.full_like(each, torch.nan) for each in compute(dsl, given)]


def zeros(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    results = compute(dsl, given)
    for each in given:
        if "tokenwise" in dsl and is_cache(each):
            each.zero_()
    return [torch.zeros_like(each) for each in results]


def another_row(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    """Logits are those of the row before."""
    results = compute(dsl, given)
    return [each.roll(1, -2) for each in results] if "lm_head" in dsl else results


def one_head(dsl: str, given: Sequence[Memory]) -> list[Memory]:
    """Of what the first kernel puts into the caches, the two heads are swapped."""
    results = compute(dsl, given)
    if "first" in dsl:
        for each in given:
            if is_cache(each):
                each.copy_(each.flip(2))
    return results


WRONG: tuple[Kernel, ...] = (lost, unseen, late, off, nan, zeros, another_row, one_head)


def on_host(kernel: Kernel) -> Callable[..., list[Memory]]:
    return lambda self, *inputs: kernel(self.dsl, inputs)


@pytest.fixture
def _emulation_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = type("Right", (TclModule,), {"__call__": on_host(compute)})
    monkeypatch.setattr(FakeTorch, "TclModule", right)


@pytest.mark.usefixtures("_emulation_stays_right")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_card_that_computes_something_else_does_not_agree(
    bench: Bench, wrong: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_vendor, "compute", wrong)
    for step in PREFILLS:
        assert found(bench, step)["agrees"] is False
    assert found(bench, "reads") == {"narrow": True, "whole": True}


@pytest.mark.usefixtures("_emulation_stays_right")
@pytest.mark.parametrize("part", ["k", "v"])
def test_each_part_is_compared_by_itself(
    bench: Bench, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two caches is changed after a kernel has made it, and before it is read."""

    def changed(dsl: str, given: Sequence[Memory]) -> list[Memory]:
        results = compute(dsl, given)
        if "_tokenwise<" in dsl and "last" not in dsl:
            [each for each in given if is_cache(each)]["kv".index(part)].mul_(2)
        return results

    monkeypatch.setattr(fake_vendor, "compute", changed)
    facts = found(bench, PREFILLS[0])
    assert facts["agrees"] is False
    assert facts[part] >= 1.0
    assert facts[part] > facts["kv".replace(part, "")]


@pytest.mark.parametrize("kernel", [nan, zeros])
def test_nothing_agrees_with_no_numbers_and_with_nothing(
    bench: Bench, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the same on both sides."""
    monkeypatch.setattr(fake_vendor, "compute", kernel)
    for step in PREFILLS:
        facts = found(bench, step)
        assert (facts["agrees"], facts["logits"]) == (False, float("inf"))


def test_rounding_agrees(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a bf16's last bit in each result is no other arithmetic."""
    right = type("Right", (TclModule,), {"__call__": on_host(compute)})
    monkeypatch.setattr(FakeTorch, "TclModule", right)

    def rounded(dsl: str, given: Sequence[Memory]) -> list[Memory]:
        return [(each.float() * (1 + 2**-8)).to(each.dtype) for each in compute(dsl, given)]

    monkeypatch.setattr(fake_vendor, "compute", rounded)
    facts = found(bench, PREFILLS[0])
    assert facts["agrees"] is True
    assert 0 < facts["logits"] < probe_steps.AGREES_WITHIN


class PanicException(BaseException):
    """As the vendor's native part names its own."""


def test_views_that_give_other_rows_are_told_and_whole_tensors_are_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = FakeTensor.narrow
    monkeypatch.setattr(FakeTensor, "narrow", lambda self, dim, a, n: narrow(self, dim, a - 1, n))
    assert found(bench, "reads") == {"narrow": False, "whole": True}
    assert [found(bench, step)["agrees"] for step in PREFILLS] == [False, True]


def test_whole_tensors_that_come_in_another_order_are_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a cache whose heads are put together from chips in a wrong order."""
    copy_to = FakeTensor.copy_to

    def turned(self: FakeTensor, target: Memory, *, non_blocking: bool) -> Memory:
        if len(target) > 40:  # rows of a view are fewer
            self = FakeTensor(self.card, self.memory.flip(-1), self.inter_chip_axes)
        return copy_to(self, target, non_blocking=non_blocking)

    monkeypatch.setattr(FakeTensor, "copy_to", turned)
    assert found(bench, "reads") == {"narrow": True, "whole": False}
    assert [found(bench, step)["agrees"] for step in PREFILLS] == [True, False]


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_views_that_cannot_be_made_are_told_and_whole_tensors_are_tried(
    bench: Bench, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise kind("as_strided is not there\nat some place")

    monkeypatch.setattr(FakeTensor, "narrow", refused)
    error = f"{kind.__name__}: as_strided is not there"
    assert found(bench, "reads") == {"narrow": False, "narrow, error": error, "whole": True}
    with pytest.raises(DeviceError, match="as_strided"):
        found(bench, PREFILLS[0])
    assert found(bench, PREFILLS[1])["agrees"] is True


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("step", PREFILLS)
def test_a_copy_that_fails_is_an_error(bench: Bench, step: str, failing: int) -> None:
    bench.sdk.torch.card.fail_copy = failing
    with pytest.raises(DeviceError, match="as it was told to"):
        found(bench, step)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("echo noise; echo opened", {"opens": True, "status": 0, "said": ""}),
        ("exit 0", {"opens": False, "status": 0, "said": ""}),
        ("echo opened; exit 1", {"opens": False, "status": 1, "said": ""}),
        ("echo a >&2; echo busy >&2; exit 1", {"opens": False, "status": 1, "said": "busy"}),
        ("kill -6 $$", {"opens": False, "status": -6, "said": ""}),
    ],
)
def test_what_a_second_process_comes_to_is_told(
    bench: Bench, tmp_path: Path, text: str, wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(tmp_path, text, monkeypatch)
    assert found(bench, "second process") == wanted


def test_a_second_process_that_hangs_is_ended(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(tmp_path, "exec sleep 600", monkeypatch)
    monkeypatch.setattr(probe_steps, "SECOND_PROCESS_S", 0.1)
    facts = found(bench, "second process")
    assert facts == {"opens": False, "how": "it took more than 0 s"}


def run_as(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the interpreter that the second process is."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{text}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
