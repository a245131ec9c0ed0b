"""What a compiled model's metadata says of its caches, and what of it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace.engine.atom.caches import layers_of, read_caches
from headrace.errors import BackendUnavailable, Refused
from headrace.geometry import Full, Layer, Part, Sliding


@dataclass
class Meta:
    name: str
    layer_index: int
    shape: list[int]
    dtype: str
    layer_type: str


def metas(*layers: tuple[str, list[int]]) -> list[Any]:
    return [
        Meta(f"past_key_values_{2 * at + part}", at, shape, "float32", layer_type)
        for at, (layer_type, shape) in enumerate(layers)
        for part in (0, 1)
    ]


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4 = metas((SLIDING, [1, 16, 512, 256]), (FULL, [4, 4, 1024, 512]))


def test_each_layer_has_its_own_heads_and_width() -> None:
    """Gemma 4: 16 x 256 where the window slides, 4 x 512 where attention is full."""
    caches = read_caches(GEMMA4)
    assert [(each.name, each.layer, each.part) for each in caches] == [
        (f"past_key_values_{at}", at // 2, at % 2) for at in range(4)
    ]
    assert caches[0].shape == (1, 16, 512, 256)
    assert (caches[2].shape, caches[2].elements) == ((4, 4, 1024, 512), 4 * 4 * 1024 * 512)
    assert layers_of(caches, "bfloat16") == (
        Layer(
            *(0, "layers.0", Sliding(512, 512)),
            (Part("k", 16, 256, "bfloat16"), Part("v", 16, 256, "bfloat16")),
        ),
        Layer(
            *(1, "layers.1", Full()),
            (Part("k", 4, 512, "bfloat16"), Part("v", 4, 512, "bfloat16")),
        ),
    )


def test_they_are_told_apart_by_name_whatever_their_order() -> None:
    assert read_caches(GEMMA4[::-1]) == read_caches(GEMMA4)


def test_keys_and_values_may_differ_in_size() -> None:
    given = metas((FULL, [2, 4, 16, 192]))
    given[1] = replace(given[1], shape=[2, 4, 16, 128], dtype="float16")
    keys, values = read_caches(given)
    assert (keys.head_dim, values.head_dim, values.dtype) == (192, 128, "float16")


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", ""])
def test_an_unknown_kind_is_refused_by_name(kind: str) -> None:
    with pytest.raises(Refused, match=rf"layers\.1 is {kind}") as raised:
        read_caches(metas((FULL, [1, 2, 16, 8]), (kind, [1, 2, 16, 8])))
    assert raised.value.field == "layers[layers.1].kind"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "not two for each layer"),
        (GEMMA4[:3], "not two for each layer"),
        (GEMMA4[2:], "not two for each layer"),
        ([*GEMMA4, GEMMA4[0]], "not two for each layer"),
        ([replace(each, layer_index=each.layer_index + 1) for each in GEMMA4], "is named"),
        ([replace(each, name=f"kv.{at}") for at, each in enumerate(GEMMA4)], "is named"),
        ([replace(GEMMA4[0], shape=[1, 16, 512]), *GEMMA4[1:]], "has the shape"),
        ([replace(GEMMA4[0], shape=[0, 16, 512, 256]), *GEMMA4[1:]], "has the shape"),
        ([replace(GEMMA4[0], shape=[1, 16, 256, 256]), *GEMMA4[1:]], "cut otherwise"),
        ([replace(GEMMA4[0], layer_type=FULL), *GEMMA4[1:]], "cut otherwise"),
        (metas((FULL, [1, 2, 16, 8]), (FULL, [1, 2, 32, 8])), r"have \[16, 32\] positions"),
        ([object()], "no metadata of a cache"),
        ([replace(GEMMA4[0], shape=["x"])], "no metadata of a cache"),
    ],
)
def test_metadata_of_another_form_is_told(given: list[Any], text: str) -> None:
    with pytest.raises(BackendUnavailable, match=text) as raised:
        read_caches(given)
    assert raised.value.stage == "api_missing"
