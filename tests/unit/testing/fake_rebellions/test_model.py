"""Prefill and decoders of the fake take what the vendor's take, and what is left out shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from tests.e2e import families
from tests.unit.testing.fake_rebellions import driving
from tests.unit.testing.fake_rebellions.driving import CHUNK

pytestmark = pytest.mark.usefixtures("one_thread")

I16 = torch.int16


def same(driven: driving.Driven, family: str, num_tokens: int, **changes: Any) -> bool:
    """Whether two steps are what they should be."""
    tokens, rows = driving.expected(family, num_tokens, 2)
    return driven.run(num_tokens, 2, tokens[0], **changes) == rows


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_who_brings_no_tables_decodes_from_other_blocks(family: str) -> None:
    driven, _ = driving.imported(20, family)
    assert same(driven, family, 20)
    driven, _ = driving.imported(20, family)
    assert not same(driven, family, 20, block_tables=None, local_block_tables=None)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_tables_its_own_prefill_is_decoded(family: str) -> None:
    """Over and over: blocks are given back with each prefill, and another one each time."""
    driven = driving.load(family=family)
    name = next(meta.name for meta in driven.config.cache_metas if meta.is_full)
    ids, seen = torch.tensor([families.make_prompt(20)]), []
    left_out = {"block_tables": None, "local_block_tables": None, "attention_mask": None}
    for _ in range(3):
        driven.model.prefill_decoder(
            input_ids=ids, cache_position=torch.arange(20, dtype=torch.int32)[None], batch_idx=0
        )
        seen.append({at for at in range(8) if not driven.fetch(name, at).isnan().any()})
        assert same(driven, family, 20, **left_out)
    assert 0 not in seen[0]
    assert len(seen[0]) < len(seen[1]) < len(seen[2])


def test_who_brings_no_mask_sees_almost_nothing() -> None:
    """The card's own is filled by its own prefill, and by that only without tables."""
    driven, _ = driving.imported(20, "gemma3")
    assert not same(driven, "gemma3", 20, attention_mask=None)
    driven = driving.load(family="gemma3")
    driven.prefill(families.make_prompt(20))
    assert not same(driven, "gemma3", 20, attention_mask=None)
    driven = driving.load(family="gemma3")
    driven.prefill(families.make_prompt(20))
    assert same(driven, "gemma3", 20)


def test_a_mask_decides_what_is_seen() -> None:
    driven, first = driving.imported(10, "gemma3")
    mask = torch.zeros(1, driving.MAX_SEQ_LEN)
    mask[:, 5:11] = 1
    less = driven.decode(first, 10, attention_mask=mask)
    mask[:, :17] = 1
    more = driven.decode(first, 10, attention_mask=mask)  # with a row that nobody wrote
    right = driven.decode(first, 10)
    assert right.numpy().tobytes() == driving.expected("gemma3", 10, 1)[1][0]
    assert not torch.equal(less, right)
    assert more.isnan().any()


def test_a_models_idea_of_the_position_counts() -> None:
    driven, first = driving.imported(20, "gemma3")
    ids = torch.tensor([[19]], dtype=torch.int32)
    wrong = driven.decode(first, 20, position_ids=ids).numpy().tobytes()
    assert wrong != driving.expected("gemma3", 20, 1)[1][0]


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("llama", {"input_ids": torch.zeros(1, 1, dtype=torch.int32)}, "input_ids is"),
        ("llama", {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, "input_ids is"),
        ("llama", {"cache_position": torch.zeros(1, 1, dtype=torch.int64)}, "cache_position is"),
        ("llama", {"block_tables": torch.arange(8)[None]}, "block_tables is"),
        ("llama", {"block_tables": torch.arange(8, dtype=I16)}, "block_tables is"),
        ("llama", {"block_tables": torch.arange(4, dtype=I16)[None]}, "block_tables is"),
        ("llama", {"local_block_tables": torch.zeros(1, 1, dtype=I16)}, "local_.* is no input"),
        ("mistral", {"block_tables": torch.arange(8, dtype=I16)[None]}, "block_tables is no inp"),
        ("gemma3", {"local_block_tables": torch.zeros(1, dtype=I16)}, "local_block_tables is"),
        ("gemma3", {"attention_mask": torch.ones(1, 64, dtype=torch.bool)}, "attention_mask is"),
        ("gemma3", {"attention_mask": torch.ones(1, 21)}, "attention_mask is"),
        ("gemma3", {"position_ids": None}, "position_ids is an input"),
        ("gemma3", {"position_ids": torch.tensor([[20]])}, "position_ids is"),
        ("llama", {"input_ids": torch.zeros(2, 1, dtype=torch.int64)}, "ids of 2 items"),
        ("llama", {"cache_position": torch.zeros(2, 1, dtype=torch.int32)}, "positions of 2"),
    ],
)
def test_a_decoder_takes_what_it_was_compiled_for(
    family: str, changes: dict[str, Any], match: str
) -> None:
    driven, first = driving.imported(20, family)
    with pytest.raises(RuntimeError, match=match):
        driven.decode(first, 20, **changes)
    assert same(driven, family, 20)


