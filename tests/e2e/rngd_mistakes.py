"""The RNGD engine with one mistake planted, for a bound that must show each of them.

Runs in the vendor's environment, so it imports nothing of pytest or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headrace.backends import rngd
from headrace.engine.rngd import program
from headrace.engine.rngd.family import Rope
from headrace.engine.rngd.rope import table
from headrace.engine.rngd.weights import Weights

Tensors = dict[str, torch.Tensor]


def open(options: Mapping[str, Any]) -> rngd.RngdEngine:
    """As the engine's own factory, with the mistake that `mistake` names."""
    rest = dict(options)
    MISTAKES[rest.pop("mistake")]()
    return rngd.open(rest)


def _change(name: str, changed: Callable[[Tensors], object]) -> None:
    made = getattr(program, name)

    def wrong(*args: Any) -> Tensors:
        tensors: Tensors = made(*args)
        changed(tensors)
        return tensors

    setattr(program, name, wrong)


def _none() -> None:
    pass


def _position() -> None:
    """Each token is one position further than it is."""
    _change("token_inputs", lambda told: told["position_ids"].add_(1))


def _token() -> None:
    """The prompt's second token is its first."""

    def changed(told: Tensors) -> None:
        told["input_ids"][1] = told["input_ids"][0]

    _change("token_inputs", changed)


def _mask() -> None:
    """Each position sees the one after it too."""

    def changed(told: Tensors) -> None:
        mask = told["attention_mask"]
        mask[..., 1:] |= mask[..., :-1].clone()

    _change("attention_inputs", changed)


def _gather() -> None:
    """Attention looks at the slots of other positions."""
    _change("attention_inputs", lambda told: told["kv_gather_index"][0].copy_(
        told["kv_gather_index"][0].roll(1)))  # fmt: skip


def _tables(changed: Callable[[Rope, int], torch.Tensor]) -> None:
    setattr(program, "table", changed)  # noqa: B010  # the loop's own name for it


def _rope() -> None:
    """Rotations by another base."""
    _tables(lambda rope, longest: table(Rope(rope.head_dim, rope.theta * 2, rope.scaling), longest))


def _rope_turned() -> None:
    """Rotations the other way round."""
    _tables(lambda rope, longest: table(rope, longest).transpose(-1, -2).contiguous())


def _tensors(chosen: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    made = Weights.tensor

    def wrong(self: Weights, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        tensor = made(self, name, shape, dtype)
        return changed(tensor) if chosen in name else tensor

    Weights.tensor = wrong  # type: ignore[method-assign]


def _heads() -> None:
    """The heads of one layer's K lie in another order."""
    _tensors("layers.2.self_attn.k_proj", lambda w: w.roll(w.shape[0] // 2, 0).contiguous())


def _halves() -> None:
    """The elements of each head lie in pairs instead of halves, as some checkpoints have them."""
    _tensors("k_proj", lambda w: w.reshape(-1, 2, 32, w.shape[1]).transpose(1, 2).reshape(w.shape))


def _norm() -> None:
    """One layer's norm is not applied."""
    _tensors("layers.1.post_attention_layernorm", torch.ones_like)


MISTAKES: dict[str, Callable[[], None]] = {
    "none": _none,
    "position": _position,
    "token": _token,
    "mask": _mask,
    "gather": _gather,
    "rope": _rope,
    "rope turned": _rope_turned,
    "heads": _heads,
    "halves": _halves,
    "norm": _norm,
}
