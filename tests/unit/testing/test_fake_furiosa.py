"""The fake of FuriosaAI's packages tells on misuse, and is as the installed ones are."""

from __future__ import annotations

import gc
import json
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.engine.rngd import cards
from headrace.engine.rngd.signature import read_signature
from headrace.testing.fake_furiosa import FakeFuriosa, Fault
from headrace.testing.fake_furiosa import open as open_fake
from headrace.testing.fake_furiosa.card import MAX_IN_FLIGHT, FakeMark, FakeTensor
from headrace.testing.fake_furiosa.smi import FakeSmi
from headrace.testing.fake_furiosa.vendor import InnerRunnable, UnsupportedOpError

BF16 = torch.bfloat16
WHERE = "furiosa:0"
AGREES_WITHIN = 0.03
"""Root mean square of what the fake's numbers are off, as a share of the installed kernels': two
ways of bf16 rounding differ by about a hundredth after three layers.
"""


def memory(fake: FakeFuriosa, *shape: int, dtype: torch.dtype = BF16) -> FakeTensor:
    return fake.torch.empty_sharded(shape, shard_axes=[(None, 1)], dtype=dtype, device=WHERE)


def attention(fake: FakeFuriosa, tokens: int = 4) -> Any:
    config = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 20,
        "intermediate_size": 16,
        "max_position_embeddings": 8,
    }
    factory = fake.sdk().kernels("llama").llama3_1_8b_w16a16_full_attention
    return factory(1, 8, tokens, 9, hf_config_overrides=config)


def test_it_says_that_it_is_fake() -> None:
    sdk = open_fake()
    assert sdk.name == "fake furiosa"
    assert list(sdk.versions) == ["fake-furiosa"]
    told = cards.describe(sdk.smi, 0)
    assert (told["product_name"], told["driver"]) == ("fake card", "0.0.0")
    assert (told["bdf"], told["serial"]) == ("ffff:00:00.0", "FAKE0000")
    with pytest.raises(AttributeError):
        cards.card_of(sdk.smi, 0).no_such_thing()
    assert cards.busy_cores(sdk.smi, 0) == []
    assert len(cards.busy_cores(FakeSmi(2, busy=True), 1)) == 8
    assert len(FakeSmi(3).list_pci_devices()) == 3
    with pytest.raises(ModuleNotFoundError, match="no kernels for 'other'"):
        sdk.kernels("other")


def test_nothing_runs_before_it_is_looked_for() -> None:
    fake = FakeFuriosa(polls_per_step=2)
    card, host = memory(fake, 3), torch.full((3,), 5, dtype=BF16)
    card.copy_(host, non_blocking=True)
    back = torch.zeros(3, dtype=BF16)
    back.copy_(card, non_blocking=True)  # type: ignore[arg-type]
    event = fake.torch.Event(WHERE)
    event.record()
    looks = 1
    while not event.query():
        looks += 1
    assert looks == 6
    assert back.tolist() == [5, 5, 5]
    assert fake.card.faults == []
    assert fake.card.quiet()


def test_memory_is_no_number_until_it_is_written_and_after_it_was_given_up() -> None:
    fake = FakeFuriosa()
    card = memory(fake, 2)
    under, view = card.memory, card.narrow(0, 0, 1)
    assert under.isnan().all()
    card.copy_(torch.ones(2, dtype=BF16))
    del card
    gc.collect()
    assert under.tolist() == [1, 1]  # a view keeps it
    del view
    gc.collect()
    assert under.isnan().all()


def test_memory_that_was_given_up_is_used_again_after_what_is_queued_on_its_stream() -> None:
    fake = FakeFuriosa()
    card, back, late = memory(fake, 2), torch.zeros(2, dtype=BF16), torch.zeros(2, dtype=BF16)
    card.copy_(torch.ones(2, dtype=BF16))
    back.copy_(card, non_blocking=True)  # type: ignore[arg-type]
    with fake.torch.Stream(WHERE) as other:
        late.copy_(card, non_blocking=True)  # type: ignore[arg-type]
    del card
    gc.collect()
    while fake.card.default.length:
        fake.card.default.step()
    other.synchronize()
    assert back.tolist() == [1, 1]
    assert late.isnan().all()


