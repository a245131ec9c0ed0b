"""A fake card tells on misuse, fails on command, and is otherwise where a knob says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from headrace.testing.fake_rebellions import PRIVATE_CALLS, Call, FakeRebellions, Fault
from tests.e2e import families
from tests.unit.testing.fake_rebellions import driving
from tests.unit.testing.fake_rebellions.driving import BLOCK, Driven

pytestmark = pytest.mark.usefixtures("one_thread")

K0 = "past_key_values_0"
V0 = "past_key_values_1"


def ramp(driven: Driven, name: str = K0) -> torch.Tensor:
    mirror = driven.mirror(name)
    return mirror.copy_(torch.arange(mirror.numel()).view(mirror.shape))


def faults(driven: Driven, call: Callable[[], object], match: str) -> None:
    """The call raises, and the card remembers it."""
    with pytest.raises(Fault, match=match):
        call()
    assert len(driven.fake.card.faults) == 1
    assert not isinstance(Fault(), RuntimeError)


def test_a_block_is_read_at_the_time_of_the_call() -> None:
    driven = driving.load()
    mirror = ramp(driven)
    driven.update(K0, mirror, 2)
    sent = mirror[2].clone()
    mirror.fill_(7)
    assert torch.equal(driven.fetch(K0, 2), sent)
    assert driven.fetch(K0, 1).isnan().all()
    assert driven.fake.card.counts["updates"] == 1
    assert driven.fake.card.counts["updated_nbytes"] == sent.numel() * 4
    assert driven.fake.card.counts["fetches"] == 2
    assert driven.fake.card.log[0] == Call("update", K0, 2, 0, BLOCK)


def test_a_fetch_writes_nothing_but_its_block() -> None:
    driven = driving.load()
    driven.update(K0, ramp(driven), 2)
    mirror = driven.mirror(K0)
    driven.runtime._fetch_kv_cache(mirror, 2, 0, BLOCK, K0)
    assert mirror[2].any()
    mirror[2] = 0
    assert not mirror.any()


def test_a_block_is_copied_on_the_card() -> None:
    driven = driving.load()
    for name in (K0, V0):
        driven.update(name, ramp(driven, name), 1)
    driven.runtime._copy_kv_cache(1, 4, 3)
    for name in (K0, V0):
        assert torch.equal(driven.fetch(name, 4)[:, :3], driven.fetch(name, 1)[:, :3])
        assert driven.fetch(name, 4)[:, 3:].isnan().all()
    faults(driven, lambda: driven.runtime._copy_kv_cache(1, 99, 3), "block 1 to 99")


def test_sizes_are_told() -> None:
    driven = driving.load()
    size = driven.mirror(K0).numel() * 4
    assert driven.runtime._get_kv_cache_size(K0) == size
    assert driven.runtime._get_kv_cache_size(None) == 8 * size
    faults(driven, lambda: driven.runtime._get_kv_cache_size("other"), "no cache is named 'other'")


def misaligned(driven: Driven) -> torch.Tensor:
    numel = driven.mirror(K0).numel()
    flat = driven.fake.aligned(2 * numel + 8).view(torch.float32)
    return flat[4:].view(driven.meta(K0).shape)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (misaligned, "no multiple of 4096"),
        (lambda driven: driven.mirror(K0)[:2], "a mirror"),
        (lambda driven: driven.mirror(K0).transpose(1, 2), "a mirror"),
        (lambda driven: driven.mirror(K0, torch.float16), "torch.float16"),
    ],
)
@pytest.mark.parametrize("call", ["_update_kv_cache", "_fetch_kv_cache"])
def test_a_wrong_mirror_is_told(
    make: Callable[[Driven], torch.Tensor], match: str, call: str
) -> None:
    driven = driving.load()
    mirror = make(driven)
    faults(driven, lambda: getattr(driven.runtime, call)(mirror, 0, 0, BLOCK, K0), match)


@pytest.mark.parametrize(
    ("block", "offset", "size", "name", "match"),
    [
        (8, 0, BLOCK, K0, "block 8"),
        (-1, 0, BLOCK, K0, "block -1"),
        (0, 0, BLOCK + 1, K0, r"rows \[0, 9\)"),
        (0, 0, 0, K0, r"rows \[0, 0\)"),
        (0, 0, BLOCK, "past_key_values_8", "no cache is named"),
    ],
)
def test_a_wrong_place_is_told(block: int, offset: int, size: int, name: str, match: str) -> None:
    driven = driving.load()
    mirror = driven.mirror(K0)
    faults(
        driven,
        lambda: driven.runtime._update_kv_cache(mirror, block, offset, size, name),
        match,
    )


def test_parts_of_a_block_are_moved_only_where_they_can_be() -> None:
    driven = driving.load()
    with pytest.raises(RuntimeError, match="whole blocks"):
        driven.runtime._update_kv_cache(ramp(driven), 1, 0, 3, K0)
    assert not driven.fake.card.faults, "who asks does nothing wrong"
    driven = driving.load(FakeRebellions(sub_blocks=True))
    mirror = ramp(driven)
    driven.runtime._update_kv_cache(mirror, 1, 2, 3, K0)
    found = driven.fetch(K0, 1)
    assert torch.equal(found[:, 2:5], mirror[1, :, 2:5])
    assert found[:, :2].isnan().all()
    assert found[:, 5:].isnan().all()
    part = driven.mirror(K0)
    driven.runtime._fetch_kv_cache(part, 1, 3, 1, K0)
    assert torch.equal(part[1, :, 3], mirror[1, :, 3])
    assert not part[1, :, :3].any()


def test_a_second_thread_is_told() -> None:
    driven = driving.load()
    mirror = driven.mirror(K0)
    raised: list[BaseException] = []

    def run() -> None:
        for call in (
            lambda: driven.update(K0, mirror),
            lambda: driven.decode(1, 0),
            lambda: driven.prefill([1]),
        ):
            try:
                call()
            except Fault as exc:
                raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(raised) == len(driven.fake.card.faults) == 3
    driven.update(K0, mirror)


def test_a_call_within_a_call_is_told() -> None:
    fake = FakeRebellions(step_s=60.0, sleep=lambda _: driven.update(K0, mirror))
    driven = driving.load(fake)
    mirror = driven.mirror(K0)
    driven.prefill([5, 6, 7])
    faults(driven, lambda: driven.decode(1, 3), "_update_kv_cache within decode")
    driven.update(K0, mirror)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_update_between_two_steps_is_told(family: str) -> None:
    """Of any block that the sequence reads, also of one that holds the same afterwards."""
    driven, first = driving.imported(20, family)
    for place in range(8):
        name = f"past_key_values_{place}"
        mirror = driven.mirror(name)
        mirror[0] = driven.fetch(name)
        driven.decode(first, 20 + place)
        driven.update(name, mirror)
        where = f"the decode steps at positions {20 + place} and {21 + place}"
        with pytest.raises(Fault, match=rf"\('{name}', 0\) was updated between {where}"):
            driven.decode(first, 21 + place)
    assert len(driven.fake.card.faults) == 8


def test_an_update_elsewhere_disturbs_nobody() -> None:
    """Before the first step, of a block that the sequence has not come to, or of all of them."""
    driven, first = driving.imported(20)
    driven.decode(first, 20)
    driven.update(K0, driven.mirror(K0), 5)
    driven.decode(first, 21)
    driven.decode(first, 22)
    driven.import_prompt(driving.handed_off("llama", 23), 23)  # as long as what was decoded
    tokens, rows = driving.expected("llama", 23, 2)
    assert driven.run(23, 2, tokens[0]) == rows
    driven.import_prompt(driving.handed_off("llama", 20), 20)
    driven.decode(first, 20)
    driven.prefill(families.make_prompt(21))
    driven.decode(first, 21)
    assert not driven.fake.card.faults


def test_a_copy_on_the_card_disturbs_as_well() -> None:
    driven, first = driving.imported(20)
    driven.decode(first, 20)
    driven.runtime._copy_kv_cache(5, 1, BLOCK)
    faults(driven, lambda: driven.decode(first, 21), "was updated between")


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ([0, 1, 1, 3, 4, 5, 6, 7], "named twice"),
        ([0, 1, 8, 3, 4, 5, 6, 7], "there are 8"),
        ([0, 1, 2, -1, -1, -1, -1, -1], "there are 8"),
    ],
)
def test_a_wrong_table_is_told(table: list[int], match: str) -> None:
    driven, first = driving.imported(20)
    given = torch.tensor([table], dtype=torch.int16)
    faults(driven, lambda: driven.decode(first, 20, block_tables=given), match)


def test_a_block_stands_for_those_that_are_not_reached() -> None:
    driven, first = driving.imported(20)
    given = torch.tensor([[0, 1, 2, 2, 2, 2, 2, 2]], dtype=torch.int16)
    expected = driving.expected("llama", 20, 4)[1]
    assert driven.run(20, 4, first, block_tables=given) == expected
    faults(driven, lambda: driven.decode(first, 24, block_tables=given), "named twice")


def test_a_wrong_window_is_told() -> None:
    driven, first = driving.imported(20, "gemma3")
    given = torch.ones(1, 1, dtype=torch.int16)
    faults(driven, lambda: driven.decode(first, 20, local_block_tables=given), "window 1")


def test_a_position_that_is_none_is_told() -> None:
    driven, first = driving.imported(20)
    faults(driven, lambda: driven.decode(first, 64), "position 64")


def test_an_update_fails_on_command() -> None:
    """Once; what its block holds then is not known."""
    driven = driving.load()
    driven.fake.card.fail_update(after=1)
    mirror = ramp(driven)
    driven.update(K0, mirror, 0)
    with pytest.raises(RuntimeError, match="fake driver"):
        driven.update(K0, mirror, 0)
    assert driven.fetch(K0, 0).isnan().all()
    driven.update(K0, mirror, 0)
    assert torch.equal(driven.fetch(K0, 0), mirror[0])
    assert not driven.fake.card.faults


def test_updates_go_stale_on_command() -> None:
    driven = driving.load()
    driven.fake.card.go_stale(after=1)
    mirror = ramp(driven)
    driven.update(K0, mirror, 0)
    driven.update(K0, mirror, 1)
    driven.update(K0, mirror.fill_(0.5), 0)
    assert not (driven.fetch(K0, 0) == 0.5).any()
    assert driven.fetch(K0, 1).isnan().all()
    assert driven.fake.card.counts["updates"] == 3


def test_a_step_fails_on_command() -> None:
    driven, first = driving.imported(20)
    driven.fake.card.fail_decode(after=1)
    row = driven.decode(first, 20)
    with pytest.raises(RuntimeError, match="fake driver"):
        driven.decode(int(row.argmax()), 21)
    again = driven.decode(int(row.argmax()), 21).numpy().tobytes()
    assert again == driving.expected("llama", 20, 2)[1][1]
    assert driven.fake.card.counts["decodes"] == 2


def test_memory_may_come_with_the_first_run() -> None:
    driven = driving.load(FakeRebellions(needs_warm_up="raises"))
    mirror = ramp(driven)
    with pytest.raises(RuntimeError, match="before the first run"):
        driven.update(K0, mirror, 1)
    driven.prefill([5])
    driven.update(K0, mirror, 1)
    assert torch.equal(driven.fetch(K0, 1), mirror[1])
    assert driven.fake.card.counts["warm_ups"] == 1


def test_what_is_moved_before_the_first_run_may_be_lost() -> None:
    driven = driving.load(FakeRebellions(needs_warm_up="loses"))
    mirror = ramp(driven)
    driven.update(K0, mirror, 1)
    assert driven.fetch(K0, 1).isnan().all()
    driven.prefill([5])
    driven.update(K0, mirror, 1)
    assert torch.equal(driven.fetch(K0, 1), mirror[1])


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("num_tokens", [7, 10])
def test_a_leak_shows_what_was_there_before(family: str, num_tokens: int) -> None:
    """Unless it was cleared; seven tokens end one row before the block does."""
    expected = driving.expected(family, num_tokens, 3)

    def steps(*, leaks: bool, clears: bool) -> list[bytes]:
        driven = driving.load(FakeRebellions(leaks=leaks), family)
        driven.prefill(families.make_prompt(40, seed=1))
        if clears:
            driven.clear()
        for at, token in enumerate(families.make_prompt(num_tokens)):
            driven.decode(token, at)  # what is one row further is as it was
        return driven.run(num_tokens, 3, expected[0][0])

    kept = steps(leaks=False, clears=False)
    assert steps(leaks=False, clears=True) == kept
    assert steps(leaks=True, clears=True) == kept
    assert steps(leaks=True, clears=False) != kept


def test_a_window_may_be_kept_as_a_ring() -> None:
    rows = {}
    for sliding in ("by_position", "ring"):
        driven = driving.load(FakeRebellions(sliding=sliding), "mistral")
        driven.prefill(families.make_prompt(21))
        rows[sliding] = driven.fetch(K0)
    ahead = 21 - 16
    assert torch.equal(rows["ring"], rows["by_position"].roll(ahead, dims=1))


@pytest.mark.parametrize("missing", PRIVATE_CALLS)
def test_private_calls_can_be_taken_away(missing: str) -> None:
    calls = [name for name in PRIVATE_CALLS if name != missing]
    runtime = driving.load(FakeRebellions(calls=calls)).runtime
    assert [name for name in PRIVATE_CALLS if hasattr(runtime, name)] == calls


def test_a_paced_card_takes_its_time() -> None:
    slept: list[float] = []
    fake = FakeRebellions(update_nbytes_per_s=100.0, step_s=60.0, sleep=slept.append)
    driven = driving.load(fake)
    driven.update(K0, driven.mirror(K0))
    nbytes = driven.mirror(K0)[0].numel() * 4
    assert slept.pop() == pytest.approx(nbytes / 100, rel=0.1)
    driven.prefill([5, 6, 7])
    assert not slept
    driven.decode(1, 3)
    assert slept.pop() == pytest.approx(60.0, rel=0.1)
    assert not slept


def test_another_model_takes_the_card_over() -> None:
    fake = FakeRebellions()
    first = driving.load(fake)
    first.update(K0, first.mirror(K0))
    second = driving.load(fake, "gemma3")
    assert second.fetch(K0).isnan().all()
