"""What each side publishes about itself, and whether two sides fit.

A **manifest** is one side's immutable facts. `agree` compares two of them field by field and
refuses a pairing by the name of the field that differs. Layers are paired by name, never by their
place in a list; a layer's number is its place in the model and is the same on both sides.

The structs here cross the wire at the handshake, so they are msgspec structs and not dataclasses.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from msgspec import Struct

from headrace.errors import Refused

PROTOCOL_VERSION: Final = 3
MAX_LAYERS: Final = 512  # so that a manifest with long names fits into one message
MAX_POSITIONS: Final = 1 << 32
MAX_EXTENT: Final = 1 << 24  # of one dimension of a part, of the vocabulary

ITEMSIZE: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

Layout: TypeAlias = Literal["head_major", "token_major"]
Emission: TypeAlias = Literal["layers", "cache_groups"]
PrefixUse: TypeAlias = Literal["none", "recompute", "own_cache"]


class Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a layer's cache: `heads` x `head_dim` elements of `dtype` per position."""

    name: str
    heads: int
    head_dim: int
    dtype: str

    @property
    def row_nbytes(self) -> int:
        """Bytes of one position."""
        return self.heads * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one position."""
        return self.head_dim * ITEMSIZE[self.dtype]


class Full(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="full"):
    """Attention over all positions: every position is carried."""


class Sliding(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="sliding"):
    """Attention over the last `window` positions.

    `tail` is how many of the last rows matter: in a decoder's manifest the rows that it needs
    (window or window - 1, a fact of its cache), in a source's the rows that it can emit.
    """

    window: int
    tail: int


class Shared(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="shared"):
    """The layer reads the cache of the layer named `owner` and has no cells of its own."""

    owner: str


class Latent(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="latent"):
    """Compressed KV (MLA). Declared so that it can be refused by name."""


class State(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="state"):
    """Recurrent or convolution state without a position axis. Declared so that it can be refused by
    name.
    """


Kind: TypeAlias = Full | Sliding | Shared | Latent | State
UNSUPPORTED_KINDS: Final = (Latent, State)


class Layer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One model layer: `index` is its number in the model, `name` is what it is paired by."""

    index: int
    name: str
    kind: Kind
    parts: tuple[Part, ...]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one position, all parts."""
        return sum(part.row_nbytes for part in self.parts)


class Manifest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The immutable facts of one side, published at the handshake.

    model: fingerprint of the config and of samples of every weight, independent of the dtype they
    are loaded in.
    layouts, emits, digests: what a source can do, or a decoder accepts. A source writes in
    `layouts[0]`; one without `emits` gives whole results only.
    first: whether the source ends with a row of logits or can give a token id only.
    max_positions: the longest prompt, in tokens, that this side can hold.
    prefix: what a source can do for a prompt of which the decoder has the first positions: `none`,
    `recompute` them and emit the others, or go on from its `own_cache` of them where it has one.
    """

    role: Literal["source", "decoder"]
    model: str
    layers: tuple[Layer, ...]
    layouts: tuple[Layout, ...]
    vocab_size: int
    logits_dtype: str
    max_positions: int
    emits: tuple[Emission, ...] = ("layers", "cache_groups")
    first: Literal["logits", "token"] = "logits"
    digests: tuple[str, ...] = ("crc32",)
    byte_order: Literal["little", "big"] = "little"
    protocol: int = PROTOCOL_VERSION
    prefix: PrefixUse = "none"


def agree(source: Manifest, decoder: Manifest) -> Layout:
    """Check that a source can feed a decoder; returns the layout that slots are kept in.

    Raises:
        Refused: a manifest contradicts itself, or a field differs; `field` and the text name it.
    """
    check_manifest(source, "source")
    check_manifest(decoder, "decoder")
    for field in ("protocol", "byte_order"):
        _same(field, getattr(source, field), getattr(decoder, field))
    _same("number of layers", len(source.layers), len(decoder.layers))
    theirs = {layer.name: layer for layer in source.layers}
    for layer in decoder.layers:
        if layer.name not in theirs:
            raise Refused(
                f"the source has no layer named {layer.name!r}", field=f"layers[{layer.name}]"
            )
        _agree_layer(theirs[layer.name], layer)
    for field in ("vocab_size", "logits_dtype", "model"):
        _same(field, getattr(source, field), getattr(decoder, field))
    if source.emits and not set(source.emits) & set(decoder.emits):
        raise Refused(
            f"emits: source {source.emits}, decoder accepts {decoder.emits}", field="emits"
        )
    if source.digests and decoder.digests and not set(source.digests) & set(decoder.digests):
        raise Refused(
            f"digests: source makes {source.digests}, decoder checks {decoder.digests}",
            field="digests",
        )
    if source.layouts[0] not in decoder.layouts:
        raise Refused(
            f"layouts: source writes {source.layouts[0]}, decoder accepts {decoder.layouts}",
            field="layouts",
        )
    return source.layouts[0]


