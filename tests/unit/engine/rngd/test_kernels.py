"""Which kernels a model asks for, with which sizes, and what it is told where one is not there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headrace.engine.rngd import llama
from headrace.engine.rngd.buckets import Chunk
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.family import FULL, SLIDING, Family
from headrace.engine.rngd.kernels import Kernels
from headrace.errors import BackendUnavailable
from tests.unit.engine.rngd.small_kernels import CONFIG, HYBRID, KINDS, WINDOW, Library

MAX_POSITIONS = 128
FIRST, LATER = Chunk(0, 20, 32, 32), Chunk(32, 60, 32, 64)


def kernels_of(family: Family, library: Library | None = None) -> tuple[Kernels, Library]:
    library = library or Library(family)
    sdk = library.sdk()
    return Kernels(sdk, EmulatedExecutor(sdk), family, CONFIG, MAX_POSITIONS), library


def test_each_kernel_is_made_for_its_bucket_and_all_slots() -> None:
    kernels, library = kernels_of(llama.FAMILY)
    kernels.token_wise(0, FIRST)
    kernels.token_wise(3, LATER)
    kernels.attention(FULL, FIRST)
    kernels.attention(FULL, LATER)
    kernels.last(LATER)
    slots = {"num_kv_cache_blocks": MAX_POSITIONS + 1}
    attention = {"batch_size": 1, "input_ids_size": 32, **slots}
    assert library.made == [
        ("llama3_1_8b_w16a16_first_tokenwise", {"num_tokens": 32, **slots}),
        ("llama3_1_8b_w16a16_mid_tokenwise", {"num_tokens": 32, **slots}),
        ("llama3_1_8b_w16a16_full_attention", {"attention_size": 32, **attention}),
        ("llama3_1_8b_w16a16_full_attention", {"attention_size": 64, **attention}),
        ("llama3_1_8b_w16a16_last_tokenwise_with_lm_head", {"num_tokens": 32}),
    ]


def test_a_kernel_is_loaded_once_and_told_before() -> None:
    kernels, library = kernels_of(llama.FAMILY)
    told: list[str] = []
    kernels.told = told.append
    assert kernels.token_wise(1, FIRST) is kernels.token_wise(2, LATER)
    assert kernels.attention(FULL, FIRST) is not kernels.attention(FULL, LATER)
    assert len(told) == len(library.made) == 3
    sizes = f"num_tokens=32, num_kv_cache_blocks={MAX_POSITIONS + 1}"
    assert told[0] == f"llama3_1_8b_w16a16_mid_tokenwise {sizes}"


def test_a_kernel_between_layers_is_named_by_both_kinds() -> None:
    kernels, library = kernels_of(HYBRID)
    for layer in range(1, len(KINDS)):
        kernels.token_wise(layer, FIRST)
    assert [name for name, _ in library.made] == list(
        dict.fromkeys(f"mid_{a}_{b}" for a, b in pairwise(KINDS))
    )


def test_a_sliding_layer_looks_at_its_window_and_a_full_one_at_all() -> None:
    kernels, _ = kernels_of(HYBRID)
    long = Chunk(96, 112, 16, 128)
    assert kernels.attention_size(FULL, long) == 128
    assert kernels.attention_size(SLIDING, long) == 16 + WINDOW
    assert kernels.attention_size(SLIDING, Chunk(0, 9, 16, 16)) == 16


def test_all_that_a_chunk_needs_is_listed() -> None:
    kernels, library = kernels_of(HYBRID)
    listed = [(layer, program.signature.name) for layer, program in kernels.of_chunk(FIRST)]
    assert listed[0] == (0, HYBRID.first)
    assert listed[-1] == (len(KINDS), HYBRID.last)
    assert len(listed) == 2 * len(KINDS) + 1
    assert {name for _, name in listed} == {name for name, _ in library.made}


def test_further_options_of_an_attention_are_passed_on() -> None:
    family = replace(HYBRID, attention_options={SLIDING: {"window": 16}})
    kernels, library = kernels_of(family)
    kernels.attention(SLIDING, FIRST)
    kernels.attention(FULL, FIRST)
    assert library.made[0][1]["window"] == 16
    assert "window" not in library.made[1][1]


def test_a_pair_of_kinds_without_a_kernel_is_refused() -> None:
    kernels, _ = kernels_of(replace(HYBRID, mid={(SLIDING, SLIDING): "mid_a"}))
    with pytest.raises(BackendUnavailable, match=r"api_missing.*from a sliding.* to a full"):
        kernels.token_wise(2, FIRST)


def test_a_kernel_that_the_library_lacks_is_refused_by_name() -> None:
    library = Library(llama.FAMILY)
    renamed = replace(llama.FAMILY, last="no_such_kernel")
    kernels, _ = kernels_of(renamed, library)
    with pytest.raises(BackendUnavailable, match="api_missing: kernel no_such_kernel"):
        kernels.last(FIRST)


@pytest.mark.parametrize("error", [KeyError("head_dim"), AssertionError(), ValueError("a\nb")])
def test_a_shape_that_the_library_cannot_make_is_refused_with_its_words(error: Exception) -> None:
    def fails(**sizes: Any) -> None:
        raise error

    library = Library(llama.FAMILY)
    sdk = library.sdk()
    module = sdk.kernels("llama")
    module.llama3_1_8b_w16a16_full_attention = fails
    kernels = Kernels(sdk, EmulatedExecutor(sdk), llama.FAMILY, CONFIG, MAX_POSITIONS)
    with pytest.raises(BackendUnavailable, match="attention_size=64") as caught:
        kernels.attention(FULL, LATER)
    assert caught.value.stage == "api_missing"
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