@pytest.mark.parametrize("left_out", ["block_tables", "local_block_tables"])
def test_a_hybrid_takes_both_tables_or_none(left_out: str) -> None:
    driven, first = driving.imported(20, "gemma3")
    with pytest.raises(ValueError, match="both, or neither"):
        driven.decode(first, 20, **{left_out: None})
    tables = driven.tables(prefill=True)
    del tables[left_out]
    with pytest.raises(ValueError, match="both, or neither"):
        driven.prefill([5, 6], 0, **tables)


def test_a_position_outside_of_the_mask_is_refused() -> None:
    driven = driving.load(family="gemma3")
    with pytest.raises(ValueError, match="outside of the attention mask"):
        driven.decode(5, 64, attention_mask=None)


def test_a_prefill_takes_what_it_was_compiled_for() -> None:
    driven = driving.load()
    with pytest.raises(RuntimeError, match="block_tables is"):
        driven.prefill([5, 6], block_tables=torch.arange(8, dtype=I16)[None])
    with pytest.raises(RuntimeError, match="input_ids is"):
        driven.model.prefill_decoder(input_ids=torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="cache_position is"):
        driven.model.prefill_decoder(
            input_ids=torch.tensor([[5]]), cache_position=torch.tensor([[0]])
        )
    with pytest.raises(ValueError, match="65 tokens"):
        driven.prefill([5] * 65)
    with pytest.raises(NotImplementedError, match="prefix"):
        driven.prefill([5, 6], start=CHUNK + 1)
    with pytest.raises(TypeError, match="no_such_input"):
        driven.prefill([5, 6], no_such_input=1)
    assert not driven.fake.card.faults


def test_positions_of_a_prefill_ascend() -> None:
    driven = driving.load()
    with pytest.raises(Exception, match="do not ascend"):
        driven.model.prefill_decoder(
            input_ids=torch.tensor([[5, 6]]),
            cache_position=torch.tensor([[0, 2]], dtype=torch.int32),
            **driven.tables(prefill=True),
        )
    assert len(driven.fake.card.faults) == 1


def test_a_chunk_is_computed_whole() -> None:
    """What a prefill leaves after its last row is no zero, and no step sees it."""
    driven = driving.load()
    driven.clear()
    driven.prefill(families.make_prompt(11))
    block = driven.fetch("past_key_values_0", 1)
    assert block[:, 3:].any()
    assert same(driven, "llama", 11)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prefill_that_attends_both_ways_differs_behind_the_first_layer(family: str) -> None:
    """There keys and values are of the tokens alone; and it must fit into a chunk."""
    kept = []
    for both_ways in (False, True):
        driven = driving.load(FakeRebellions(bidirectional_prefill=both_ways), family)
        driven.clear()
        driven.prefill(families.make_prompt(CHUNK))
        names = [meta.name for meta in driven.config.cache_metas]
        kept.append({name: driven.fetch(name, 0)[:, :CHUNK].clone() for name in names})
    causal, other = kept
    for number, name in enumerate(causal):
        assert torch.allclose(causal[name], other[name], atol=1e-4) is (number < 2)
    with pytest.raises(NotImplementedError, match="beyond one chunk"):
        driven.prefill(families.make_prompt(CHUNK + 1))


def test_blocks_run_out(tmp_path: Path) -> None:
    """A card with fewer blocks than its longest sequence has."""
    compile_fake(
        families.directory_of("llama"),
        tmp_path,
        max_seq_len=64,
        attn_impl="flash_attn",
        partition_len=8,
        num_blocks=3,
    )
    model = FakeRebellions().sdk().load(str(tmp_path), 0)
    model.prefill_decoder(
        input_ids=torch.tensor([families.make_prompt(12)]),
        cache_position=torch.arange(12, dtype=torch.int32)[None],
        batch_idx=0,
    )
    with pytest.raises(RuntimeError, match="no memory blocks"):
        model.prefill_decoder(
            input_ids=torch.tensor([families.make_prompt(24)]),
            cache_position=torch.arange(24, dtype=torch.int32)[None],
            batch_idx=0,
        )


def test_weights_are_read_again_when_they_were_written_again(tmp_path: Path) -> None:
    kind, options = families.FAMILIES["llama"]
    rows = []
    for spread in (0.2, 0.3):
        families.make_model(tmp_path / "model", kind, {**options, "initializer_range": spread})
        compile_fake(tmp_path / "model", tmp_path / "compiled", max_seq_len=64)
        model = FakeRebellions().sdk().load(str(tmp_path / "compiled"), 0)
        rows.append(model.prefill_decoder(input_ids=torch.tensor([[5, 6]]), batch_idx=0).logits)
    assert not torch.equal(*rows)