def test_an_event_orders_two_streams() -> None:
    fake = FakeFuriosa()
    card, back = memory(fake, 2), torch.zeros(2, dtype=BF16)
    host = torch.ones(2, dtype=BF16)
    event, never = fake.torch.Event(WHERE), fake.torch.Event(WHERE)
    card.copy_(host, non_blocking=True)
    event.record(fake.torch.current_stream(WHERE))
    other = fake.torch.Stream(WHERE)
    event.wait(other)
    never.wait(other)
    never.synchronize()
    assert never.query()
    before = fake.torch.set_stream(other)
    back.copy_(card, non_blocking=True)  # type: ignore[arg-type]
    assert fake.torch.set_stream(before) is other
    other.synchronize()
    assert back.tolist() == [1, 1]
    event.synchronize()


def run_on(fake: FakeFuriosa, tokens: int = 4) -> Any:
    compiled = fake.torch.CompileModule.from_module(
        fake.torch.TclModule(attention(fake, tokens)),
        tuple(
            torch.empty(each.shape, dtype=getattr(torch, each.dtype))
            for each in read_signature(attention(fake, tokens).dsl).arguments
        ),
    )
    inner = InnerRunnable.deserialize(compiled.runnable._inner.serialize())
    return fake.torch.Runnable(inner)


def test_a_kernel_computes_on_the_card_what_it_computes_on_the_host() -> None:
    fake = FakeFuriosa()
    signature = read_signature(attention(fake).dsl)
    hosts = [torch.randn(each.shape).to(BF16) for each in signature.arguments]
    hosts[1] = torch.arange(1, 9, dtype=torch.int32)[None]
    hosts[4] = torch.ones(1, 4, 8, dtype=torch.bool).tril()
    cards_ = [memory(fake, *each.shape, dtype=each.dtype) for each in hosts]
    for card, host in zip(cards_, hosts, strict=True):
        card.copy_(host)
    (result,) = run_on(fake).to(WHERE)(*cards_)
    (right,) = fake.torch.TclModule(attention(fake))(*hosts)
    back = torch.zeros_like(right)
    back.copy_(result)
    assert torch.equal(back, right)
    with pytest.raises(RuntimeError, match="query: "):
        fake.torch.TclModule(attention(fake))(hosts[0][:2], *hosts[1:])
    with pytest.raises(ValueError, match="one prompt"):
        fake.sdk().kernels("llama").llama3_1_8b_w16a16_full_attention(2, 8, 4, 9)


def let_go_of_source(fake: FakeFuriosa) -> None:
    memory(fake, 2).copy_(torch.ones(2, dtype=BF16), non_blocking=True)
    fake.card.default.synchronize()


def change_source(fake: FakeFuriosa) -> None:
    host = torch.ones(2, dtype=BF16)
    memory(fake, 2).copy_(host, non_blocking=True)
    host.zero_()
    fake.card.default.synchronize()


def let_go_of_target(fake: FakeFuriosa) -> None:
    torch.ones(2, dtype=BF16).copy_(memory(fake, 2), non_blocking=True)  # type: ignore[arg-type]
    fake.card.default.synchronize()


def read_from_the_host(fake: FakeFuriosa) -> None:
    torch.ones(2, dtype=BF16) + memory(fake, 2)  # type: ignore[operator]


def copy_another_shape(fake: FakeFuriosa) -> None:
    memory(fake, 2).copy_(torch.ones(3, dtype=BF16))


def copy_another_dtype(fake: FakeFuriosa) -> None:
    torch.ones(2).copy_(memory(fake, 2))  # type: ignore[arg-type]


def queue_too_much(fake: FakeFuriosa) -> None:
    host, card = torch.ones(2, dtype=BF16), memory(fake, 2)
    for _ in range(MAX_IN_FLIGHT + 1):
        card.copy_(host, non_blocking=True)


def wait_for_what_never_comes(fake: FakeFuriosa) -> None:
    other = fake.torch.Stream(WHERE)
    other.push(FakeMark())
    other.synchronize()


def use_a_second_thread(fake: FakeFuriosa) -> None:
    memory(fake, 2)
    told: list[Fault] = []

    def use() -> None:
        try:
            memory(fake, 2)
        except Fault as exc:
            told.append(exc)

    other = threading.Thread(target=use)
    other.start()
    other.join()
    raise told[0]


def run_on_host_memory(fake: FakeFuriosa) -> None:
    run_on(fake).to(WHERE)(*[torch.ones(1)] * 5)


