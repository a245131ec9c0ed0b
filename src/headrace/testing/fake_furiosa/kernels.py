"""Kernels of a fake library: plain torch arithmetic under the names and signatures that are used.

A kernel's text is its signature in the vendor's grammar and nothing else; the texts here were
written for the fake. What a kernel computes follows from its name and from the shapes of what it is
given, so that one that was compiled, written to disk and read again is the same kernel. Padding is
scattered to slot 0 as any row is. Results are rounded to bf16 where a kernel's result is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.nn.functional import silu

from headrace.engine.rngd.labels import PLACED
from headrace.engine.rngd.signature import read_signature

VOCAB_STEP: Final = 1024
"""The vocabulary is padded to a multiple of it."""

_EPS: Final = 1e-05
_BF16: Final = torch.bfloat16

_TOKEN_WISE: Final = """\
    attn_q_proj_weight: [Dq, D]/bf16,
    attn_k_proj_weight: [Dkv, D]/bf16,
    attn_v_proj_weight: [Dkv, D]/bf16,
    rope_table: [Re, Dhr, Two, Two]/bf16,
    position_ids: [T]/i32,
    kv_scatter_index: [One, T]/i32,
    k_cache: [Nb, One, Hkv, Dh]/bf16,
    v_cache: [Nb, One, Hkv, Dh]/bf16,
    input_norm_weight: [D]/bf16"""
_ENDED: Final = """\
    weighted_v: [T, Dq]/bf16,
    hidden_states: [T, D]/bf16,
    attn_o_proj_weight: [D, Dq]/bf16,
    post_attention_norm_weight: [D]/bf16,
    mlp_gate_proj_weight: [F, D]/bf16,
    mlp_up_proj_weight: [F, D]/bf16,
    mlp_down_proj_weight: [D, F]/bf16,"""
_TEXTS: Final[dict[str, str]] = {
    "fake_first_tokenwise": f"""\
    embedding_table: [V, D]/bf16,
    input_ids: [T]/i32,
{_TOKEN_WISE}
) -> [T, Dq]/bf16, [T, D]/bf16:""",
    "fake_mid_tokenwise": f"""\
{_ENDED}
{_TOKEN_WISE}
) -> [T, Dq]/bf16, [T, D]/bf16:""",
    "fake_full_attention": """\
    query: [T, Dq]/bf16,
    kv_gather_index: [One, A]/i32,
    k_cache: [Nb, One, Hkv, Dh]/bf16,
    v_cache: [Nb, One, Hkv, Dh]/bf16,
    attention_mask: [One, T, A]/bool
) -> [T, Dq]/bf16:""",
    "fake_last_tokenwise_with_lm_head": f"""\
{_ENDED}
    final_norm_weight: [D]/bf16,
    lm_head_weight: dram([Broadcast] | [V @ Vpad, D])/bf16 @ original=[V, D]
) -> dram([Broadcast] | [T, V @ Vpad])/bf16 @ original=[T, V]:""",
}


@dataclass(frozen=True)
class FakeKernel:
    """What a factory makes: the name and the text that the vendor's kernels have."""

    name: str
    dsl: str


def library(family: str) -> Any:
    """The module of a family: `llama` has its four factories.

    Raises:
        ModuleNotFoundError: there is none in this fake.
    """
    if family != "llama":
        raise ModuleNotFoundError(f"the fake has no kernels for {family!r}")
    prefix = "llama3_1_8b_w16a16_"
    makers: dict[str, Callable[..., FakeKernel]] = {
        "first_tokenwise": _token_wise("fake_first_tokenwise"),
        "mid_tokenwise": _token_wise("fake_mid_tokenwise"),
        "full_attention": _attention,
        "last_tokenwise_with_lm_head": _last,
    }
    return SimpleNamespace(**{prefix + name: maker for name, maker in makers.items()})


def _token_wise(name: str) -> Callable[..., FakeKernel]:
    def make(
        num_tokens: int,
        num_kv_cache_blocks: int,
        hf_config_overrides: Mapping[str, int] | None = None,
    ) -> FakeKernel:
        return _kernel(name, hf_config_overrides, T=num_tokens, Nb=num_kv_cache_blocks)

    return make


def _attention(
    batch_size: int,
    attention_size: int,
    input_ids_size: int,
    num_kv_cache_blocks: int,
    hf_config_overrides: Mapping[str, int] | None = None,
) -> FakeKernel:
    if batch_size != 1:
        raise ValueError("the fake attends to one prompt at a time")
    return _kernel(
        "fake_full_attention",
        hf_config_overrides,
        A=attention_size,
        T=input_ids_size,
        Nb=num_kv_cache_blocks,
    )


