"""After an import the fake computes what the cpu decoder computes with these cells, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.testing.fake_rebellions import FakeRebellions
from tests.e2e import families
from tests.unit.testing.fake_rebellions import driving

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 20  # over block boundaries, and from windows that are not full to ones that slide
LENGTHS = (5, 15, 16, 17, 40)  # around the window of 16


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_prompt_goes_on_as_on_the_cpu(family: str, num_tokens: int) -> None:
    driven, first = driving.imported(num_tokens, family)
    tokens, rows = driving.expected(family, num_tokens, STEPS)
    assert first == tokens[0]
    assert len(set(tokens)) > 5, "tokens that never change show nothing"
    assert driven.run(num_tokens, STEPS, first) == rows
    assert not driven.fake.card.faults


@pytest.mark.parametrize("family", ["gemma4", "mistral", "exaone4"])
@pytest.mark.parametrize("attn_impl", ["eager", "flash_attn"])
def test_other_families_go_on_as_on_the_cpu(family: str, attn_impl: Any) -> None:
    driven, first = driving.imported(17, family, attn_impl=attn_impl)
    assert driven.run(17, 4, first) == driving.expected(family, 17, 4)[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_go_on_as_on_the_cpu(dtype: str) -> None:
    driven, first = driving.imported(17, "gemma3", dtype=dtype)
    assert driven.run(17, 4, first) == driving.expected("gemma3", 17, 4, dtype)[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_its_own_prefill_is_the_sources(family: str, num_tokens: int) -> None:
    """Logits, and what lies on the card, in the order in which an import would have put it."""
    sink = driving.handed_off(family, num_tokens)
    driven = driving.load(family=family)
    row = driven.prefill(families.make_prompt(num_tokens))
    assert row.numpy().tobytes() == sink.logits
    imported, first = driving.imported(num_tokens, family)
    for meta in driven.config.cache_metas:
        for position in range(num_tokens):
            missing = num_tokens - meta.shape[2]
            # A decoder needs one row less than a window has, so that the oldest was not sent.
            if not meta.is_full and (position < missing or position == missing >= 0):
                continue
            block, line = divmod(
                position if meta.is_full else position - max(0, missing), meta.shape[2]
            )
            assert torch.equal(
                driven.fetch(meta.name, block)[:, line], imported.fetch(meta.name, block)[:, line]
            ), (meta.name, position)
    assert driven.run(num_tokens, 4, first) == driving.expected(family, num_tokens, 4)[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prefill_goes_on_from_a_prefix(family: str) -> None:
    prompt = families.make_prompt(29)
    driven = driving.load(family=family)
    driven.prefill(prompt[:24])
    logits = driven.prefill(prompt[24:], start=24)
    _, rows = families.reference(families.module_of(family), prompt, 1, prefill_chunk=24)
    assert logits.numpy().tobytes() == rows[0]
    assert driven.decode(families.greedy(rows[0]), 29).numpy().tobytes() == rows[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_order_of_the_window_is_the_same_to_a_model(family: str) -> None:
    driven = driving.load(FakeRebellions(sliding="ring"), family)
    driven.prefill(families.make_prompt(21))
    tokens, rows = driving.expected(family, 21, 6)
    assert driven.run(21, 6, tokens[0]) == rows


def test_items_of_a_batch_do_not_see_each_other() -> None:
    driven = driving.load(batch_size=2)
    blocks = driving.MAX_SEQ_LEN // driving.BLOCK
    tables = torch.arange(2 * blocks, dtype=torch.int16).view(2, blocks)
    lengths = (17, 9)
    for length, table in zip(lengths, tables, strict=True):
        driven.prefill(families.make_prompt(length), block_tables=table)
    expected = [driving.expected("llama", length, 3) for length in lengths]
    for at in range(3):
        logits = driven.model.decoders[2](
            input_ids=torch.tensor([[tokens[at]] for tokens, _ in expected]),
            cache_position=torch.tensor([[length + at] for length in lengths], dtype=torch.int32),
            block_tables=tables,
        ).logits
        assert [row.numpy().tobytes() for row in logits[:, 0]] == [rows[at] for _, rows in expected]
    assert not driven.fake.card.faults