def run_on_another_shape(fake: FakeFuriosa) -> None:
    run_on(fake).to(WHERE)(*[memory(fake, 1)] * 5)


def make_card_memory_by_empty(fake: FakeFuriosa) -> None:
    shape = fake.torch.ir.FlatDramShape([2], [1], [2], [1], [(None, 1)], BF16)
    fake.torch.empty(shape, "cuda")


@pytest.mark.parametrize(
    "misuse",
    [
        let_go_of_source,
        change_source,
        let_go_of_target,
        read_from_the_host,
        copy_another_shape,
        copy_another_dtype,
        queue_too_much,
        wait_for_what_never_comes,
        use_a_second_thread,
        run_on_host_memory,
        run_on_another_shape,
        make_card_memory_by_empty,
    ],
)
def test_misuse_is_a_fault(misuse: Callable[[FakeFuriosa], None]) -> None:
    fake = FakeFuriosa()
    with pytest.raises(Fault):
        misuse(fake)
    assert len(fake.card.faults) == 1


def test_a_card_that_failed_answers_nothing() -> None:
    fake = FakeFuriosa()
    fake.card.fail_copy = 0
    back = torch.zeros(2, dtype=BF16)
    with pytest.raises(Fault, match="as it was told to"):
        back.copy_(memory(fake, 2))  # type: ignore[arg-type]
    assert fake.card.faults == []
    with pytest.raises(Fault, match="queued work failed"):
        fake.torch.Event(WHERE)


def test_fusion_is_taken_once_and_by_whatever_asks_first() -> None:
    fake = FakeFuriosa()
    assert fake.torch.set_fusion(32).num_chips == 4
    assert fake.torch.set_fusion(32).num_fusion == 32
    with pytest.raises(RuntimeError, match="set to 32 before"):
        fake.torch.set_fusion(8)
    for ask in ("get_fusion", "Stream", "Event", "current_stream"):
        fake = FakeFuriosa()
        getattr(fake.torch, ask)(*([] if ask == "get_fusion" else [WHERE]))
        with pytest.raises(RuntimeError, match="set to 1 before"):
            fake.torch.set_fusion(8)
    with pytest.raises(RuntimeError, match="no such device: 'cuda:0'"):
        fake.torch.Stream("cuda:0")
    with pytest.raises(RuntimeError, match="compiled for another device"):
        run_on(fake)(memory(fake, 1))


def test_what_cannot_be_compiled_is_not() -> None:
    fake = FakeFuriosa()
    module = fake.torch.TclModule(attention(fake))
    with pytest.raises(UnsupportedOpError, match="query"):
        fake.torch.CompileModule.from_module(module, (torch.ones(1),) * 5)
    config = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"vocab_size": 20, "intermediate_size": 16, "max_position_embeddings": 8}
    factory = fake.sdk().kernels("llama").llama3_1_8b_w16a16_last_tokenwise_with_lm_head
    mixed = fake.torch.TclModule(factory(4, hf_config_overrides={**config, **more}))
    with pytest.raises(UnsupportedOpError, match="some arguments are placed"):
        fake.torch.CompileModule.from_module(mixed, ())
    fake.torch.compiler.toolchain = False
    for toolchain in (False, True):
        fake.torch.compiler.toolchain = toolchain
        with pytest.raises(UnsupportedOpError, match="os error 2"):
            run_on(fake)
    with pytest.raises(ValueError, match="failed to deserialize"):
        InnerRunnable.deserialize(b"{}")


@pytest.fixture(scope="module")
def contract(rngd_python: str) -> Any:
    """What the script says of the fake and of the installed packages."""
    script = ["-m", "tests.unit.testing.furiosa_contract"]
    done = subprocess.run([rngd_python, *script], capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.rngd_emulation
def test_its_kernels_take_and_give_what_the_installed_ones_do(contract: Any) -> None:
    fake, installed = contract["signatures"]
    assert len(fake) == 4
    assert fake == installed


@pytest.mark.rngd_emulation
def test_its_calls_have_the_parameters_of_the_installed_ones(contract: Any) -> None:
    fake, installed = contract["calls"]
    assert len(fake) == 18
    assert fake == installed


@pytest.mark.rngd_emulation
def test_its_numbers_are_those_of_the_installed_kernels_but_for_rounding(contract: Any) -> None:
    assert len(contract["shares"]) == 7
    assert max(contract["shares"].values()) <= AGREES_WITHIN