def _last(num_tokens: int, hf_config_overrides: Mapping[str, int] | None = None) -> FakeKernel:
    return _kernel("fake_last_tokenwise_with_lm_head", hf_config_overrides, T=num_tokens)


def _kernel(name: str, overrides: Mapping[str, int] | None, **sizes: int) -> FakeKernel:
    config = dict(overrides or {})
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, kv_heads = hidden // heads, config["num_key_value_heads"]
    axes = {
        "D": hidden,
        "Dq": hidden,
        "Dh": head_dim,
        "Dhr": head_dim // 2,
        "Dkv": kv_heads * head_dim,
        "F": config["intermediate_size"],
        "Hkv": kv_heads,
        "One": 1,
        "Re": config["max_position_embeddings"],
        "Two": 2,
        "V": config["vocab_size"],
        "Vpad": -(-config["vocab_size"] // VOCAB_STEP) * VOCAB_STEP,
        **sizes,
    }
    listed = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    dsl = f"def {name}<{listed}>(\n{_TEXTS[name]}\n    fake\n"
    return FakeKernel(name, dsl)


def compute(dsl: str, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a kernel of this library on host memory; caches are changed in place."""
    signature = read_signature(dsl)
    names = [each.name.removesuffix(PLACED) for each in signature.arguments]
    named = dict(zip(names, given, strict=True))
    return _ARITHMETIC[signature.name](named)


Named = Mapping[str, torch.Tensor]


def _first(given: Named) -> list[torch.Tensor]:
    return _begun(given["embedding_table"][given["input_ids"].long()], given)


def _mid(given: Named) -> list[torch.Tensor]:
    return _begun(_ended(given), given)


def _begun(hidden: torch.Tensor, given: Named) -> list[torch.Tensor]:
    """The query and the hidden states; K and V go to their slots."""
    normed = _norm(hidden, given["input_norm_weight"])
    head_dim = given["k_cache"].shape[-1]
    turns = given["rope_table"][given["position_ids"].long()].float()
    query, key, value = (
        _heads(_linear(normed, given[f"attn_{part}_proj_weight"]), head_dim) for part in "qkv"
    )
    slots = given["kv_scatter_index"][0].long()
    given["k_cache"][slots] = _turned(key, turns)[:, None]
    given["v_cache"][slots] = value[:, None]
    return [_turned(query, turns).flatten(1), hidden]


def _full_attention(given: Named) -> list[torch.Tensor]:
    slots = given["kv_gather_index"][0].long()
    keys, values = (given[name][slots, 0].float() for name in ("k_cache", "v_cache"))
    query = _heads(given["query"].float(), keys.shape[-1])
    times = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(times, 1) for each in (keys, values))
    scores = torch.einsum("thd,ahd->hta", query, keys) * keys.shape[-1] ** -0.5
    weights = scores.masked_fill(~given["attention_mask"], -torch.inf).softmax(-1)
    return [torch.einsum("hta,ahd->thd", weights, values).flatten(1).to(_BF16)]


def _last_tokenwise(given: Named) -> list[torch.Tensor]:
    normed = _norm(_ended(given), given["final_norm_weight"])
    head = given["lm_head_weight"]
    logits = _linear(normed, head.reshape(head.shape[-2:]))
    return [logits.reshape(*head.shape[:-2], *logits.shape)]


def _ended(given: Named) -> torch.Tensor:
    mixed = _linear(given["weighted_v"], given["attn_o_proj_weight"])
    hidden = given["hidden_states"] + mixed
    normed = _norm(hidden, given["post_attention_norm_weight"])
    gate = silu(_linear(normed, given["mlp_gate_proj_weight"]).float()).to(_BF16)
    wide = gate * _linear(normed, given["mlp_up_proj_weight"])
    return hidden + _linear(wide, given["mlp_down_proj_weight"])


def _linear(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (states.float() @ weight.float().T).to(_BF16)


def _heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    return states.reshape(len(states), -1, head_dim)


def _norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = states.float()
    scale = (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    return (wide * scale * weight.float()).to(_BF16)


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim]: element i turns with element i + head_dim / 2."""
    halves = heads.float().reshape(*heads.shape[:2], 2, -1)
    return torch.einsum("tioj,thji->thoi", turns, halves).flatten(2).to(_BF16)


_ARITHMETIC: Final[dict[str, Callable[[Named], list[torch.Tensor]]]] = {
    "fake_first_tokenwise": _first,
    "fake_mid_tokenwise": _mid,
    "fake_full_attention": _full_attention,
    "fake_last_tokenwise_with_lm_head": _last_tokenwise,
}
