"""Wrong cards, and wrong compiled models: none of them is found to be usable."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.atom import probe_bench, probe_computes, prompts
from headrace.engine.atom.probe_computes import LOGITS_NEAR
from headrace.engine.atom.reference import compute
from headrace.testing.atom_records import reference_of
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake, graph
from headrace.testing.fake_rebellions.memory import Memory
from headrace.testing.fake_rebellions.model import Decoder
from tests.e2e.families import directory_of
from tests.unit.engine.atom.wrong_cards import (
    CONTEXT,
    PARTITION,
    Backwards,
    BlocksExchanged,
    BlocksExchangedInALayer,
    Compile,
    Exchanged,
    ExchangedInALayer,
    LateRing,
    LayersExchanged,
    NotMoved,
    OneForAll,
    PartsInTheFirstBlock,
    Phased,
    Placed,
    RowsTurned,
    SpillingFetch,
    SpillingUpdate,
    Tiled,
    TwoRowsExchanged,
    Wrong,
    compiling,
    found,
    probe,
    refusal,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    return compiling(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (SpillingUpdate, "step round_trip: "),
        (SpillingFetch, "step round_trip: a transfer changed more than its block"),
        (OneForAll, "step number_format: "),
        (Exchanged, "step number_format: "),
        (Backwards, "step number_format: "),
    ],
)
def test_a_card_that_keeps_a_cache_elsewhere_is_refused(
    compiled: Compile, memory: type[Memory], said: str
) -> None:
    assert refusal(probe(compiled(), Wrong(memory=memory))).startswith(said)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two blocks of 128."""
    directory = tmp_path_factory.mktemp("compiled") / "long"
    compile_fake(
        directory_of("llama"), directory, max_seq_len=256, attn_impl="flash_attn", partition_len=128
    )
    return directory


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (Placed, ""),
        (ExchangedInALayer, "step number_format: "),
        (LayersExchanged, "step number_format: "),
        (BlocksExchanged, "step decode_places: .* of block 3 of past_key_values_0"),
        (BlocksExchangedInALayer, "step decode_places: .* of block 3 of past_key_values_3"),
    ],
)
def test_what_is_wrong_in_one_cache_or_in_later_blocks_is_found(
    compiled: Compile, memory: type[Memory], said: str
) -> None:
    made = probe(compiled(), Wrong(memory=memory))
    if said:
        assert re.match(said, refusal(made))
    else:
        assert found(made)
    counted = made.findings["number_format"].facts["caches"]
    assert counted == len(made.compiled["caches"][0]["names"]) == 8


