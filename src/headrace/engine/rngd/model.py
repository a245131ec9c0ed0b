"""A checkpoint as kernels are made for it: its family, and the shapes that it is computed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.engine.rngd import geometry
from headrace.engine.rngd.buckets import TOKEN_BUCKETS, Buckets, choose
from headrace.engine.rngd.family import Family
from headrace.engine.rngd.sdk import SDK_VERSION, VENDOR
from headrace.errors import BackendUnavailable, Refused

MAX_POSITIONS: Final = 8192
"""The longest prompt by default: caches of all layers are made for it at the start."""


class Model(NamedTuple):
    """config: the checkpoint's. max_positions: the longest prompt, in tokens."""

    directory: Path
    config: dict[str, Any]
    family: Family
    buckets: Buckets

    @property
    def max_positions(self) -> int:
        return self.buckets.max_positions

    @property
    def stand_ins(self) -> Mapping[str, str]:
        """By the name of a tensor that the checkpoint may lack, the one that is used for it."""
        said = self.config.get("tie_word_embeddings")
        told = self.family.text(self.config).get("tie_word_embeddings", said)
        return self.family.tied if (self.family.ties if told is None else told) else {}

    def check_for_card(self) -> None:
        """Refuse a model whose kernels were never seen to compile for a card.

        Raises:
            BackendUnavailable: api_missing.
        """
        if self.family.only_emulated:
            raise BackendUnavailable(
                VENDOR,
                "api_missing",
                f"kernels for {self.family.model_type}",
                f"the vendor's compiler {SDK_VERSION} refuses those that write a cache",
                "They run with --emulate; --source-options '{\"unverified\": true}' tries a card",
            )


def read_model(
    directory: Path,
    *,
    max_positions: int | None = None,
    token_buckets: Sequence[int] = TOKEN_BUCKETS,
) -> Model:
    """The model in `directory`; no weights are read.

    max_positions: by default the model's longest prompt, or MAX_POSITIONS if that is less.

    Raises:
        Refused: no kernels compute this model, it was made for fewer positions, or no bucket fits.
    """
    config = geometry.read_config(directory)
    family = geometry.family_of(config)
    longest = geometry.longest(family, config)
    positions = min(longest, MAX_POSITIONS) if max_positions is None else max_positions
    if not 1 <= positions <= longest:
        raise Refused(
            f"max_positions is {positions}, the model was made for {longest}",
            field="max_positions",
        )
    shapes = family.geometry(family.text(config)).values()
    windows = [shape.window for shape in shapes if shape.window is not None]
    window = min(windows, default=None)
    buckets = choose(token_buckets, positions, window, family.min_tokens, family.token_unit)
    return Model(directory, config, family, buckets)
