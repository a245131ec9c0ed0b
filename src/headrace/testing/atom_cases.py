"""What the scenes on a fake ATOM card are played with: models and cards of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from headrace.testing.fake_rebellions import FakeRebellions
from headrace.testing.fake_rebellions.compiled import CacheMeta
from headrace.testing.fake_rebellions.memory import NumberFormat
from headrace.testing.fake_rebellions.model import FakeModel, Output

CONTEXT: Final = 64
BLOCK: Final = 8
ODD: Final = (3e-13, 1 + 2**-10, 1 + 3 * 2**-10, -1 - 2**-10)
"""Values that are too small for the private format, or in the middle of two of its own."""
FED: Final = (1, 2, 0, 5, 3, 1)
Family: TypeAlias = Literal["llama", "hybrid"]
Cut: TypeAlias = Literal["whole", "layers", "backwards", "positions", "late_first"]
Cells: TypeAlias = dict[tuple[int, int], torch.Tensor]
"""By layer and part, [heads, positions, head_dim]; of a window only what it holds."""


@dataclass(frozen=True)
class Case:
    """How a model is compiled, what is sent, and how a card keeps it. blocks: fewer than all."""

    family: Family = "llama"
    attention: Literal["flash_attn", "eager"] = "flash_attn"
    sent: str = "float32"
    declared: str = "float32"
    number_format: NumberFormat = "declared"
    blocks: int | None = None
    batch: int = 1


LLAMA: Final = Case()
HYBRID: Final = Case("hybrid")
EXACT: Final = (Case(sent="bfloat16"), Case(sent="float16"))
LOSSY: Final = (
    Case("hybrid", number_format="custom_float16"),
    Case(sent="bfloat16", number_format="custom_float16"),
    Case(number_format="converted"),
    Case(declared="bfloat16"),
    Case(declared="bfloat16", number_format="custom_float16"),
    Case(sent="float16", declared="float16", number_format="custom_float16"),
)
"""What is sent, declared and kept, where not all is float32."""


@dataclass(kw_only=True)
class Reusing(FakeRebellions):
    """A fake whose decoder hands out the same memory for each step's logits.

    stale_after: updates that work until all that follow change nothing. zeroed: the
    card's memory is full of zeros at first.
    """

    stale_after: int | None = None
    zeroed: bool = False

    def load(self, directory: str, device: int) -> FakeModel:
        model = super().load(directory, device)
        if self.stale_after is not None:
            self.card.go_stale(self.stale_after)
        for name in self.card.memory.names if self.zeroed else ():
            blocks, heads, rows, head_dim = self.card.memory.meta(name).shape
            states = torch.zeros(heads, blocks * rows, head_dim)
            at = [divmod(row, rows) for row in range(blocks * rows)]
            self.card.memory.scatter(name, [b for b, _ in at], [r for _, r in at], states)
        model.decoders[1] = _OneOutput(model.decoders[1])  # type: ignore[assignment]
        return model


class _OneOutput:
    """A decoder with one place for its logits."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._made: Output | None = None

    def __call__(self, **given: Any) -> Output:
        output: Output = self._decoder(**given)
        if self._made is None:
            self._made = output
        self._made.logits.copy_(output.logits)
        return self._made


def step(model: FakeModel, token: int, position: int) -> torch.Tensor:
    """One token by the fake's own decoder, whose blocks are 0, 1, 2, ..."""
    config, given = model.rbln_config, {}
    if config.use_global_attention:
        last = config.kvcache_num_blocks - 1
        table = [[min(at, last) for at in range(config.max_blocks)]]
        given["block_tables"] = torch.tensor(table, dtype=torch.int16)
    if config.use_local_attention:
        given["local_block_tables"] = torch.zeros(1, 1, dtype=torch.int16)
    at = torch.tensor([[position]], dtype=torch.int32)
    if config.use_position_ids:
        seen = torch.arange(config.max_seq_len)[None] <= position
        given |= {"attention_mask": seen.to(config.dtype), "position_ids": at}
    made = model.decoders[1](input_ids=torch.tensor([[token]]), cache_position=at, **given)
    return made.logits[0, 0].to(torch.float32)


def part_of(meta: CacheMeta) -> int:
    """0 for keys, 1 for values."""
    return int(meta.name.rpartition("_")[2]) % 2


def held_of(meta: CacheMeta, num_tokens: int) -> int:
    """How many positions of a prompt a cache holds."""
    return num_tokens if meta.layer_type == "full_attention" else min(num_tokens, meta.shape[2])