def check_manifest(manifest: Manifest, role: Literal["source", "decoder"]) -> None:
    """Check that a manifest is one of `role` and does not contradict itself.

    Raises:
        Refused: with the field named.
    """
    _check("role", manifest.role == role, f"is {manifest.role!r}, expected {role!r}")
    _check("layouts", bool(manifest.layouts), "is empty")
    _check("layers", 1 <= len(manifest.layers) <= MAX_LAYERS, f"has {len(manifest.layers)} entries")
    _check("vocab_size", 1 <= manifest.vocab_size <= MAX_EXTENT, f"is {manifest.vocab_size}")
    _check("logits_dtype", manifest.logits_dtype in ITEMSIZE, f"is {manifest.logits_dtype!r}")
    _check(
        "max_positions", 1 <= manifest.max_positions < MAX_POSITIONS, f"is {manifest.max_positions}"
    )
    indices = sorted(layer.index for layer in manifest.layers)
    _check("layers", indices == list(range(len(indices))), f"has the numbers {indices}")
    by_name = {layer.name: layer for layer in manifest.layers}
    _check("layers", len(by_name) == len(indices), "names a layer twice")
    for layer in manifest.layers:
        _check_layer(layer, by_name)


def kind_name(kind: Kind) -> str:
    """The word for a layer kind, as in messages and tables."""
    return type(kind).__name__.lower()


def _same(field: str, source: object, decoder: object) -> None:
    if source != decoder:
        raise Refused(f"{field}: source has {source}, decoder has {decoder}", field=field)


def _check(field: str, holds: bool, text: str) -> None:
    if not holds:
        raise Refused(f"manifest field {field} {text}", field=field)


def _check_layer(layer: Layer, by_name: dict[str, Layer]) -> None:
    where = f"layers[{layer.name}]"
    _check(f"{where}.kind", not isinstance(layer.kind, UNSUPPORTED_KINDS), _unsupported(layer.kind))
    if isinstance(layer.kind, Shared):
        owner = by_name.get(layer.kind.owner)
        _check(f"{where}.kind", owner is not None, f"shares the unknown layer {layer.kind.owner!r}")
        _check(
            f"{where}.kind",
            not isinstance(owner and owner.kind, Shared),
            "shares a layer that itself shares",
        )
        _check(f"{where}.parts", not layer.parts, "must be empty: a shared layer owns no cells")
        return
    if isinstance(layer.kind, Sliding):
        _check(f"{where}.window", layer.kind.window >= 1, f"is {layer.kind.window}")
        _check(f"{where}.tail", layer.kind.tail >= 0, f"is {layer.kind.tail}")
    _check(f"{where}.parts", bool(layer.parts), "is empty")
    names = [part.name for part in layer.parts]
    _check(f"{where}.parts", len(set(names)) == len(names), f"names a part twice: {names}")
    for part in layer.parts:
        extents = (part.heads, part.head_dim)
        _check(
            f"{where}.{part.name}",
            all(1 <= e <= MAX_EXTENT for e in extents),
            f"has the shape {extents}",
        )
        _check(f"{where}.{part.name}.dtype", part.dtype in ITEMSIZE, f"is {part.dtype!r}")


def _unsupported(kind: Kind) -> str:
    return f"is {kind_name(kind)}, which is not supported yet"


def _agree_layer(source: Layer, decoder: Layer) -> None:
    where = f"layers[{decoder.name}]"
    _same(f"{where}.index", source.index, decoder.index)
    _same(f"{where}.kind", kind_name(source.kind), kind_name(decoder.kind))
    if isinstance(source.kind, Sliding) and isinstance(decoder.kind, Sliding):
        _same(f"{where}.window", source.kind.window, decoder.kind.window)
        if source.kind.tail < decoder.kind.tail:
            raise Refused(
                f"{where}.tail: source emits {source.kind.tail} rows, "
                f"decoder needs {decoder.kind.tail}",
                field=f"{where}.tail",
            )
    if isinstance(source.kind, Shared):
        _same(f"{where}.owner", source.kind, decoder.kind)
    _same(f"{where}.parts", [p.name for p in source.parts], [p.name for p in decoder.parts])
    for theirs, ours in zip(source.parts, decoder.parts, strict=True):
        for field in ("heads", "head_dim", "dtype"):
            _same(f"{where}.{ours.name}.{field}", getattr(theirs, field), getattr(ours, field))