@pytest.mark.parametrize("memory", [Placed, RowsTurned, TwoRowsExchanged, Tiled])
@pytest.mark.parametrize("places", [True, False])
def test_rows_of_a_block_in_another_order_are_found(
    long: Path, memory: type[Memory], places: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the steps that are decoded in a block, and without them by the checkpoint."""
    if not places:
        monkeypatch.setattr(prompts, "decoded", lambda caches, positions: (0,))
        if memory is TwoRowsExchanged:  # as in a block of thousands, the mean tells nothing
            monkeypatch.setattr(probe_computes, "NEAR", 0.3)
    made = probe(long, Wrong(memory=memory))
    if memory is Placed:
        assert found(made)
    elif places and memory is not TwoRowsExchanged:
        assert refusal(made).startswith("step decode_places: ")
    else:
        assert refusal(made).startswith("step row_order: ")
        assert made.fact("row_order", "131 tokens, full") == "unknown"
        assert made.fact("row_order", "24 tokens, full") == "by_position"


@pytest.mark.parametrize("memory", [Placed, BlocksExchangedInALayer, BlocksExchanged])
def test_blocks_that_no_checkpoint_is_computed_for_are_tried(
    compiled: Compile, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "LONGEST_BLOCK", 8)
    directory = compiled()
    reference = compute(directory_of("llama"), directory)
    assert len(reference.tokens) == 24 > PARTITION  # and in blocks of 24 nothing is beyond
    made = probe(directory, Wrong(memory=memory), reference=reference)
    lengths = [name for name in made.findings["import_decodes"].facts if name.endswith("tokens")]
    assert {"19 tokens", "51 tokens"} <= set(lengths)
    if memory is Placed:
        assert found(made)
    else:
        assert refusal(made).startswith("step decode_places: ")


def test_a_part_of_a_block_is_tried_in_the_last_one_too(compiled: Compile) -> None:
    made = probe(compiled(), Wrong(memory=PartsInTheFirstBlock, sub_blocks=True))
    assert made.fact("sub_blocks", "works") is False
    assert found(made).sub_blocks is False


def test_a_full_window_that_a_step_does_not_move_is_found(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "SlidingRows", NotMoved)
    assert refusal(probe(compiled("mistral"))).startswith("step decode_places: ")


@pytest.mark.parametrize(("family", "places"), [("mistral", True), ("gemma3", False)])
def test_a_window_that_is_right_until_it_was_filled_twice_is_found(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch, family: str, places: bool
) -> None:
    monkeypatch.setattr(graph, "SlidingRows", LateRing)
    if not places:
        monkeypatch.setattr(prompts, "decoded", lambda caches, positions: (0,))
    made = probe(compiled(family))
    assert refusal(made).startswith("step decode_places: " if places else "step row_order: ")
    assert made.fact("row_order", "24 tokens, window 16") == "by_position"
    assert made.fact("row_order", "40 tokens, window 16") == "turned by 8 of 16 rows"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lm_head.weight", lambda weight: weight.flip(0)),
        ("model.norm.weight", lambda weight: weight.flip(0) * 3),
        ("model.layers.3.mlp.down_proj.weight", lambda weight: weight * -3),
    ],
)
def test_a_model_that_was_compiled_from_another_checkpoint_is_found(
    compiled: Compile, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Whose keys and values are the same in all layers."""
    other, directory = tmp_path / "other", tmp_path / "compiled"
    shutil.copytree(directory_of("llama"), other)
    weights = load_file(other / "model.safetensors")
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    compile_fake(
        other, directory, max_seq_len=CONTEXT, attn_impl="flash_attn", partition_len=PARTITION
    )
    made = probe(directory, reference=reference_of(compiled()))
    assert made.fact("number_format", "found") == "declared"
    assert made.fact("row_order", "order") == "by_position"
    assert refusal(made).startswith("step logits: the card computes other logits than the")
    assert found(probe(directory)).checkpoint != made.checkpoint


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_sixteen_bits_are_well_within_what_is_near(compiled: Compile, family: str) -> None:
    made = probe(compiled(family, "bfloat16"))
    worst = max(made.fact("number_format", "distance")["declared"], 1e-9)
    assert 1e-3 < worst < 0.05
    rows = [each for name, each in made.findings["logits"].facts.items() if "tokens" in name]
    assert len(rows) >= 3
    assert all(0 < each["distance"] < LOGITS_NEAR / 2 and each["argmax_agrees"] for each in rows)


def test_a_reference_without_logits_tells_no_checkpoint(compiled: Compile) -> None:
    made = probe(compiled(), reference=replace(reference_of(compiled()), logits={}))
    assert refusal(made).startswith("step logits: it was not found whether")
    few = {count: row[:-1] for count, row in reference_of(compiled()).logits.items()}
    made = probe(compiled(), reference=replace(reference_of(compiled()), logits=few))
    assert "logits, the checkpoint " in refusal(made)


def test_another_token_on_top_is_another_checkpoint(compiled: Compile) -> None:
    """Also where all others are as they should be."""
    changed = dict(reference_of(compiled()).logits)
    for count, row in changed.items():
        second = int(row.argsort()[-2])
        changed[count] = row.copy()
        changed[count][second] = row.max() + row.std()
    made = probe(compiled(), reference=replace(reference_of(compiled()), logits=changed))
    rows = [each for name, each in made.findings["logits"].facts.items() if "tokens" in name]
    assert all(each["distance"] < LOGITS_NEAR and not each["argmax_agrees"] for each in rows)
    assert refusal(made).startswith("step logits: ")


@pytest.mark.parametrize(
    ("family", "phases", "both_ways", "way", "usable"),
    [
        ("llama", ("prefill", "decode"), False, "causal", True),
        ("gemma3", ("prefill", "decode"), False, "by decode steps", True),
        ("gemma3", ("prefill", "decode"), True, "by decode steps", True),
        ("gemma3", ("prefill", "image_prefill", "decode"), False, "causal", True),
        ("gemma3", ("prefill", "image_prefill", "decode"), True, "causal", False),
    ],
)
def test_a_prefill_that_attends_both_ways_is_no_witness(
    compiled: Compile,
    family: str,
    phases: tuple[str, ...],
    both_ways: bool,
    way: str,
    usable: bool,
) -> None:
    """Where the model is compiled so, the card computes its prompts by decode steps."""
    fake = Phased(phases=phases, bidirectional_prefill=both_ways)
    made = probe(compiled(family), fake)
    assert made.fact("number_format", "own_prefill") == way
    if usable:
        assert found(made).number_format == "declared"
        longest = max(call.size for call in fake.card.log if call.call == "prefill")
        assert longest == (15 if way == "by decode steps" else 51)  # costs need a short one
    else:
        assert refusal(made).startswith("step number_format: ")
    assert fake.card.faults == []


def test_what_takes_too_many_steps_is_told(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_bench, "MOST_STEPS", 20)
    made = probe(compiled("gemma3"))
    assert found(made)
    assert made.fact("row_order", "not_reached") == [24, 40]
    assert made.fact("import_decodes", "not_reached") == [24, 40, 51]
    made = probe(compiled())
    assert made.fact("row_order", "not_reached") == []


@pytest.mark.parametrize(
    ("name", "by", "agrees"),
    [
        ("past_key_values_0", 2 << 20, True),
        ("past_key_values_0", (2 << 20) + 1, False),
        ("past_key_values_7", -1, False),
    ],
)
def test_a_cache_of_other_bytes_than_its_mirror_is_refused(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch, name: str, by: int, agrees: bool
) -> None:
    fake = FakeRebellions()
    size = fake.card.size
    monkeypatch.setattr(
        fake.card, "size", lambda asked=None: size(asked) + (by if asked == name else 0)
    )
    made = probe(compiled(dtype="bfloat16"), fake)
    assert made.fact("sizes", "agrees") is agrees
    if agrees:
        assert found(made)
    else:
        assert re.match(f"step sizes: .* bytes of {name}, full", refusal(made))


def test_a_decode_that_is_not_the_same_twice_is_refused(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, decode = list[int](), Decoder.__call__

    def drifting(self: Decoder, *given: Any, **named: Any) -> Any:
        output = decode(self, *given, **named)
        calls.append(0)
        output.logits.add_(len(calls) * 1e-3)
        return output

    monkeypatch.setattr(Decoder, "__call__", drifting)
    assert "own decode is not the same twice" in refusal(probe(compiled()))


def test_imports_that_a_decode_does_not_see_are_not_taken_for_exact(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was imported comes back, and decode goes on from the card's own prefill as ever."""
    shadow: dict[tuple[str, int], torch.Tensor] = {}

    class Shadowed(Memory):
        def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
            shadow[name, block] = mirror[block].clone()
            return 0

        def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
            if (name, block) in shadow:
                mirror[block] = shadow[name, block]
                return 0
            return super().fetch(name, mirror, block, rows)

        def scatter(self, *given: Any) -> None:
            shadow.clear()
            super().scatter(*given)

    made = probe(compiled(), Wrong(memory=Shadowed))
    assert made.fact("import_decodes", "identical") is True
    assert made.fact("import_decodes", "clearing_seen") is False
    assert refusal(made).startswith("step decode_places: ")  # which sees it earlier
