"""Manifests: what contradicts itself or its pair is refused, and the field is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import Refused
from headrace.geometry import (
    ITEMSIZE,
    MAX_EXTENT,
    MAX_LAYERS,
    MAX_POSITIONS,
    PROTOCOL_VERSION,
    Full,
    Kind,
    Latent,
    Layer,
    Manifest,
    Part,
    Shared,
    Sliding,
    State,
    agree,
    check_manifest,
    kind_name,
)
from tests.unit.protocol.builders import HYBRID, PARTS, decoder_manifest, layers, source_manifest

K, V = PARTS


def with_layer(manifest: Manifest, at: int, **changes: Any) -> Manifest:
    changed = list(manifest.layers)
    changed[at] = msgspec.structs.replace(changed[at], **changes)
    return msgspec.structs.replace(manifest, layers=tuple(changed))


def with_part(manifest: Manifest, **changes: Any) -> Manifest:
    return with_layer(manifest, 1, parts=(msgspec.structs.replace(K, **changes), V))


def test_a_row_is_heads_times_head_dim_times_itemsize() -> None:
    assert (K.row_nbytes, K.head_nbytes, V.row_nbytes) == (16, 8, 32)
    assert Layer(0, "a", Full(), PARTS).row_nbytes == 48
    assert {Part("k", 1, 1, dtype).row_nbytes for dtype in ITEMSIZE} == {1, 2, 4, 8}


def test_two_sides_that_fit_agree_on_the_layout_that_the_source_writes() -> None:
    assert agree(source_manifest(), decoder_manifest()) == "head_major"
    both = source_manifest(layouts=("token_major", "head_major"))
    assert agree(both, decoder_manifest()) == "token_major"


def test_layers_are_paired_by_name_in_whatever_order_they_are_listed() -> None:
    decoder = decoder_manifest()
    listed = msgspec.structs.replace(decoder, layers=decoder.layers[::-1])
    assert agree(source_manifest(), listed) == "head_major"


def test_same_place_but_another_name_is_no_pair() -> None:
    decoder = decoder_manifest()
    swapped = [
        msgspec.structs.replace(layer, name=other.name)
        for layer, other in zip(decoder.layers[:2], decoder.layers[1::-1], strict=True)
    ]
    changed = msgspec.structs.replace(decoder, layers=(*swapped, *decoder.layers[2:]))
    with pytest.raises(Refused) as refusal:
        agree(source_manifest(), changed)
    assert refusal.value.field == "layers[layers.1].index"


def test_a_source_may_emit_more_tail_rows_than_are_needed_but_not_fewer() -> None:
    needs = decoder_manifest(Full(), Sliding(4, 4))
    for tail in (4, 5, 4096):
        agree(source_manifest(Full(), Sliding(4, tail)), needs)
    with pytest.raises(Refused, match="source emits 3 rows, decoder needs 4") as refusal:
        agree(source_manifest(Full(), Sliding(4, 3)), needs)
    assert refusal.value.field == "layers[layers.1].tail"


D = decoder_manifest()
MISMATCHES: list[tuple[str, Manifest]] = [
    ("protocol", msgspec.structs.replace(D, protocol=PROTOCOL_VERSION + 1)),
    ("byte_order", msgspec.structs.replace(D, byte_order="big")),
    ("number of layers", decoder_manifest(*HYBRID, Full())),
    ("number of layers", decoder_manifest(*HYBRID[:-1])),
    ("vocab_size", msgspec.structs.replace(D, vocab_size=12)),
    ("logits_dtype", msgspec.structs.replace(D, logits_dtype="bfloat16")),
    ("model", msgspec.structs.replace(D, model="another")),
    ("layouts", msgspec.structs.replace(D, layouts=("token_major",))),
    ("layers[another]", with_layer(D, 1, name="another", kind=Full(), index=1)),
    ("layers[layers.1].kind", with_layer(D, 1, kind=Sliding(4, 4))),
    ("layers[layers.0].kind", with_layer(D, 0, kind=Full())),
    ("layers[layers.3].kind", with_layer(D, 3, kind=Full(), parts=PARTS)),
    ("layers[layers.3].owner", with_layer(D, 3, kind=Shared("layers.4"))),
    ("layers[layers.0].window", with_layer(D, 0, kind=Sliding(5, 4))),
    ("layers[layers.0].tail", with_layer(D, 0, kind=Sliding(4, 5))),
    ("layers[layers.1].parts", with_layer(D, 1, parts=(V, K))),  # K and V in the other order
    ("layers[layers.1].parts", with_layer(D, 1, parts=(K,))),
    ("layers[layers.1].parts", with_part(D, name="key")),
    ("layers[layers.1].k.heads", with_part(D, heads=4)),
    ("layers[layers.1].k.head_dim", with_part(D, head_dim=8)),
    ("layers[layers.1].k.dtype", with_part(D, dtype="float8_e4m3fn")),
]


@pytest.mark.parametrize(("field", "decoder"), MISMATCHES)
def test_every_single_mismatch_is_refused_and_its_field_named(
    field: str, decoder: Manifest
) -> None:
    if field == "layers[another]":  # keep the shared layer's owner known
        decoder = with_layer(decoder, 3, kind=Shared("another"))
    with pytest.raises(Refused) as refusal:
        agree(source_manifest(), decoder)
    assert refusal.value.field == field
    assert field.split(".")[-1] in str(refusal.value) or "another" in str(refusal.value)


def test_emissions_without_a_common_one_are_refused() -> None:
    with pytest.raises(Refused) as refusal:
        agree(source_manifest(emits=("layers",)), decoder_manifest(emits=("cache_groups",)))
    assert refusal.value.field == "emits"


def test_digests_without_a_common_one_are_refused() -> None:
    with pytest.raises(Refused, match=r"makes \('xxh3',\), decoder checks") as refusal:
        agree(source_manifest(digests=("xxh3",)), decoder_manifest())
    assert refusal.value.field == "digests"
    for makes, checks in [(("xxh3", "crc32"), ("crc32",)), ((), ("crc32",)), (("xxh3",), ())]:
        agree(source_manifest(digests=makes), decoder_manifest(digests=checks))


CONTRADICTIONS: list[tuple[str, Manifest]] = [
    ("role", source_manifest()),
    ("layouts", msgspec.structs.replace(D, layouts=())),
    ("layers", msgspec.structs.replace(D, layers=())),
    ("layers", msgspec.structs.replace(D, layers=D.layers[:1] * (MAX_LAYERS + 1))),
    ("layers", with_layer(D, 1, index=0)),
    ("layers", with_layer(D, 4, index=5)),
    ("layers", with_layer(D, 4, name="layers.0")),
    ("vocab_size", msgspec.structs.replace(D, vocab_size=0)),
    ("vocab_size", msgspec.structs.replace(D, vocab_size=MAX_EXTENT + 1)),
    ("logits_dtype", msgspec.structs.replace(D, logits_dtype="int4")),
    ("max_positions", msgspec.structs.replace(D, max_positions=0)),
    ("max_positions", msgspec.structs.replace(D, max_positions=MAX_POSITIONS)),
    ("layers[layers.0].window", with_layer(D, 0, kind=Sliding(0, 0))),
    ("layers[layers.0].tail", with_layer(D, 0, kind=Sliding(4, -1))),
    ("layers[layers.1].parts", with_layer(D, 1, parts=())),
    ("layers[layers.1].parts", with_layer(D, 1, parts=(K, K))),
    ("layers[layers.1].parts", with_part(D, name="v")),
    ("layers[layers.1].k", with_part(D, heads=0)),
    ("layers[layers.1].k", with_part(D, head_dim=-1)),
    ("layers[layers.1].k", with_part(D, head_dim=MAX_EXTENT + 1)),
    ("layers[layers.1].k.dtype", with_part(D, dtype="int4")),
    ("layers[layers.3].kind", with_layer(D, 3, kind=Shared("none"))),
    ("layers[layers.3].kind", with_layer(D, 3, kind=Shared("layers.3"))),
    ("layers[layers.3].parts", with_layer(D, 3, parts=PARTS)),
]


@pytest.mark.parametrize(("field", "manifest"), CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(field: str, manifest: Manifest) -> None:
    with pytest.raises(Refused) as refusal:
        check_manifest(manifest, "decoder")
    assert refusal.value.field == field
    assert field in str(refusal.value)


def test_a_layer_cannot_share_one_that_shares() -> None:
    chain = decoder_manifest(Full(), Shared("layers.0"), Shared("layers.1"))
    with pytest.raises(Refused, match="itself shares") as refusal:
        check_manifest(chain, "decoder")
    assert refusal.value.field == "layers[layers.2].kind"


@pytest.mark.parametrize(("kind", "word"), [(Latent(), "latent"), (State(), "state")])
@pytest.mark.parametrize("role", ["source", "decoder"])
def test_a_kind_that_is_not_built_is_refused_by_its_name(kind: Kind, word: str, role: str) -> None:
    unbuilt = (Full(), kind)
    source = source_manifest(*(unbuilt if role == "source" else (Full(), Full())))
    decoder = decoder_manifest(*(unbuilt if role == "decoder" else (Full(), Full())))
    with pytest.raises(Refused, match=f"is {word}, which is not supported") as refusal:
        agree(source, decoder)
    assert refusal.value.field == "layers[layers.1].kind"


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Full(), "full"),
        (Sliding(1, 1), "sliding"),
        (Shared("a"), "shared"),
        (Latent(), "latent"),
        (State(), "state"),
    ],
)
def test_the_words_for_kinds(kind: Kind, word: str) -> None:
    assert kind_name(kind) == word


def test_the_largest_manifest_is_legal() -> None:
    check_manifest(decoder_manifest(*[Full()] * MAX_LAYERS), "decoder")
    assert len(layers(*[Full()] * 3)) == 3
